"""The fused score: its formula over whole corpora, its two ends, near-ties, mismatched parts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from specrag.errors import InputError
from specrag.retrieval.index import flat as flat_module
from specrag.retrieval.index.base import Query
from specrag.retrieval.index.bm25 import BM25Index
from specrag.retrieval.index.flat import FlatIndex
from specrag.retrieval.index.hybrid import HybridIndex

WORDS = [f"word{number}" for number in range(200)]
COUNT = 3000
EVERYTHING = np.arange(COUNT)


def _unit(rng: np.random.Generator, count: int) -> npt.NDArray[np.float32]:
    vectors = rng.standard_normal((count, 96))
    unit: npt.NDArray[np.float64] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit.astype(np.float32)


@pytest.fixture(scope="module", autouse=True)
def _small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flat_module, "_BLOCK_BYTES", 0)  # a dozen blocks
        yield


@pytest.fixture(scope="module")
def flat() -> FlatIndex:
    return FlatIndex.build(_unit(np.random.default_rng(0), COUNT))


@pytest.fixture(scope="module")
def bm25() -> BM25Index:
    rng = np.random.default_rng(1)
    return BM25Index.build([" ".join(rng.choice(WORDS, size=20)) for _ in range(COUNT)])


@pytest.fixture(scope="module")
def queries(bm25: BM25Index) -> list[Query]:
    rng = np.random.default_rng(2)
    texts = [" ".join(rng.choice(WORDS, size=size)) for size in (1, 3, 8, 8, 30, 0)]
    vectors = _unit(rng, len(texts))
    return [Query(text, vector, bm25.terms(text)) for text, vector in zip(texts, vectors, strict=True)]


@pytest.mark.parametrize("weight", [0.0, 0.2, 0.5, 1.0])
def test_search_ranks_by_the_formula(
    flat: FlatIndex, bm25: BM25Index, queries: list[Query], weight: float
) -> None:
    index = HybridIndex(flat, bm25, weight)
    dense, sparse = flat.score(queries, EVERYTHING), bm25.score(queries, EVERYTHING)
    for place, (query, ranking) in enumerate(zip(queries, index.search(queries, 15), strict=True)):
        assert query.terms is not None
        postings = bm25.postings([query.terms])
        bound = postings.largest[postings.terms[0]].astype(np.float64).sum()
        assert bound == bm25.bound(query.terms)
        part = sparse[place] / bound if bound else np.zeros(COUNT)
        expected = np.sort(weight * dense[place].astype(np.float64) + (1 - weight) * part)[::-1][:15]
        np.testing.assert_allclose(ranking.scores, expected, rtol=2e-7, atol=1e-9)


def test_blocks_without_allowed_passages_are_passed_over(
    flat: FlatIndex, bm25: BM25Index, queries: list[Query]
) -> None:
    index = HybridIndex(flat, bm25, 0.3)
    allowed = (EVERYTHING // 700) % 2 == 1
    ids = np.flatnonzero(allowed)
    scores = index.score(queries, ids)
    for row, ranking in zip(scores, index.search(queries, 9, allowed), strict=True):
        assert ranking.ids.tolist() == ids[np.lexsort((ids, -row))[:9]].tolist()


def test_the_two_ends_are_the_two_indexes(flat: FlatIndex, bm25: BM25Index, queries: list[Query]) -> None:
    only_dense = HybridIndex(flat, bm25, 1.0).search(queries, 10)
    for found, expected in zip(only_dense, flat.search(queries, 10), strict=True):
        assert found.ids.tolist() == expected.ids.tolist()
        assert found.scores.tobytes() == expected.scores.tobytes()
    only_sparse = HybridIndex(flat, bm25, 0.0).search(queries[:5], 1)
    for found, expected in zip(only_sparse, bm25.search(queries[:5], 1), strict=True):
        assert found.scores[0] > 0
        assert found.ids.tolist() == expected.ids.tolist()


def test_the_sparse_part_lies_between_0_and_1(bm25: BM25Index, flat: FlatIndex, queries: list[Query]) -> None:
    scores = HybridIndex(flat, bm25, 0.0).score(queries, EVERYTHING)
    assert scores.min() == 0.0
    assert scores.max() <= 1.0


def test_without_known_terms_it_ranks_by_the_dense_part(
    flat: FlatIndex, bm25: BM25Index, queries: list[Query]
) -> None:
    query = queries[-1]
    assert query.terms is not None
    assert len(query.terms) == 0
    found = HybridIndex(flat, bm25).search([query], 10)[0]
    assert found.ids.tolist() == flat.search([query], 10)[0].ids.tolist()


def test_near_ties_are_ranked_by_the_kernel(bm25: BM25Index) -> None:
    rng = np.random.default_rng(3)
    base = _unit(rng, 1)
    near = (base * (1 + 2e-7 * rng.standard_normal((COUNT, 96)))).astype(np.float32)
    texts = ["word1 word2" if number % 2 else "word3" for number in range(COUNT)]
    index = HybridIndex(FlatIndex.build(near), BM25Index.build(texts))
    vectors = _unit(rng, 8) + 2 * base
    queries = [Query("", vector, index.bm25.terms("word2")) for vector in vectors]
    scores = index.score(queries, EVERYTHING)
    for row, ranking in zip(scores, index.search(queries, 50), strict=True):
        expected = np.lexsort((EVERYTHING, -row))[:50]
        assert ranking.ids.tolist() == expected.tolist()
        assert ranking.scores.tobytes() == row[expected].tobytes()


def test_parts_of_other_sizes_and_other_weights_are_named(flat: FlatIndex, bm25: BM25Index) -> None:
    with pytest.raises(InputError, match=r"^passages: "):
        HybridIndex(flat, BM25Index.build(["one passage"]))
    for weight in (-0.1, 1.1, float("nan")):
        with pytest.raises(InputError, match=r"^weight: "):
            HybridIndex(flat, bm25, weight)
