"""Searching PostgreSQL: the bits of the flat index, for a batch as one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pgvector import Vector
from pgvector.psycopg import register_vector

from specrag.bench.postgres import PostgresServer
from specrag.errors import InputError
from specrag.methods.retriever import PassageRetriever
from specrag.retrieval.index.cache import SpeculativeCache
from specrag.retrieval.index.flat import FlatIndex
from specrag.retrieval.index.hnsw import HnswSettings
from specrag.retrieval.index.scoring import Floats
from specrag.retrieval.stores import retriever as store_retriever
from specrag.retrieval.stores.base import Fetched, Found
from specrag.retrieval.stores.pgvector.store import PgVectorStore
from specrag.retrieval.stores.retriever import StoreRetriever
from tests.retrieval.stores.tables import (
    collection,
    connected,
    load,
    near_ties,
    open_table,
    passage,
    questions,
    random_vectors,
    same,
)

GRAPH = HnswSettings(neighbors=8, ef_construction=32, ef_search=40)


def _vectors(rng: np.random.Generator, count: int, dimension: int, kind: str) -> Floats:
    """Vectors of which a third stand twice, with ties and near ties of several kinds."""
    if kind == "coarse":
        vectors = rng.integers(-2, 3, (count, dimension)).astype(np.float32) / np.float32(4)
    elif kind == "permuted":
        vectors = near_ties(rng, count, dimension)
    elif kind == "neighbours":  # the last bit of one element makes the difference
        vectors = np.repeat(rng.standard_normal((1, dimension)).astype(np.float32), count, axis=0)
        places = rng.integers(0, dimension, count)
        rows = np.arange(count)
        vectors[rows, places] = np.nextafter(vectors[rows, places], np.float32(np.inf))
    else:
        vectors = rng.standard_normal((count, dimension)).astype(np.float32)
    copies = rng.random(count) < 0.33
    vectors[copies] = vectors[rng.integers(0, count, int(copies.sum()))]
    return vectors


KINDS = st.sampled_from(["plain", "coarse", "permuted", "neighbours"])


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    kind=KINDS,
    count=st.sampled_from([1, 2, 40, 400]),
    dimension=st.sampled_from([1, 3, 21, 64]),
    k=st.sampled_from([1, 2, 5, 50, 2000]),
    near=st.sampled_from([0, 3, 64]),
)
def test_exact_search_gives_the_bits_of_the_flat_index(
    seed: int, kind: str, count: int, dimension: int, k: int, near: int, postgres: PostgresServer
) -> None:
    rng = np.random.default_rng(seed)
    vectors = _vectors(rng, count, dimension, kind)
    asked = np.concatenate(
        [_vectors(rng, 3, dimension, kind), np.ones((1, dimension), np.float32), vectors[:1]]
    )
    queries = questions(asked)
    load(postgres.url, collection(vectors), "exact", replace=True)
    flat = FlatIndex.build(vectors)
    expected = flat.search(queries, k)
    with pytest.MonkeyPatch.context() as patch, open_table(postgres.url, "exact") as store:
        patch.setattr(store_retriever, "NEAR_TIES", near)  # how many come at once must not matter
        assert same(store.search(queries, k), expected)
        assert same([store.search([query], k)[0] for query in queries], expected)
        half = rng.integers(0, count)
        allowed = np.arange(count) >= half
        narrowed = store.narrowed({"number": {">=": int(half)}})
        assert same(narrowed.search(queries, k), flat.search(queries, k, allowed))
        ids = rng.integers(0, count, 12)
        assert store.score(queries, ids).tobytes() == flat.score(queries, ids).tobytes()


def test_the_database_alone_would_rank_otherwise(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The near ties are real: its own order differs, and there are too many for the first answer."""
    vectors = near_ties(np.random.default_rng(0), 500, 64)
    query = np.ones(64, dtype=np.float32)
    load(postgres.url, collection(vectors), "near", replace=True)
    expected = FlatIndex.build(vectors).search(questions(query[None]), 10)
    with connected(postgres.url) as connection:
        register_vector(connection)
        rows = connection.execute(
            "SELECT id FROM near ORDER BY embedding <#> %s, id LIMIT 10", (Vector(query),)
        )
        assert [id for (id,) in rows] != expected[0].ids.tolist()
    limits: list[int] = []
    whole = PgVectorStore.search

    def record(self: PgVectorStore, vectors: Floats, most: int, *words: Any) -> list[Found]:
        limits.append(most)
        return whole(self, vectors, most, *words)

    monkeypatch.setattr(PgVectorStore, "search", record)
    with open_table(postgres.url, "near") as store:
        assert same(store.search(questions(query[None]), 10), expected)
    assert limits == [18, 72, 288, 1152]


