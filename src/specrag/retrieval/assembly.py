"""The second half of a build: the passages of a new generation to vectors and indexes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from specrag.retrieval import bm25, flat, hnsw
from specrag.retrieval.bm25 import BM25Index
from specrag.retrieval.disk import write_errors
from specrag.retrieval.flat import VECTORS_FILE, FlatIndex
from specrag.retrieval.hnsw import HnswIndex
from specrag.retrieval.passage_store import PASSAGES, PassageStore
from specrag.retrieval.progress import Progress, Reporter
from specrag.retrieval.vector_shards import VectorShards, write_vectors

if TYPE_CHECKING:
    from specrag.retrieval.encoder import Encoder

GENERATION_FILES = (PASSAGES, *flat.FILES, *hnsw.FILES, *bm25.FILES)
"""What a finished generation holds."""

_SHARD = 2048  # passages encoded between two writes to the disk: the most that a kill can cost
_BLOCK = 4096  # vectors copied at a time


class OldVectors:
    """The vectors of the current generation, found by their passages' keys.

    Args:
        store: its passages.
        folder: where its files lie.
    """

    def __init__(self, store: PassageStore, folder: Path) -> None:
        self._vectors = np.load(folder / VECTORS_FILE, mmap_mode="r")
        self._rows = {key: row for row, key in enumerate(store.keys())}

    def __contains__(self, key: bytes) -> bool:
        return key in self._rows

    def find(self, key: bytes) -> np.ndarray:
        """The vector of a passage. float32 [dimension]."""
        vector: np.ndarray = self._vectors[self._rows[key]]
        return vector


def encode_missing(
    folder: Path,
    store: PassageStore,
    old: OldVectors | None,
    shards: VectorShards,
    encoder: Callable[[], Encoder],
    report: Reporter,
) -> int:
    """Encode the passages that neither the current generation nor an unfinished build has encoded.

    Passages are put into the shards as they are done, so that a kill costs the last few at most.

    Args:
        folder: the knowledge base.
        store: the new passages.
        old: the vectors of the current generation.
        shards: those of an unfinished build, open.
        encoder: gives the encoder; called only if something is missing.

    Returns:
        How many passages were encoded.

    Raises:
        KnowledgeBaseError: the disk refuses; what was encoded before stays.
    """
    keys = store.keys()
    missing: dict[bytes, int] = {}
    for number, key in enumerate(keys):
        if key not in shards and (old is None or key not in old):
            missing.setdefault(key, number)
    done, total = len(keys) - len(missing), len(keys)
    report(Progress("encoding", done, total))
    numbers = list(missing.values())
    for start in range(0, len(numbers), _SHARD):
        some = numbers[start : start + _SHARD]
        progress = _Encoding(done, total, report)
        vectors = encoder().encode_passages(store.texts_of(some), progress.advance)
        with write_errors(folder):
            shards.add([keys[number] for number in some], vectors)
        done += len(some)
    report(Progress("encoding", total, total))
    return len(missing)


class _Encoding:
    """Counts the passages of one shard as the encoder finishes them."""

    def __init__(self, done: int, total: int, report: Reporter) -> None:
        self.done = done
        self.total = total
        self.report = report

    def advance(self, finished: int) -> None:
        self.done += finished
        self.report(Progress("encoding", self.done, self.total))


def write_indexes(
    folder: Path,
    new: Path,
    old: OldVectors | None,
    shards: VectorShards,
    dimension: int,
    report: Reporter,
) -> None:
    """Write all files of a generation but its passages, which are there.

    Args:
        folder: the knowledge base.
        new: the generation.

    Raises:
        KnowledgeBaseError: the disk refuses.
    """
    store = PassageStore(new / PASSAGES)
    try:
        keys, texts = store.keys(), list(store.texts())
    finally:
        store.close()
    report(Progress("indexing", 0, 3))
    with write_errors(folder):
        write_vectors(new / VECTORS_FILE, len(keys), dimension, _blocks(keys, old, shards))
        vectors = np.load(new / VECTORS_FILE, mmap_mode="r")
        flat_index = FlatIndex.build(vectors)
        flat_index.save(new)
    report(Progress("indexing", 1, 3))
    graph = HnswIndex.build(flat_index)
    with write_errors(folder):
        graph.save(new)
    del graph
    report(Progress("indexing", 2, 3))
    terms = BM25Index.build(texts)
    with write_errors(folder):
        terms.save(new)
    report(Progress("indexing", 3, 3))


def _blocks(keys: Sequence[bytes], old: OldVectors | None, shards: VectorShards) -> Iterator[np.ndarray]:
    for start in range(0, len(keys), _BLOCK):
        yield np.stack(
            [
                shards.find(key) if old is None or key not in old else old.find(key)
                for key in keys[start : start + _BLOCK]
            ]
        )
