"""What every index promises: one kernel, one order, the same bits for a batch as one by one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrag.errors import InputError
from specrag.retrieval.index import flat as flat_module
from specrag.retrieval.index import hnsw as hnsw_module
from specrag.retrieval.index.base import Index, Query, Ranking, Rows
from specrag.retrieval.index.bm25 import BM25Index, BM25Settings, Occurrences, count_terms
from specrag.retrieval.index.flat import FlatIndex
from specrag.retrieval.index.hnsw import HnswIndex, HnswSettings
from specrag.retrieval.index.hybrid import HybridIndex

KINDS = ("flat", "hnsw", "bm25", "hybrid")
EXACT = ("flat", "bm25", "hybrid")
WORDS = ("amber", "basalt", "cedar", "delta", "ember", "fjord", "garnet", "harbor")
SMALL_GRAPH = HnswSettings(neighbors=4, ef_construction=16, ef_search=8)


@dataclass(frozen=True)
class Corpus:
    """The same passages as vectors and as texts."""

    vectors: npt.NDArray[np.float32]
    texts: list[str]


@pytest.fixture(scope="module", autouse=True)
def _small_blocks() -> Iterator[None]:
    """Make a few hundred passages take several blocks, and a walk through a graph of a few nodes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flat_module, "_BLOCK_BYTES", 0)
        patch.setattr(flat_module, "QUERIES_AT_A_TIME", 4)
        patch.setattr(hnsw_module, "EXACT_BELOW", 0)
        yield


def _vectors(rng: np.random.Generator, count: int, dimension: int, coarse: bool) -> npt.NDArray[np.float32]:
    """Vectors of which a third stand twice; coarse ones also tie without being equal."""
    if coarse:
        vectors = rng.integers(-2, 3, (count, dimension)).astype(np.float32) / np.float32(4)
    else:
        vectors = rng.standard_normal((count, dimension)).astype(np.float32)
    copies = rng.random(count) < 0.33
    vectors[copies] = vectors[rng.integers(0, count, int(copies.sum()))]
    return vectors


def _text(rng: np.random.Generator) -> str:
    return " ".join(rng.choice(WORDS, size=rng.integers(0, 6)))


@st.composite
def corpora(draw: st.DrawFn) -> Corpus:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    count = draw(st.sampled_from([1, 2, 7, 40, 300, 700]))
    dimension = draw(st.sampled_from([1, 3, 8, 21]))
    vectors = _vectors(rng, count, dimension, draw(st.booleans()))
    return Corpus(vectors, [_text(rng) for _ in range(count)])


def _make(kind: str, corpus: Corpus) -> Index:
    if kind == "bm25":
        return BM25Index.build(corpus.texts)
    flat = FlatIndex.build(corpus.vectors)
    if kind == "hnsw":
        return HnswIndex.build(flat, SMALL_GRAPH)
    if kind == "hybrid":
        return HybridIndex(flat, BM25Index.build(corpus.texts), weight=0.6)
    return flat


def _queries(corpus: Corpus, seed: int, count: int = 9) -> list[Query]:
    rng = np.random.default_rng(seed)
    sparse = BM25Index.build(corpus.texts)
    vectors = _vectors(rng, count, corpus.vectors.shape[1], bool(rng.random() < 0.5))
    texts = [_text(rng) for _ in range(count)]
    return [Query(text, vector, sparse.terms(text)) for text, vector in zip(texts, vectors, strict=True)]


def _same(first: Sequence[Ranking], second: Sequence[Ranking]) -> bool:
    """Equal ids, and scores equal to the bit."""
    return len(first) == len(second) and all(
        a.ids.tolist() == b.ids.tolist() and a.scores.tobytes() == b.scores.tobytes()
        for a, b in zip(first, second, strict=True)
    )