@pytest.fixture(scope="module")
def vectors() -> Floats:
    return random_vectors(3000, 24)


@pytest.fixture(scope="module")
def table(postgres: PostgresServer, vectors: Floats) -> str:
    load(postgres.url, collection(vectors), "graph", hnsw=GRAPH, replace=True)
    return "graph"


@pytest.fixture
def walk(postgres: PostgresServer, table: str) -> Iterator[StoreRetriever]:
    with open_table(postgres.url, table, index="hnsw") as store:
        yield store


def test_a_walk_finds_nearly_the_same(walk: StoreRetriever, vectors: Floats) -> None:
    flat = FlatIndex.build(vectors)
    queries = questions(random_vectors(40, 24, seed=1))
    found = walk.search(queries, 10)
    shared = 0
    for query, ranking, exact in zip(queries, found, flat.search(queries, 10), strict=True):
        shared += len(set(ranking.ids.tolist()) & set(exact.ids.tolist()))
        assert ranking.scores.tobytes() == flat.score([query], ranking.ids)[0].tobytes()
        assert sorted(zip(-ranking.scores, ranking.ids, strict=True)) == list(
            zip(-ranking.scores, ranking.ids, strict=True)
        )
    assert 0.8 < shared / 400 < 1  # a walk, and not the exact search in its place
    assert same(found, [walk.search([query], 10)[0] for query in queries])
    for k in (1, 3):  # a smaller k gives a prefix
        for short, ranking in zip(walk.search(queries, k), found, strict=True):
            assert short.ids.tolist() == ranking.ids[:k].tolist()


def test_a_wider_walk_finds_more(postgres: PostgresServer, table: str, vectors: Floats) -> None:
    queries = questions(random_vectors(40, 24, seed=1))
    exact = FlatIndex.build(vectors).search(queries, 5)
    shared = []
    for width in (5, 300):
        with open_table(postgres.url, table, index="hnsw", ef_search=width) as store:
            found = store.search(queries, 5)
        pairs = zip(found, exact, strict=True)
        shared.append(sum(len(set(a.ids.tolist()) & set(b.ids.tolist())) for a, b in pairs))
    assert shared[0] < shared[1]


def test_a_walk_that_finds_too_little_is_replaced(postgres: PostgresServer) -> None:
    vectors = np.repeat(random_vectors(3, 8), 400, axis=0)  # pgvector links ten copies of a vector at most
    load(postgres.url, collection(vectors), "copies", hnsw=GRAPH, replace=True)
    queries = questions(random_vectors(4, 8, seed=2))
    with open_table(postgres.url, "copies", index="hnsw", ef_search=1000) as store:
        assert same(store.search(queries, 30), FlatIndex.build(vectors).search(queries, 30))


def test_conditions_make_a_walk_exact(walk: StoreRetriever, vectors: Floats) -> None:
    allowed = np.arange(len(vectors)) < 30
    queries = questions(random_vectors(5, 24, seed=4))
    narrowed = walk.narrowed("number < 30")
    assert same(narrowed.search(queries, 7), FlatIndex.build(vectors).search(queries, 7, allowed))


def test_more_than_a_walk_keeps_is_refused(walk: StoreRetriever) -> None:
    with pytest.raises(InputError, match=r"^k: 41 .* a breadth of at least 41"):
        walk.search(questions(random_vectors(1, 24)), 41)


