"""Exact dense search: true to float64, near-ties included, and one reading of the vectors for a batch."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrag.errors import InputError
from specrag.retrieval.index.base import Query
from specrag.retrieval.index.flat import FlatIndex


def _unit(rng: np.random.Generator, count: int, dimension: int) -> npt.NDArray[np.float32]:
    vectors = rng.standard_normal((count, dimension))
    unit: npt.NDArray[np.float64] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit.astype(np.float32)


def _queries(vectors: npt.NDArray[np.float32]) -> list[Query]:
    return [Query("", vector) for vector in vectors]


@pytest.mark.parametrize("dimension", [1, 7, 64, 384])
def test_top_k_equals_float64_up_to_rounding(dimension: int) -> None:
    rng = np.random.default_rng(dimension)
    vectors, queries = _unit(rng, 5000, dimension), _unit(rng, 33, dimension)
    exact = queries.astype(np.float64) @ vectors.astype(np.float64).T
    for row, ranking in zip(exact, FlatIndex.build(vectors).search(_queries(queries), 20), strict=True):
        best = np.sort(row)[::-1][:20]
        np.testing.assert_allclose(ranking.scores, best, rtol=6e-8, atol=1e-15)
        np.testing.assert_allclose(row[ranking.ids], best, rtol=1.2e-7, atol=1e-15)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), scale=st.sampled_from([1e-18, 1.0, 1e15]), k=st.sampled_from([1, 5, 60]))
def test_near_ties_are_ranked_by_the_kernel(seed: int, scale: float, k: int) -> None:
    # Passages so close that the matrix product's own rounding would shuffle them.
    rng = np.random.default_rng(seed)
    base = _unit(rng, 1, 384)
    vectors = base * (1 + 2e-7 * rng.standard_normal((500, 384)))
    index = FlatIndex.build((vectors * scale).astype(np.float32))
    queries = _queries(_unit(rng, 5, 384) + 3 * base)
    scores = index.score(queries, np.arange(500))
    for row, ranking in zip(scores, index.search(queries, k), strict=True):
        expected = np.lexsort((np.arange(500), -row))[:k]
        assert ranking.ids.tolist() == expected.tolist()
        assert ranking.scores.tobytes() == row[expected].tobytes()


def _fastest(call: Callable[[], object]) -> float:
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def test_a_batch_reads_the_vectors_once() -> None:
    # 32 readings of 61 MB against one and a matrix product: about five times as long.
    rng = np.random.default_rng(0)
    index = FlatIndex.build(_unit(rng, 40_000, 384))
    queries = _queries(_unit(rng, 32, 384))
    batch = _fastest(lambda: index.search(queries, 10))
    single = _fastest(lambda: [index.search([query], 10) for query in queries])
    assert batch < 0.6 * single


def test_an_empty_index_finds_nothing() -> None:
    index = FlatIndex.build(np.empty((0, 4), dtype=np.float32))
    assert len(index) == 0
    assert [len(found) for found in index.search(_queries(np.ones((2, 4), dtype=np.float32)), 3)] == [0, 0]


@pytest.mark.parametrize(
    "vectors",
    [
        np.array([[1, np.nan]], dtype=np.float32),
        np.array([[0, 0], [np.inf, 0]], dtype=np.float32),
        np.array([[1e30, 0]], dtype=np.float32),
        np.ones((2, 3)),
        np.ones(3, dtype=np.float32),
        np.ones((2, 0), dtype=np.float32),
        np.ones((3, 8), dtype=np.float32)[:, ::2],
    ],
    ids=["nan", "inf", "huge", "float64", "one row", "no columns", "strided"],
)
def test_unusable_vectors_are_named(vectors: npt.NDArray[np.float32]) -> None:
    with pytest.raises(InputError, match=r"^vectors: "):
        FlatIndex.build(vectors)