def _brute_force(index: Index, query: Query, k: int, kind: str, ids: npt.NDArray[np.int64]) -> Ranking:
    """Score everything, sort, cut."""
    scores = index.score([query], ids)[0]
    pairs = sorted(zip((-scores).tolist(), ids.tolist(), strict=True))
    if kind == "bm25":
        pairs = [pair for pair in pairs if pair[0] < 0]
    pairs = pairs[:k]
    return Ranking(
        ids=np.array([passage for _, passage in pairs], dtype=np.int64),
        scores=np.array([-score for score, _ in pairs], dtype=np.float32),
    )


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(corpus=corpora(), seed=st.integers(0, 2**32), k=st.sampled_from([1, 2, 5, 50, 2000]))
def test_a_batch_gives_the_bits_of_single_searches(kind: str, corpus: Corpus, seed: int, k: int) -> None:
    index = _make(kind, corpus)
    queries = _queries(corpus, seed)
    single = [index.search([query], k)[0] for query in queries]
    assert _same(index.search(queries, k), single)
    assert _same(index.search(queries[::-1], k), single[::-1])
    assert _same(index.search(queries[2:5], k), single[2:5])
    assert index.search([], k) == []


@pytest.mark.parametrize("kind", EXACT)
@settings(max_examples=25, deadline=None)
@given(corpus=corpora(), seed=st.integers(0, 2**32), k=st.sampled_from([1, 3, 20, 2000]))
def test_exact_search_equals_scoring_everything(kind: str, corpus: Corpus, seed: int, k: int) -> None:
    index = _make(kind, corpus)
    queries = _queries(corpus, seed)
    everything = np.arange(len(index))
    expected = [_brute_force(index, query, k, kind, everything) for query in queries]
    assert _same(index.search(queries, k), expected)


@settings(max_examples=25, deadline=None)
@given(corpus=corpora(), seed=st.integers(0, 2**32), k=st.sampled_from([1, 3, 8, 50]))
def test_approximate_search_ranks_what_it_found_by_the_kernel(corpus: Corpus, seed: int, k: int) -> None:
    index = _make("hnsw", corpus)
    queries = _queries(corpus, seed)
    for query, ranking in zip(queries, index.search(queries, k), strict=True):
        assert len(ranking) == min(k, len(index))
        assert len(set(ranking.ids.tolist())) == len(ranking)
        assert _same([ranking], [_brute_force(index, query, k, "hnsw", ranking.ids)])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(corpus=corpora(), seed=st.integers(0, 2**32))
def test_a_score_does_not_depend_on_what_else_is_scored(kind: str, corpus: Corpus, seed: int) -> None:
    index = _make(kind, corpus)
    queries = _queries(corpus, seed, count=3)
    ids = np.random.default_rng(seed).integers(0, len(index), 12)  # in any order, some twice
    scores = index.score(queries, ids)
    assert scores.shape == (3, 12)
    assert scores.dtype == np.float32
    for row, query in enumerate(queries):
        for column in range(len(ids)):
            alone = index.score([query], ids[column : column + 1])
            assert alone.tobytes() == scores[row, column].tobytes()


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(
    corpus=corpora(),
    seed=st.integers(0, 2**32),
    share=st.sampled_from([0.02, 0.5, 1.0]),
    start=st.sampled_from([0.0, 0.7, 1.0]),  # whole blocks before it are skipped
)
def test_only_allowed_passages_are_returned(
    kind: str, corpus: Corpus, seed: int, share: float, start: float
) -> None:
    index = _make(kind, corpus)
    queries = _queries(corpus, seed, count=5)
    allowed = np.random.default_rng(seed).random(len(index)) < share
    allowed[: int(start * len(index))] = False
    ids = np.flatnonzero(allowed)
    found = index.search(queries, 4, allowed)
    assert _same(found, [index.search([query], 4, allowed)[0] for query in queries])
    for query, ranking in zip(queries, found, strict=True):
        assert allowed[ranking.ids].all()
        if kind == "hnsw":
            assert len(ranking) == min(4, len(ids))
        else:
            assert _same([ranking], [_brute_force(index, query, 4, kind, ids)])


class Counted:
    """Terms of texts, some of whose rows hold no passage."""

    def __init__(self, texts: list[str]) -> None:
        self.counts = count_terms(BM25Settings().split(texts))
        self.vocabulary = len(self.counts.terms)

    def find(self, terms: Sequence[str]) -> dict[str, int]:
        return {term: self.counts.terms.index(term) for term in terms if term in self.counts.terms}

    def occurrences(self, term: int) -> Occurrences:
        own = slice(self.counts.starts[term], self.counts.starts[term + 1])
        return Occurrences(self.counts.rows[own], self.counts.times[own])