@pytest.mark.parametrize("index", ["flat", "hnsw"])
def test_bad_arguments_are_named(index: str, postgres: PostgresServer, table: str, vectors: Floats) -> None:
    with open_table(postgres.url, table, index=index) as store:
        good = questions(vectors[:1])
        for k in (0, -1, 2.5, True):
            with pytest.raises(InputError, match=r"^k: "):
                store.search(good, k)  # type: ignore[arg-type]
        doubles: Any = vectors[:1].astype(np.float64)
        for bad in (vectors[:1, :-1], doubles, vectors[:1] * np.float32(np.nan)):
            with pytest.raises(InputError, match=r"^queries\[0\]\.vector: "):
                store.search(questions(bad), 3)
            with pytest.raises(InputError, match=r"^queries\[0\]\.vector: "):
                store.score(questions(bad), np.arange(2))
        for ids in ([3000], [-1]):
            with pytest.raises(InputError, match=r"^passage id: .* table 'graph' at .* has no such passage"):
                store.score(good, np.array(ids))
            with pytest.raises(InputError, match=r"^passage id: "):
                store.passages(ids)
        assert store.search([], 3) == []
        assert store.score(good, np.array([], dtype=np.int64)).shape == (1, 0)
        assert store.passages([]) == []


def test_what_a_search_has_found_needs_no_database(
    postgres: PostgresServer, table: str, vectors: Floats, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat = FlatIndex.build(vectors)
    queries = questions(random_vectors(2, 24, seed=5))
    with open_table(postgres.url, table, remembered=64) as store:
        ids = np.unique(np.concatenate([ranking.ids for ranking in store.search(queries, 20)]))
        fetched: list[list[int]] = []
        fetch = PgVectorStore.fetch

        def record(self: PgVectorStore, ids: Sequence[int]) -> list[Fetched]:
            fetched.append(list(ids))
            return fetch(self, ids)

        monkeypatch.setattr(PgVectorStore, "fetch", record)
        assert store.score(queries, ids).tobytes() == flat.score(queries, ids).tobytes()
        assert store.passages(ids.tolist()) == [passage(id) for id in ids.tolist()]
        assert fetched == []
        some = np.flatnonzero(~np.isin(np.arange(3000), ids))[[5, 2, 5]]
        mixed = np.concatenate([ids[:3], some])
        assert store.score(queries, mixed).tobytes() == flat.score(queries, mixed).tobytes()
        assert fetched == [list(dict.fromkeys(some.tolist()))]
        everything = np.arange(3000)  # far more than is remembered
        assert store.score(queries, everything).tobytes() == flat.score(queries, everything).tobytes()
        assert store.passages([2999, 0, 2999]) == [passage(2999), passage(0), passage(2999)]


def test_the_speculative_cache_agrees_with_it(postgres: PostgresServer, table: str, vectors: Floats) -> None:
    with open_table(postgres.url, table) as store:
        retriever: PassageRetriever = store
        assert len(retriever) == 3000
        cache = SpeculativeCache(store)
        queries = questions(vectors[:30] + random_vectors(30, 24, seed=6) / np.float32(10))
        for ranking in store.search(queries, 4):
            cache.add(ranking.ids)
        for query, ranking in zip(queries, store.search(queries, 1), strict=True):
            assert same([cache.rank(query, 1)], [ranking])


def test_threads_do_not_disturb_each_other(postgres: PostgresServer, table: str, vectors: Floats) -> None:
    queries = questions(random_vectors(6, 24, seed=7))
    expected = FlatIndex.build(vectors).search(queries, 6)
    with open_table(postgres.url, table, remembered=16) as store, ThreadPoolExecutor(6) as pool:
        ids = expected[0].ids
        scores = FlatIndex.build(vectors).score(queries, ids).tobytes()

        def work(number: int) -> bool:
            found = same(store.search(queries, 6), expected)
            texts = store.passages([number]) == [passage(number)]
            return found and texts and store.score(queries, ids).tobytes() == scores

        assert all(pool.map(work, range(30)))
