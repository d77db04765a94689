"""Small datastores: a model whose hidden states are a table, texts that repeat themselves, and a plain oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from specrag.methods.knn_lm.store.build import DatastoreReport, build_datastore
from specrag.methods.knn_lm.store.index import IndexSettings
from specrag.methods.knn_lm.store.manifest import ModelRecord, WindowSettings
from specrag.methods.knn_lm.store.windows import Tokens
from specrag.models.toy import ToyModel
from specrag.retrieval.progress import Progress

VOCABULARY = 24


def toy(seed: int = 0, order: int = 2) -> ToyModel:
    """A model whose keys depend on its last two tokens: equal contexts have equal keys, so that ties abound."""
    return ToyModel(VOCABULARY, order=order, seed=seed)


def record(name: str = "toy", fingerprint: str = "0", dtype: str = "fp32") -> ModelRecord:
    return ModelRecord(name, fingerprint, dtype, VOCABULARY, VOCABULARY)


def texts(count: int = 6, length: int = 90, seed: int = 0) -> list[Tokens]:
    """Texts that share phrases."""
    generator = np.random.default_rng(seed)
    phrases = [generator.integers(0, VOCABULARY, 12) for _ in range(5)]
    return [
        np.concatenate([phrases[n] for n in generator.integers(0, 5, length // 12 + 1)])[:length].astype(
            np.int32
        )
        for _ in range(count)
    ]


def build(
    folder: Path,
    documents: Sequence[Tokens] | None = None,
    *,
    model: ToyModel | None = None,
    made_by: ModelRecord | None = None,
    windows: WindowSettings | None = None,
    indexes: Sequence[IndexSettings] = (),
    progress: Callable[[Progress], None] | None = None,
) -> DatastoreReport:
    return build_datastore(
        texts() if documents is None else documents,
        folder,
        toy() if model is None else model,
        record() if made_by is None else made_by,
        windows,
        indexes,
        progress,
    )


def nearest(query: np.ndarray, keys: np.ndarray, k: int) -> list[tuple[float, int]]:
    """The k nearest of some keys by plain arithmetic: distance and number, ties by number."""
    pairs = []
    for number, key in enumerate(keys.astype(np.float64)):
        lanes = [0.0] * 8
        whole = len(key) - len(key) % 8
        for place, value in enumerate(key):
            lanes[place % 8 if place < whole else 0] += (float(query[place]) - float(value)) ** 2
        a, b, c, d, e, f, g, h = lanes
        pairs.append((float(np.float32(((a + e) + (c + g)) + ((b + f) + (d + h)))), number))
    return sorted(pairs)[:k]
