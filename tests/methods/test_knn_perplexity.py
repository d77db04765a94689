"""Perplexity with and without neighbours: equal to plain sums over every token, however the text is cut."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest

from specrag.engine.executor import run
from specrag.errors import InputError
from specrag.methods.knn_lm.mixture import Mixture
from specrag.methods.knn_lm.perplexity import Measured, measuring
from specrag.methods.knn_lm.store.datastore import Datastore
from specrag.methods.knn_lm.store.manifest import WindowSettings
from specrag.methods.knn_lm.store.windows import Tokens
from specrag.models.toy import ToyModel
from tests.methods.knn_store.knn_toys import nearest, toy
from tests.methods.knn_toys import make_datastore, written


@pytest.fixture(scope="module")
def model() -> ToyModel:
    return toy(seed=1)


@pytest.fixture(scope="module")
def store(model: ToyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Datastore]:
    with make_datastore(tmp_path_factory.mktemp("store"), model, 2) as store:
        yield store


def plain_perplexity(
    model: ToyModel, store: Datastore, texts: list[Tokens], mixture: Mixture | None
) -> float:
    keys = store.halves.view(np.float16).astype(np.float32)
    logs = []
    for text in texts:
        for place in range(1, len(text)):
            logits = model.logits(text[:place].tolist())
            exact = np.exp(logits.astype(np.float64))
            share = exact[text[place]] / exact.sum()
            if mixture is not None:
                near = nearest(logits, keys, mixture.k)
                weights = [math.exp(-distance / mixture.temperature) for distance, _ in near]
                values = store.values(np.array([entry for _, entry in near]))
                found = sum(w for w, value in zip(weights, values, strict=True) if value == text[place])
                far = near[0][0] / mixture.reach if mixture.reach else 0.0
                counts = mixture.weight * math.exp(-far)
                share = counts * found / sum(weights) + (1 - counts) * share
            logs.append(math.log(share))
    return math.exp(-sum(logs) / len(logs))


@pytest.mark.parametrize("window", [WindowSettings(500, 100), WindowSettings(12, 4)])
def test_it_is_what_plain_sums_give(model: ToyModel, store: Datastore, window: WindowSettings) -> None:
    texts = written(model, 2, length=30, seed=50)
    told: list[int] = []
    work = measuring(model, texts, window, store, "flat", 20, lambda done, _: told.append(done))
    measured = run(work)
    assert told[-1] == len(measured.log_probs) == 58
    assert measured.perplexity() == pytest.approx(plain_perplexity(model, store, texts, None))
    mixtures = [
        Mixture(20, 0.4, 3.0),
        Mixture(7, 0.9, 50.0),
        Mixture(1, 0.2, 1.0),
        Mixture(7, 0.9, 50.0, 20.0),
    ]
    expected = [plain_perplexity(model, store, texts, mixture) for mixture in mixtures]
    assert len(set(expected)) == len(mixtures)
    assert [measured.perplexity(mixture) for mixture in mixtures] == pytest.approx(expected, rel=1e-5)
    assert measured.sweep(mixtures) == pytest.approx(expected, rel=1e-5)
    assert measured.perplexity(Mixture(3, 0.0, 1.0)) == pytest.approx(measured.perplexity())
    with pytest.raises(InputError, match="20 neighbours were measured"):
        measured.perplexity(Mixture(k=21))


def test_model_alone_needs_no_datastore(model: ToyModel, store: Datastore) -> None:
    texts = written(model, 1, length=30, seed=9)
    alone = run(measuring(model, texts, WindowSettings()))
    assert alone.distances.shape == (29, 0)
    assert alone.perplexity() == pytest.approx(plain_perplexity(model, store, texts, None))


def test_a_token_that_no_neighbour_has_is_impossible_alone() -> None:
    measured = Measured(np.log([0.5]), np.array([[1.0]], dtype=np.float32), np.array([[False]]))
    assert measured.perplexity(Mixture(1, 1.0, 1.0)) == math.inf
    assert measured.perplexity(Mixture(1, 0.5, 1.0)) == pytest.approx(4.0)


def test_nothing_to_measure_is_said(model: ToyModel, store: Datastore) -> None:
    with pytest.raises(InputError, match="at least two tokens"):
        run(measuring(model, [np.array([1], dtype=np.int32)], WindowSettings()))
    with pytest.raises(InputError, match="the datastore's entries"):
        run(measuring(model, written(model, 1), WindowSettings(), store, "flat", 239))