def _grown(kind: str, corpus: Corpus, rng: np.random.Generator) -> Index:
    """The same passages in the rows of an index that has seen others come and go."""
    total = len(corpus.texts) + int(rng.integers(1, 30))
    places = np.sort(rng.choice(total, len(corpus.texts), replace=False))
    live = np.zeros(total, dtype=bool)
    live[places] = True
    ids = np.full(total, -1, dtype=np.int64)
    ids[places] = rng.permutation(len(corpus.texts))
    ids[~live] = rng.integers(
        0, len(corpus.texts), total - len(places)
    )  # a passage that has moved to another row
    vectors = np.full((total, corpus.vectors.shape[1]), 9, dtype=np.float32)
    vectors[places] = corpus.vectors[ids[places]]
    texts = [
        corpus.texts[id] if alive else "amber cedar" for id, alive in zip(ids.tolist(), live, strict=True)
    ]
    rows = Rows(total, ids, live)
    counted = Counted(texts)
    sparse = BM25Index(counted, counted.counts.lengths, BM25Settings(), rows)
    if kind == "bm25":
        return sparse
    flat = FlatIndex(vectors, FlatIndex.build(vectors).longest, rows)
    if kind == "hybrid":
        return HybridIndex(flat, sparse, weight=0.6)
    if kind == "hnsw":
        linked = FlatIndex.build(vectors[: max(1, int(rng.integers(total)))])
        return HnswIndex(HnswIndex.build(linked, SMALL_GRAPH)._graph, flat, SMALL_GRAPH)
    return flat


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(corpus=corpora(), seed=st.integers(0, 2**32), k=st.sampled_from([1, 3, 50, 2000]))
def test_what_has_come_and_gone_changes_nothing(kind: str, corpus: Corpus, seed: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    scratch, grown = _make(kind, corpus), _grown(kind, corpus, rng)
    assert len(grown) == len(scratch)
    sparse = getattr(grown, "bm25", grown)
    queries = _queries(corpus, seed)
    if isinstance(sparse, BM25Index):
        theirs = [replace(query, terms=sparse.terms(query.text)) for query in queries]
    else:
        theirs = queries
    ids = rng.permutation(len(scratch))
    scores = scratch.score(queries, ids)
    assert grown.score(theirs, ids).tobytes() == scores.tobytes()
    if kind != "hnsw":
        assert _same(grown.search(theirs, k), scratch.search(queries, k))
        return
    for query, ranking in zip(theirs, grown.search(theirs, k), strict=True):
        assert len(ranking) == min(k, len(grown))
        assert _same([ranking], [_brute_force(grown, query, k, "hnsw", ranking.ids)])


@pytest.mark.parametrize("kind", KINDS)
def test_passages_that_are_gone_are_not_known(kind: str) -> None:
    corpus = _corpus(count=40)
    grown = _grown(kind, corpus, np.random.default_rng(3))
    query = replace(_queries(corpus, 3, 1)[0], terms=np.array([0], dtype=np.int32))
    for id in (-1, 40, 2**40):
        with pytest.raises(InputError, match=rf"^passage_ids: {id}.*no passage"):
            grown.score([query], np.array([0, id]))


def _corpus(count: int = 300, dimension: int = 8, seed: int = 0) -> Corpus:
    rng = np.random.default_rng(seed)
    return Corpus(_vectors(rng, count, dimension, False), [_text(rng) for _ in range(count)])


@pytest.mark.parametrize("kind", KINDS)
def test_threads_do_not_disturb_each_other(kind: str) -> None:
    corpus = _corpus()
    index = _make(kind, corpus)
    queries = _queries(corpus, seed=1, count=8)
    expected = index.search(queries, 6)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: index.search(queries, 6), range(40)):
            assert _same(found, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "change",
    [
        lambda query: replace(query, vector=None, terms=None),
        lambda query: replace(query, vector=query.vector[:-1], terms=query.terms[None]),
        lambda query: replace(query, vector=query.vector * np.float32(np.nan), terms=query.terms - 99),
        lambda query: replace(query, vector=query.vector + np.float32(np.inf), terms=query.terms + 99),
        lambda query: replace(query, vector=query.vector.astype(float), terms=query.terms.astype(float)),
    ],
    ids=["missing", "shape", "not a number", "out of range", "other type"],
)
def test_a_bad_query_is_named(kind: str, change: Callable[[Query], Query]) -> None:
    corpus = _corpus()
    index = _make(kind, corpus)
    terms = BM25Index.build(corpus.texts).terms("amber cedar garnet")
    good = Query("amber", corpus.vectors[0], terms)
    for call in (lambda q: index.search(q, 3), lambda q: index.score(q, np.arange(2))):
        with pytest.raises(InputError, match=r"^queries\[1\]\.(vector|terms): ") as error:
            call([good, change(good)])
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", KINDS)
def test_bad_arguments_are_named(kind: str) -> None:
    corpus = _corpus()
    index = _make(kind, corpus)
    queries = _queries(corpus, seed=2, count=2)
    for k in (0, -1, 2.5, True):
        with pytest.raises(InputError, match=r"^k: "):
            index.search(queries, k)  # type: ignore[arg-type]
    masks: list[npt.NDArray[Any]] = [np.ones(299, bool), np.ones(300, np.int8), np.ones((300, 1), bool)]
    for allowed in masks:
        with pytest.raises(InputError, match=r"^allowed: "):
            index.search(queries, 3, allowed)
    for ids in (np.array([300]), np.array([-1]), np.array([0.5]), np.array([[0]])):
        with pytest.raises(InputError, match=r"^passage_ids: "):
            index.score(queries, ids)
    assert index.score(queries, np.array([], dtype=np.int64)).shape == (2, 0)


