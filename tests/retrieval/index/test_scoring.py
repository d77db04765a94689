"""The kernel: the formulas as documented, to the bit, and the error bounds that exact search relies on."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrag.retrieval.index.scoring import (
    UNIT_ROUNDOFF,
    Floats,
    dense_score,
    dense_scores,
    dense_slack,
    hybrid_score,
    hybrid_slack,
    largest_norm,
    sparse_bound,
    sparse_score,
)

DIMENSIONS = st.sampled_from([1, 2, 7, 8, 9, 16, 63, 384, 385])
SCALES = st.sampled_from([1e-30, 1e-15, 1.0, 1e12])


def _pair(seed: int, dimension: int, scale: float) -> Floats:
    rng = np.random.default_rng(seed)
    spread = np.exp(3 * rng.standard_normal((2, dimension)))
    return (rng.standard_normal((2, dimension)) * spread * scale).astype(np.float32)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), dimension=DIMENSIONS, scale=SCALES)
def test_dense_score_sums_in_the_documented_order(seed: int, dimension: int, scale: float) -> None:
    query, passage = _pair(seed, dimension, scale)
    lanes = [0.0] * 8
    whole = dimension - dimension % 8
    for i in range(dimension):
        lanes[i % 8 if i < whole else 0] += float(query[i]) * float(passage[i])
    total = ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]))
    assert np.float32(dense_score(query, passage)).tobytes() == np.float32(total).tobytes()


def test_dense_score_is_the_same_for_mapped_and_copied_vectors() -> None:
    vectors = np.random.default_rng(0).standard_normal((40, 384)).astype(np.float32)
    frozen = vectors.copy()
    frozen.flags.writeable = False  # another type for the compiler, as a mapped file is
    ids = np.arange(40)
    first, second = np.empty(40, dtype=np.float32), np.empty(40, dtype=np.float32)
    dense_scores(vectors[0], vectors, ids, first)
    dense_scores(frozen[0], frozen, ids[::-1].copy(), second)
    assert first.tobytes() == second[::-1].tobytes()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), dimension=DIMENSIONS, scale=SCALES, weight=st.floats(0, 1))
def test_fast_arithmetic_stays_within_the_bounds(
    seed: int, dimension: int, scale: float, weight: float
) -> None:
    pair = _pair(seed, dimension, scale)
    query, passage = pair
    norms = np.linalg.norm(pair.astype(np.float64), axis=1)
    exact = np.float64(dense_score(query, passage))
    backwards = np.float32(0)
    for i in reversed(range(dimension)):
        backwards += query[i] * passage[i]
    slack = dense_slack(norms[:1], norms[1], dimension)[0]
    fused = hybrid_slack(norms[:1], norms[1], dimension, weight)[0]
    sparse, bound = np.float32(0.7), 0.9
    for fast in (np.float64(backwards), np.float64(passage @ query), np.float64((pair @ pair.T)[0, 1])):
        assert abs(fast - exact) <= slack
        estimate = weight * fast + (1 - weight) / bound * np.float64(sparse)
        assert abs(estimate - np.float64(hybrid_score(np.float32(exact), sparse, bound, weight))) <= fused


def test_the_bound_is_tight_enough_to_rule_passages_out() -> None:
    assert dense_slack(np.ones(1), 1.0, 384)[0] < 400 * UNIT_ROUNDOFF


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(0, 12))
def test_sparse_score_sums_in_the_order_of_the_terms(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    table = rng.random((9, 30)).astype(np.float32) * (rng.random((9, 30)) < 0.4)
    terms = np.sort(rng.integers(0, 9, count)).astype(np.int32)
    starts = np.concatenate([[0], np.cumsum((table > 0).sum(axis=1))]).astype(np.int64)
    postings = np.nonzero(table)[1].astype(np.int32)
    weights = table[table > 0]
    for passage in range(30):
        total = 0.0
        for term in terms:
            total += float(table[term, passage])
        score = sparse_score(terms, starts, postings, weights, passage)
        assert np.float32(score).tobytes() == np.float32(total).tobytes()
        assert score <= np.float32(sparse_bound(terms, table.max(axis=1)))


@settings(deadline=None)
@given(
    dense=st.floats(-1, 1, width=32),
    sparse=st.floats(0, 50, width=32),
    over=st.floats(1, 3),
    weight=st.floats(0, 1),
)
def test_hybrid_score_is_the_documented_formula(
    dense: float, sparse: float, over: float, weight: float
) -> None:
    bound = max(sparse, 0.5) * over
    expected = np.float32(weight * dense + (1 - weight) * (sparse / bound))
    assert hybrid_score(np.float32(dense), np.float32(sparse), bound, weight) == expected


def test_without_a_known_term_the_sparse_part_is_nothing() -> None:
    assert sparse_bound(np.empty(0, dtype=np.int32), np.ones(3, dtype=np.float32)) == 0.0
    assert hybrid_score(np.float32(0.5), np.float32(0.0), 0.0, 0.25) == np.float32(0.125)


def test_largest_norm_finds_what_is_not_a_number() -> None:
    vectors = np.array([[3, 4], [0, 0]], dtype=np.float32)
    assert largest_norm(vectors) == 5.0
    for element in (np.nan, np.inf, -np.inf):
        vectors[0, 1] = element
        assert not largest_norm(vectors) < np.inf
    assert largest_norm(np.empty((0, 3), dtype=np.float32)) == 0.0


@pytest.mark.parametrize("module", ["scoring", "flat", "hnsw", "bm25", "hybrid"])
def test_indexes_work_without_torch(module: str) -> None:
    code = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
    code += f"import specrag.retrieval.index.{module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
