"""A Qdrant that hangs, refuses, is busy or goes away: a clear error in time, and work goes on when it is back."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from specrag.errors import SpecragError, StoreUnavailable
from specrag.retrieval.index.flat import FlatIndex
from specrag.retrieval.stores.base import Limits, Loading
from specrag.retrieval.stores.registry import open_store, store_type
from tests.retrieval.stores.qdrant_server import QdrantServer
from tests.retrieval.stores.tables import collection, questions, random_vectors, same

VECTORS = random_vectors(200, 8)
QUERIES = questions(random_vectors(3, 8, seed=1))
EXPECTED = FlatIndex.build(VECTORS).search(QUERIES, 4)
KEY = "pa55word"


@pytest.fixture
def server() -> Iterator[QdrantServer]:
    with QdrantServer(KEY) as started:
        address = _with_key(started, KEY)
        store_type(address).load(address, collection(VECTORS), Loading())
        yield started


def _with_key(server: QdrantServer, key: str) -> str:
    return f"qdrant://:{key}@127.0.0.1:{server.port}/notes"


def test_a_server_that_stops_in_the_middle_of_a_search(server: QdrantServer) -> None:
    with open_store(_with_key(server, KEY), limits=Limits(timeout=10, connect_timeout=1, retries=1)) as store:
        assert same(store.search(QUERIES, 4), EXPECTED)
        server.stop()
        began = time.monotonic()
        with pytest.raises(
            StoreUnavailable, match=r"qdrant: collection 'notes' at .* cannot be reached"
        ) as error:
            store.search(QUERIES, 4)
        assert time.monotonic() - began < 8
        assert "\n" not in str(error.value)
        known = EXPECTED[0].ids
        flat = FlatIndex.build(VECTORS).score(QUERIES, known)
        assert store.score(QUERIES, known).tobytes() == flat.tobytes()  # what it has seen is still there
        server.start()
        assert same(store.search(QUERIES, 4), EXPECTED)


def test_a_server_that_hangs(server: QdrantServer) -> None:
    go_on = threading.Event()
    with open_store(_with_key(server, KEY), limits=Limits(timeout=1)) as store:
        server.before = lambda _: None if go_on.wait(30) else 500
        try:
            began = time.monotonic()
            with pytest.raises(StoreUnavailable, match="did not answer within 1 seconds"):
                store.search(QUERIES, 4)
            assert time.monotonic() - began < 10
        finally:
            go_on.set()
        assert same(store.search(QUERIES, 4), EXPECTED)


def test_a_server_that_is_busy_for_a_while_costs_only_time(server: QdrantServer) -> None:
    failures = iter([503, 429, 502])
    server.before = lambda _: next(failures, None)
    with open_store(_with_key(server, KEY)) as store:
        assert next(failures, None) is None
        failures = iter([503] * 3)
        assert same(store.search(QUERIES, 4), EXPECTED)
        failures = iter([503] * 4)
        with pytest.raises(StoreUnavailable, match=r"cannot be used \(told to fail\)"):
            store.search(QUERIES, 4)


def test_a_wrong_key_is_refused_and_never_shown(
    server: QdrantServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StoreUnavailable, match=r"refuses \(status 401\): give a user or key") as error:
        open_store(_with_key(server, "s3cret"))
    seen: BaseException | None = error.value
    while seen is not None:
        assert "s3cret" not in repr(seen)
        seen = seen.__cause__
    monkeypatch.setenv("SPECRAG_QDRANT_KEY", KEY)
    with open_store(f"qdrant://127.0.0.1:{server.port}/notes") as store:
        assert same(store.search(QUERIES, 4), EXPECTED)


def test_a_collection_that_goes_while_it_is_open(server: QdrantServer) -> None:
    with open_store(_with_key(server, KEY)) as store:
        server.answer("DELETE", "/collections/notes", {})
        with pytest.raises(
            SpecragError, match=r"collection 'notes' at .* does not exist: load a knowledge base"
        ):
            store.search(QUERIES, 4)


def test_a_collection_of_somebody_else_is_left_alone(server: QdrantServer) -> None:
    vectors = {"size": 8, "distance": "Dot", "hnsw_config": {"m": 0}}
    server.answer("PUT", "/collections/notes", {"vectors": vectors, "metadata": {"theirs": 1}})
    for replacing in (False, True):
        with pytest.raises(SpecragError, match="was not made by specrag: name another one"):
            store_type("qdrant://").load(
                _with_key(server, KEY), collection(VECTORS), Loading(replace=replacing)
            )
    with pytest.raises(SpecragError, match="was not made by specrag"):
        open_store(_with_key(server, KEY))


def test_a_server_that_goes_away_in_the_middle_of_a_load(server: QdrantServer) -> None:
    address = _with_key(server, KEY).replace("notes", "loading")
    writes = 0

    def fail(path: str) -> int | None:
        nonlocal writes
        writes += path == "/collections/loading/points"
        return 500 if writes > 2 else None

    server.before = fail
    made = collection(random_vectors(1000, 8))
    with pytest.raises(StoreUnavailable, match=r"collection 'loading' at .* cannot be used \(told to fail\)"):
        store_type(address).load(address, made, Loading())
    server.before = lambda _: None
    with pytest.raises(SpecragError, match="is being loaded, or its load was cut off"):
        open_store(address)
    store_type(address).load(address, made, Loading(replace=True))
    with open_store(address) as store:
        assert len(store) == 1000


def test_approximate_search(server: QdrantServer) -> None:
    address = _with_key(server, KEY).replace("notes", "graph")
    vectors = random_vectors(500, 8)
    store_type(address).load(address, collection(vectors), Loading(approximate=True))
    flat = FlatIndex.build(vectors)
    with open_store(address, index="hnsw", breadth=40) as store:
        found = store.search(QUERIES, 10)
        for query, ranking in zip(QUERIES, found, strict=True):
            assert ranking.scores.tobytes() == flat.score([query], ranking.ids)[0].tobytes()
        for short, ranking in zip(store.search(QUERIES, 2), found, strict=True):
            assert short.ids.tolist() == ranking.ids[:2].tolist()
        with pytest.raises(SpecragError, match=r"^k: 41 .* a breadth of at least 41"):
            store.search(QUERIES, 41)
    with open_store(address) as store:
        assert same(store.search(QUERIES, 10), flat.search(QUERIES, 10))