class Everywhere:
    """Terms that every passage has."""

    vocabulary = len(WORDS)

    def __init__(self, count: int) -> None:
        self.count = count

    def find(self, terms: Sequence[str]) -> dict[str, int]:
        raise NotImplementedError

    def occurrences(self, term: int) -> Occurrences:
        return Occurrences(
            np.arange(self.count, dtype=np.int32), np.full(self.count, term + 1, dtype=np.int32)
        )


def _large(kind: str) -> Index:
    """An index whose compiled calls run for many milliseconds."""
    rng = np.random.default_rng(0)
    count = 4000 if kind == "hnsw" else 200_000
    vectors = rng.standard_normal((count, 32)).astype(np.float32)
    if kind == "hnsw":
        graph_settings = HnswSettings(neighbors=8, ef_construction=20, ef_search=64)
        return HnswIndex.build(FlatIndex.build(vectors), graph_settings)
    flat = FlatIndex(vectors, longest=2.0**40)  # so long that the error bound rules no passage out
    if kind == "flat":
        return flat
    bm25 = BM25Index(Everywhere(count), np.full(count, 8, dtype=np.int32), BM25Settings())
    return bm25 if kind == "bm25" else HybridIndex(flat, bm25)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_python_runs_on_while_a_thread_searches(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat_module, "_BLOCK_BYTES", 64 << 20)  # one block: nearly all time is one call
    monkeypatch.setattr(flat_module, "QUERIES_AT_A_TIME", 64)
    index = _large(kind)
    count = {"flat": 24, "hnsw": 2000, "bm25": 1, "hybrid": 8}[kind]
    terms = np.repeat(np.arange(len(WORDS), dtype=np.int32), 40 if kind == "bm25" else 5)
    vectors = np.random.default_rng(1).standard_normal((count, 32)).astype(np.float32)
    queries = [Query("", vector, terms) for vector in vectors]
    index.search(queries[:1], 10)  # compiled before the clock runs
    assert min(_longest_wait(lambda: index.search(queries, 10)) for _ in range(3)) < 0.5


def _longest_wait(search: Callable[[], object]) -> float:
    """The longest time that a Python loop stands still beside a search, in shares of the search's time."""
    thread = threading.Thread(target=search)
    start = last = time.perf_counter()
    longest = 0.0
    thread.start()
    alive = True
    while alive:
        alive = thread.is_alive()
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return longest / (last - start)
