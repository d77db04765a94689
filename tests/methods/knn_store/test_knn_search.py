"""Search of a datastore's keys: exactly the nearest, the same bits in any batch, ties by id, whatever finds them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from specrag.errors import InputError
from specrag.methods.knn_lm.store.index import (
    FlatKeys,
    GraphSettings,
    KeyIndex,
    Neighbours,
    QuantiserSettings,
)
from specrag.methods.knn_lm.store.scoring import distance_slack, squared_distance, squared_norms, widen
from specrag.retrieval.index.base import norms
from tests.methods.knn_store.knn_toys import nearest


def _flat(keys: np.ndarray, threads: int = 1) -> FlatKeys:
    bits = keys.astype(np.float16).view(np.uint16)
    squares = np.empty(len(keys), dtype=np.float32)
    squared_norms(bits, squares)
    return FlatKeys(bits, squares, float(np.sqrt(squares.max())), threads)


def _clustered(count: int, dimension: int, seed: int = 0) -> np.ndarray:
    """Keys in clusters, far from the origin as hidden states are, many of them equal."""
    generator = np.random.default_rng(seed)
    centres = generator.normal(5.0, 3.0, (max(count // 8, 1), dimension))
    spread = generator.normal(0.0, 0.3, (count, dimension))
    keys = centres[generator.integers(0, len(centres), count)] + spread
    keys[1::5] = keys[::5][: len(keys[1::5])]
    return keys.astype(np.float32)


def _pairs(found: Neighbours) -> list[tuple[float, int]]:
    return list(zip(found.distances.tolist(), found.ids.tolist(), strict=True))


def test_half_precision_bits_become_the_numbers_that_they_are() -> None:
    halves = np.arange(1 << 16, dtype=np.uint16)
    expected = halves.view(np.float16).astype(np.float32)
    out = np.empty(len(halves), dtype=np.float32)
    widen(halves, out)
    finite = np.isfinite(expected)
    assert np.array_equal(out[finite].view(np.uint32), expected[finite].view(np.uint32))


@pytest.mark.parametrize(("count", "dimension", "k"), [(1, 3, 1), (40, 8, 40), (300, 19, 7), (300, 64, 64)])
def test_flat_search_finds_exactly_the_nearest(count: int, dimension: int, k: int) -> None:
    keys = _clustered(count, dimension)
    flat = _flat(keys)
    halves = keys.astype(np.float16).astype(np.float32)
    queries = np.concatenate([halves[:3], _clustered(4, dimension, seed=9)]).astype(np.float32)
    for query, found in zip(queries, flat.search(queries, k), strict=True):
        assert _pairs(found) == nearest(query, halves, k)


def test_a_batch_and_threads_change_no_bit() -> None:
    keys = _clustered(70_000, 16)
    flat, threaded = _flat(keys), _flat(keys, threads=3)
    queries = _clustered(37, 16, seed=3)
    alone = [flat.search(query[None], 12)[0] for query in queries]
    for index in (flat, threaded):
        for one, other in zip(alone, index.search(queries, 12), strict=True):
            assert _pairs(one) == _pairs(other)
    wider = flat.search(queries[:2], 12, most=40)
    assert [len(found) for found in wider] == [40, 40]
    assert [_pairs(found)[:12] for found in wider] == [_pairs(found) for found in alone[:2]]


def test_slack_covers_what_float32_products_lose() -> None:
    generator = np.random.default_rng(1)
    for scale in (1e-3, 1.0, 300.0):
        keys = (generator.normal(0, 1, (400, 96)) * scale + 3 * scale).astype(np.float16)
        queries = keys[:20].astype(np.float32) + generator.normal(0, 0.01 * scale, (20, 96)).astype(
            np.float32
        )
        wide = keys.astype(np.float32)
        squares = np.square(wide, dtype=np.float64).sum(axis=1)
        slack = distance_slack(norms(queries), float(np.sqrt(squares.max())), 96)
        for place, query in enumerate(queries):
            own = float(np.square(query, dtype=np.float64).sum())
            # The worst order of summation that is easy to have: one float32 after the other.
            products = np.cumsum(wide * query, axis=1, dtype=np.float32)[:, -1].astype(np.float64)
            rough = squares.astype(np.float32).astype(np.float64) - 2 * products + own
            exact = [float(squared_distance(query, key)) for key in wide]
            assert (np.abs(rough - exact) <= slack[place]).all()


@pytest.fixture(scope="module")
def indexes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, KeyIndex]:
    from specrag.methods.knn_lm.store.approximate import GraphKeys, QuantisedKeys

    flat = _flat(_clustered(12_000, 16))
    folder = tmp_path_factory.mktemp("indexes")
    graph, quantiser = GraphSettings(ef_search=48), QuantiserSettings(cells=64, probes=8)
    GraphKeys.build(flat, graph, folder / "hnsw.faiss")
    QuantisedKeys.build(flat, quantiser, folder / "pq.faiss")
    return {
        "flat": flat,
        "hnsw": GraphKeys.load(folder / "hnsw.faiss", flat, graph),
        "pq": QuantisedKeys.load(folder / "pq.faiss", flat, quantiser),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hnsw", "pq"])
def test_approximate_search_measures_by_the_kernel(indexes: dict[str, KeyIndex], name: str) -> None:
    queries = _clustered(45, 16, seed=5)
    exact = indexes["flat"].search(queries, 20)
    alone = [indexes[name].search(query[None], 20)[0] for query in queries]
    batch = indexes[name].search(queries, 20)
    assert [_pairs(found) for found in alone] == [_pairs(found) for found in batch]
    recall = [len(set(one.ids) & set(two.ids)) / 20 for one, two in zip(batch, exact, strict=True)]
    assert np.mean(recall) > 0.75  # a fifth of the keys are equal to others
    flat = indexes["flat"]
    assert isinstance(flat, FlatKeys)
    for query, found in zip(queries, batch, strict=True):
        halves = flat.keys[found.ids].view(np.float16).astype(np.float32)
        ranked = nearest(query, halves, 20)
        assert [distance for distance, _ in ranked] == found.distances.tolist()


@pytest.mark.parametrize("name", ["hnsw", "pq"])
def test_more_neighbours_leave_the_first_as_they_are(indexes: dict[str, KeyIndex], name: str) -> None:
    queries = _clustered(6, 16, seed=6)
    few = indexes[name].search(queries, 5)
    more = indexes[name].search(queries, 5, most=17)
    assert [_pairs(found) for found in few] == [_pairs(found)[:5] for found in more]
    assert min(len(found) for found in more) > 5
    every = indexes[name].search(queries, 12_000)  # more than a walk or some cells give
    assert [len(found) for found in every] == [12_000] * 6


def test_what_cannot_be_searched_for_is_refused(indexes: dict[str, KeyIndex]) -> None:
    query = np.zeros((1, 16), dtype=np.float32)
    for index in indexes.values():
        for k in (0, 12_001, True):
            with pytest.raises(InputError, match="12,000, the number of the datastore's entries"):
                index.search(query, k)
        with pytest.raises(InputError, match=r"float32 \[queries, 16\]"):
            index.search(np.zeros((1, 15), dtype=np.float32), 1)
        with pytest.raises(InputError, match="not finite"):
            index.search(query * np.nan, 1)


def test_too_few_keys_are_not_quantised(tmp_path: Path) -> None:
    from specrag.methods.knn_lm.store.approximate import QuantisedKeys

    with pytest.raises(InputError, match="needs 10,240 entries"):
        QuantisedKeys.build(_flat(_clustered(50, 4)), QuantiserSettings(), tmp_path / "pq.faiss")
