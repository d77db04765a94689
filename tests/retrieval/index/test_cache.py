"""The speculative cache: the index's best passage is the cache's best whenever it is there, to the bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrag.errors import InputError
from specrag.retrieval.index import hnsw as hnsw_module
from specrag.retrieval.index.base import Index, Query, Ranking
from specrag.retrieval.index.bm25 import BM25Index
from specrag.retrieval.index.cache import CAPACITY, SpeculativeCache
from specrag.retrieval.index.flat import FlatIndex
from specrag.retrieval.index.hnsw import HnswIndex, HnswSettings
from specrag.retrieval.index.hybrid import HybridIndex

EXACT = ("flat", "bm25", "hybrid")
WORDS = ("amber", "basalt", "cedar", "delta", "ember", "fjord")
CARELESS = HnswSettings(neighbors=2, ef_construction=2, ef_search=1)  # overlooks a lot


@pytest.fixture(scope="module", autouse=True)
def _walks() -> Iterator[None]:
    """Make a few passages worth a walk through the graph."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hnsw_module, "EXACT_BELOW", 0)
        yield


def _text(rng: np.random.Generator) -> str:
    return " ".join(rng.choice(WORDS, size=rng.integers(0, 5)))


def _vectors(rng: np.random.Generator, count: int, dimension: int, coarse: bool) -> npt.NDArray[np.float32]:
    """Vectors full of ties and near ties: a third stand twice, a third differ from another in one last bit."""
    if coarse:
        vectors = rng.integers(-1, 2, (count, dimension)).astype(np.float32)
    else:
        vectors = rng.standard_normal((count, dimension)).astype(np.float32)
    for place in range(1, count):
        kind = rng.integers(3)
        if kind == 0:
            continue
        vectors[place] = vectors[rng.integers(place)]
        if kind == 1:
            column = rng.integers(dimension)
            towards = np.float32(rng.choice([-np.inf, np.inf]))
            vectors[place, column] = np.nextafter(vectors[place, column], towards)
    return vectors


@dataclass(frozen=True)
class Library:
    """An index, and queries in the form that it needs."""

    index: Index
    queries: list[Query]


def _library(kind: str, rng: np.random.Generator, coarse: bool, count: int) -> Library:
    dimension = int(rng.choice([2, 5, 16]))
    vectors = _vectors(rng, count, dimension, coarse)
    texts = [_text(rng) for _ in range(count)]
    bm25, flat = BM25Index.build(texts), FlatIndex.build(vectors)
    asked = _vectors(rng, 6, dimension, coarse)
    questions = [*(_text(rng) for _ in range(5)), "nobody knows"]
    queries = [Query(text, vector, bm25.terms(text)) for text, vector in zip(questions, asked, strict=True)]
    if kind == "bm25":
        return Library(bm25, [replace(query, vector=None) for query in queries])
    if kind == "hybrid":
        return Library(HybridIndex(flat, bm25, weight=float(rng.choice([0.0, 0.5, 1.0]))), queries)
    if kind == "hnsw":
        return Library(HnswIndex.build(flat, CARELESS, threads=1), queries)
    return Library(flat, queries)


class Shelf:
    """What a cache has to hold: the most recently returned passages, in plain Python."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.ids: list[int] = []

    def add(self, ids: Sequence[int]) -> None:
        for passage in reversed(ids):
            if passage in self.ids:
                self.ids.remove(passage)
            self.ids.insert(0, passage)
        del self.ids[self.capacity :]


def _same(first: Ranking, second: Ranking) -> bool:
    return first.ids.tolist() == second.ids.tolist() and first.scores.tobytes() == second.scores.tobytes()


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Searches: which query, how many passages."""
    return draw(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([1, 3, 20])), max_size=8))


@pytest.mark.parametrize("kind", EXACT)
@settings(max_examples=60, deadline=None)
@given(
    history=histories(),
    seed=st.integers(0, 2**32),
    coarse=st.booleans(),
    count=st.sampled_from([1, 3, 20, 90]),
    capacity=st.sampled_from([1, 2, 7, 30, 200]),
)
def test_it_ranks_what_it_holds_as_the_index_does(
    kind: str, history: list[tuple[int, int]], seed: int, coarse: bool, count: int, capacity: int
) -> None:
    """So the index's best passage is the cache's best, if it is there: the same ranking, to the bit, as that of an
    index of which only the cached passages may be returned."""
    library = _library(kind, np.random.default_rng(seed), coarse, count)
    index, queries = library.index, library.queries
    cache, shelf = SpeculativeCache(index, capacity), Shelf(capacity)
    for place, prefetch in [*history, (0, 1)]:
        for query, (best,) in zip(queries, ([found] for found in index.search(queries, 1)), strict=True):
            guess = cache.best(query)
            if not len(best):
                assert guess is None
            elif best.ids[0] in shelf.ids:
                assert guess == best.ids[0]
                assert cache.rank(query, 1).scores.tobytes() == best.scores.tobytes()
        if shelf.ids:
            allowed = np.isin(np.arange(len(index)), shelf.ids)
            for query, whole in zip(queries, index.search(queries, len(index), allowed), strict=True):
                assert _same(cache.rank(query, len(index)), whole)
                assert _same(cache.rank(query, 2), Ranking(whole.ids[:2], whole.scores[:2]))
        found = index.search([queries[place]], prefetch)[0].ids
        cache.add(found)
        shelf.add(found.tolist())
        assert len(cache) == len(shelf.ids)
        assert cache.nbytes == 8 * len(cache) <= 8 * capacity


