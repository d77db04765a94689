"""A real Milvus that is asked with a wrong password, hangs, and is killed."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from specrag.errors import InputError, SpecragError, StoreUnavailable
from specrag.retrieval.index.flat import FlatIndex
from specrag.retrieval.stores.base import Limits, Loading
from specrag.retrieval.stores.registry import open_store, store_type
from tests.retrieval.stores.milvus_server import MilvusServer
from tests.retrieval.stores.tables import collection, passage, questions, random_vectors, same

pytestmark = pytest.mark.slow

VECTORS = random_vectors(200, 8)
QUERIES = questions(random_vectors(3, 8, seed=1))
EXPECTED = FlatIndex.build(VECTORS).search(QUERIES, 4)


@pytest.fixture(scope="module")
def server() -> Iterator[MilvusServer]:
    with MilvusServer() as started:
        address = started.address("notes")
        store_type(address).load(address, collection(VECTORS), Loading())
        yield started


def test_a_wrong_password_is_refused_and_never_shown(
    server: MilvusServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(
        StoreUnavailable, match=r"milvus: collection 'notes' at .* refuses \(.*give a user"
    ) as error:
        open_store(server.address("notes", "s3cret"), limits=Limits(retries=0))
    assert "s3cret" not in repr(error.value) + caplog.text
    monkeypatch.setenv("SPECRAG_MILVUS_TOKEN", "root:Milvus")
    with open_store(f"milvus://127.0.0.1:{server.port}/notes") as store:
        assert same(store.search(QUERIES, 4), EXPECTED)


def test_what_milvus_cannot_do_is_said(server: MilvusServer) -> None:
    address = server.address("limits")
    with pytest.raises(InputError, match=r"^hnsw: True .* searched exactly here"):
        store_type(address).load(address, collection(VECTORS), Loading(approximate=True))
    with open_store(server.address("notes")) as store:
        from dataclasses import replace

        with pytest.raises(InputError, match=r"^passage 7: text: '70,000 bytes' .* at most 65,535 bytes"):
            store.store.add([replace(passage(7), text="x" * 70_000)], VECTORS[:1])  # type: ignore[union-attr]


def test_a_server_that_hangs_and_one_that_is_killed(server: MilvusServer) -> None:
    with open_store(server.address("notes"), limits=Limits(timeout=2, connect_timeout=2, retries=0)) as store:
        assert same(store.search(QUERIES, 4), EXPECTED)
        server.signal(signal.SIGSTOP)
        try:
            began = time.monotonic()
            with pytest.raises(StoreUnavailable, match="did not answer within 2 seconds"):
                store.search(QUERIES, 4)
            assert time.monotonic() - began < 15
        finally:
            server.signal(signal.SIGCONT)
        ends = time.monotonic() + 60
        while True:  # a server that has slept has to find itself again
            try:
                assert same(store.search(QUERIES, 4), EXPECTED)
                break
            except SpecragError:
                assert time.monotonic() < ends
                time.sleep(0.5)
        server.kill()
        began = time.monotonic()
        with pytest.raises(StoreUnavailable, match=r"milvus: collection 'notes' at .* cannot be reached"):
            store.search(QUERIES, 4)
        assert time.monotonic() - began < 15
        known = EXPECTED[0].ids
        flat = FlatIndex.build(VECTORS).score(QUERIES, known)
        assert store.score(QUERIES, known).tobytes() == flat.tobytes()  # what it has seen is still there