@settings(max_examples=60, deadline=None)
@given(
    history=histories(),
    seed=st.integers(0, 2**32),
    coarse=st.booleans(),
    count=st.sampled_from([3, 20, 90]),
    capacity=st.sampled_from([1, 7, 200]),
)
def test_where_a_graph_overlooks_a_passage_the_cache_holds_a_better_one(
    history: list[tuple[int, int]], seed: int, coarse: bool, count: int, capacity: int
) -> None:
    library = _library("hnsw", np.random.default_rng(seed), coarse, count)
    index, queries = library.index, library.queries
    cache, shelf = SpeculativeCache(index, capacity), Shelf(capacity)
    for place, prefetch in [*history, (0, 1)]:
        for query, best in zip(queries, index.search(queries, 1), strict=True):
            if best.ids[0] in shelf.ids:
                guess = cache.rank(query, 1)
                assert (-guess.scores[0], guess.ids[0]) <= (-best.scores[0], best.ids[0])
                if guess.ids[0] == best.ids[0]:
                    assert _same(guess, best)
        found = index.search([queries[place]], prefetch)[0].ids
        cache.add(found)
        shelf.add(found.tolist())


def test_a_graph_does_overlook_passages() -> None:
    """Else the test above would say nothing: the cache guesses another passage than the index returns."""
    library = _library("hnsw", np.random.default_rng(5), coarse=False, count=300)
    cache = SpeculativeCache(library.index)
    cache.add(np.arange(len(library.index)))
    answers = library.index.search(library.queries, 1)
    guesses = [cache.best(query) for query in library.queries]
    assert any(guess != answer.ids[0] for guess, answer in zip(guesses, answers, strict=True))


@pytest.fixture
def flat() -> FlatIndex:
    return FlatIndex.build(np.eye(8, dtype=np.float32))


def _pointing(place: int) -> Query:
    return Query("", vector=np.eye(8, dtype=np.float32)[place])


def test_the_least_recently_returned_leaves_first(flat: FlatIndex) -> None:
    cache = SpeculativeCache(flat, capacity=3)
    cache.add([0, 1, 2])
    cache.add([2])
    cache.add([3])  # 1 has been returned behind 0, so it leaves
    assert [cache.best(_pointing(place)) for place in (0, 2, 3)] == [0, 2, 3]
    assert cache.best(_pointing(1)) == 0  # a tie of zeros among what is left
    cache.add([4, 5, 6, 7])  # more than there is room for: the best stay
    assert sorted(cache.rank(_pointing(0), 9).ids.tolist()) == [4, 5, 6]


def test_passages_given_twice_are_kept_once(flat: FlatIndex) -> None:
    cache = SpeculativeCache(flat)
    cache.add([3, 3, 1, 3])
    cache.add(np.array([1], dtype=np.int64))
    cache.add([])
    assert len(cache) == 2
    assert cache.rank(_pointing(3), 5).ids.tolist() == [3, 1]


def test_nothing_kept_is_no_guess(flat: FlatIndex) -> None:
    cache = SpeculativeCache(flat)
    assert cache.best(_pointing(0)) is None
    assert len(cache.rank(_pointing(0), 3)) == 0
    assert len(cache) == cache.nbytes == 0


def test_a_sparse_query_gets_no_passage_without_its_terms() -> None:
    index = BM25Index.build(["amber basalt", "cedar", "delta"])
    cache = SpeculativeCache(index)
    cache.add([0, 1])
    assert cache.best(Query("cedar", terms=index.terms("cedar"))) == 1
    for text in ("delta", "unheard of"):
        assert cache.best(Query(text, terms=index.terms(text))) is None


@pytest.mark.parametrize("capacity", [0, -1, 2.5, True, None])
def test_a_capacity_that_is_none_is_refused(flat: FlatIndex, capacity: object) -> None:
    with pytest.raises(InputError, match=r"^capacity: "):
        SpeculativeCache(flat, capacity)  # type: ignore[arg-type]


def test_a_bad_query_or_k_is_named(flat: FlatIndex) -> None:
    cache = SpeculativeCache(flat)
    cache.add([1])
    with pytest.raises(InputError, match=r"^queries\[0\].vector: "):
        cache.best(Query("no vector"))
    with pytest.raises(InputError, match=r"^queries\[0\].vector: "):
        cache.best(Query("other dimension", vector=np.ones(9, dtype=np.float32)))
    for k in (0, -1, True):
        with pytest.raises(InputError, match=r"^k: "):
            cache.rank(_pointing(0), k)


def test_the_default_holds_a_request_of_the_paper() -> None:
    """128 tokens, a search every 4, 20 passages each."""
    assert CAPACITY >= 128 // 4 * 20
