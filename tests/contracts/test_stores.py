"""What every store must do: the bits of the flat index, conditions as in a knowledge base, clear words when it fails.

PostgreSQL and Milvus are real servers; of Qdrant it is the engine (see ``qdrant_server.py``). Those whose packages have
no wheel for this Python or this machine are skipped.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from specrag.errors import InputError, SpecragError, StoreUnavailable
from specrag.retrieval.index.filters import matches, read_filter
from specrag.retrieval.index.flat import FlatIndex
from specrag.retrieval.index.scoring import Floats
from specrag.retrieval.manifest import KnowledgeBaseError
from specrag.retrieval.passage import Passage
from specrag.retrieval.stores.base import Limits, Loading, field_values
from specrag.retrieval.stores.registry import open_store, store_type
from specrag.retrieval.stores.retriever import StoreRetriever
from tests.retrieval.stores.tables import collection, near_ties, passage, questions, random_vectors, same

DIMENSION = 21


@dataclass
class Server:
    """A server, and how its collections are addressed."""

    name: str
    address: Callable[[str], str]

    def load(self, vectors: Floats, name: str, passages: list[Passage] | None = None) -> None:
        made = collection(vectors)
        if passages is not None:
            made = replace(made, passages=lambda ids: [passages[id] for id in ids])
        store_type(self.address(name)).load(self.address(name), made, Loading(replace=True))

    def open(self, name: str, **options: Any) -> StoreRetriever:
        store = open_store(self.address(name), **options)
        assert isinstance(store, StoreRetriever)
        return store


@contextmanager
def _postgres() -> Iterator[Server]:
    from specrag.bench.postgres import PostgresServer

    with PostgresServer() as server:
        yield Server("pgvector", lambda name: f"{server.url}#{name}")


@contextmanager
def _qdrant() -> Iterator[Server]:
    from tests.retrieval.stores.qdrant_server import QdrantServer

    with QdrantServer() as server:
        yield Server("qdrant", server.address)


@contextmanager
def _milvus() -> Iterator[Server]:
    from tests.retrieval.stores.milvus_server import MilvusServer

    with MilvusServer() as server:
        yield Server("milvus", server.address)


_SERVERS = {"pgserver": _postgres, "qdrant_edge": _qdrant, "milvus": _milvus}


@pytest.fixture(
    scope="module",
    params=["pgserver", "qdrant_edge", pytest.param("milvus", marks=pytest.mark.slow)],
    ids=["pgvector", "qdrant", "milvus"],
)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    if find_spec(request.param) is None:
        pytest.skip(f"{request.param} has no wheel for this Python or this machine")
    with _SERVERS[request.param]() as started:
        yield started


def _vectors(kind: str, count: int = 300) -> Floats:
    """Vectors of which a third stand twice, with ties and near ties of several kinds."""
    rng = np.random.default_rng(7)
    if kind == "coarse":
        vectors = rng.integers(-2, 3, (count, DIMENSION)).astype(np.float32) / np.float32(4)
    elif kind == "permuted":
        vectors = near_ties(rng, count, DIMENSION)
    else:
        vectors = rng.standard_normal((count, DIMENSION)).astype(np.float32)
    copies = rng.random(count) < 0.33
    vectors[copies] = vectors[rng.integers(0, count, int(copies.sum()))]
    return vectors


KINDS = ("plain", "coarse", "permuted")


@pytest.fixture(scope="module")
def loaded(server: Server) -> Iterator[dict[str, StoreRetriever]]:
    opened = {}
    for kind in KINDS:
        server.load(_vectors(kind), kind)
        opened[kind] = server.open(kind)
    yield opened
    for store in opened.values():
        store.close()


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from(KINDS), seed=st.integers(0, 2**32), k=st.sampled_from([1, 2, 5, 60, 300, 900]))
def test_the_bits_of_the_flat_index(kind: str, seed: int, k: int, loaded: dict[str, StoreRetriever]) -> None:
    vectors, rng = _vectors(kind), np.random.default_rng(seed)
    asked: list[Any] = [
        rng.standard_normal((2, DIMENSION)),
        np.ones((1, DIMENSION)),
        np.zeros((1, DIMENSION)),
        vectors[rng.integers(0, len(vectors), 1)],
    ]
    queries = questions(np.concatenate(asked).astype(np.float32))
    expected = FlatIndex.build(vectors).search(queries, k)
    found = loaded[kind].search(queries, k)
    assert same(found, expected)
    assert same([loaded[kind].search([query], k)[0] for query in queries[2:4]], expected[2:4])
    ids = rng.integers(0, len(vectors), 12)
    assert (
        loaded[kind].score(queries, ids).tobytes() == FlatIndex.build(vectors).score(queries, ids).tobytes()
    )


def test_a_batch_is_one_request(server: Server, loaded: dict[str, StoreRetriever], monkeypatch: Any) -> None:
    store = loaded["plain"].store
    sizes: list[int] = []
    search = store.search

    def record(vectors: Floats, *words: Any) -> Any:
        sizes.append(len(vectors))
        return search(vectors, *words)

    monkeypatch.setattr(store, "search", record)
    queries = questions(random_vectors(32, DIMENSION, seed=3))
    found = loaded["plain"].search(queries, 5)
    assert sizes == [32]
    assert same(found, FlatIndex.build(_vectors("plain")).search(queries, 5))


METADATA: list[dict[str, Any]] = [
    {},
    {"year": 1999, "tags": ["metal", "coin"], "open": True},
    {"year": 2004.5, "tags": "metal", "open": False},
    {"year": "2004", "tags": [], "open": None},
    {"year": 1999, "tags": [["metal"], {"a": "coin"}, "Coin"]},
    {"author": {"name": "Anna", "born": {"year": 1950}}},
    {"author": {"name": "Cäsar"}, "a.b": 1},
    {"author.name": "Berta", "a": {"b": 2}, "year": 10**25},
    {"year": -0.0, "tags": "", "open": 1, "note": "a'b\"c%s{}\\ \u2028"},
    {"year": 1e300, "tags": "Zebra", "open": "true", "empty": {}},
    {"year": 2**53 + 1, "tags": ["metal"], "note": "plain"},
]
FIELDS = (
    "year",
    "tags",
    "open",
    "author.name",
    "author.born.year",
    "a.b",
    "source",
    "title",
    "place",
    "note",
)
TEXTS = ("Berta", "Cäsar", "s3", "T1", "", "Zebra", "a'b\"c%s{}\\ \u2028", "true", '") or id > 0 or ("')
VALUES = st.sampled_from(TEXTS) | st.sampled_from(
    [1999, 2004.5, 0, 1, 2, 1950, 2**53, 2**53 + 1, -1, True, False, "2004", "metal", "coin", "Coin", "Anna"]
)
CONDITIONS = st.one_of(
    VALUES,
    st.none(),
    st.lists(VALUES, min_size=1, max_size=4),
    st.dictionaries(st.sampled_from(["=", "!=", "<", "<=", ">", ">="]), VALUES, min_size=1, max_size=3),
    st.dictionaries(st.sampled_from(["in", "not in"]), st.lists(VALUES, min_size=1, max_size=3), min_size=1),
    st.dictionaries(st.just("is null"), st.booleans(), min_size=1),
)
FILTERS = st.recursive(
    st.dictionaries(st.sampled_from(FIELDS), CONDITIONS, min_size=1, max_size=2),
    lambda parts: (
        st.dictionaries(st.sampled_from(["$and", "$or"]), st.lists(parts, min_size=1, max_size=3), min_size=1)
        | st.dictionaries(st.just("$not"), parts, min_size=1)
    ),
    max_leaves=4,
)


def _odd_passages() -> list[Passage]:
    return [
        Passage(number, f"s{number}", f"T{number % 3}", f"line {number}", f"text {number}", metadata)
        for number, metadata in enumerate(METADATA)
    ]


@pytest.fixture(scope="module")
def odd(server: Server) -> Iterator[StoreRetriever]:
    server.load(random_vectors(len(METADATA), DIMENSION), "odd", _odd_passages())
    with server.open("odd") as store:
        yield store


@settings(max_examples=30, deadline=None)
@example(where={"open": 0})
@example(where={"open": {">=": 1}})
@example(where={"tags": "metal", "$not": {"year": 1999}})
@given(where=FILTERS)
def test_conditions_select_what_they_select_in_memory(where: dict[str, Any], odd: StoreRetriever) -> None:
    filter = read_filter(where)
    assert filter is not None
    expected = [one.id for one in _odd_passages() if matches(filter, field_values(one))]
    if not expected:
        with pytest.raises(InputError, match="no passage satisfies it"):
            odd.narrowed(where)
        return
    (found,) = odd.narrowed(where).search(questions(random_vectors(1, DIMENSION)), 99)
    assert sorted(found.ids.tolist()) == expected


def test_an_unknown_field_is_named(odd: StoreRetriever) -> None:
    with pytest.raises(InputError, match=r"where: 'yaer' .* did you mean 'year'"):
        odd.narrowed("yaer = 1999")


def test_passages_come_and_go(server: Server) -> None:
    vectors = random_vectors(10, DIMENSION, seed=4)
    server.load(vectors[:5], "changing")
    query = questions(vectors[7:8])
    large = 2**62 + 7  # ids need not be positions
    with server.open("changing") as store:
        new = [replace(passage(7), id=large), replace(passage(2), text="another text", metadata={"new": [1]})]
        longer = vectors[[7, 8]] * np.float32(100)
        store.add(new, longer)
        assert len(store) == 6
        (found,) = store.search(query, 1)
        assert found.ids.tolist() == [large]
        assert store.passages([2, large]) == [new[1], new[0]]
        assert (
            store.score(query, np.array([2]))[0, 0]
            == FlatIndex.build(longer).score(query, np.array([1]))[0, 0]
        )
        assert store.narrowed("new = 1").search(query, 9)[0].ids.tolist() == [2]
        store.remove([large, 3, 12345])
        assert len(store) == 4
        assert large not in store.search(query, 9)[0].ids
        with pytest.raises(InputError, match=rf"passage id: {large} .* has no such passage"):
            store.passages([large])
        with pytest.raises(InputError, match=r"^vectors: "):
            store.add([passage(9)], random_vectors(1, DIMENSION + 1))
        with pytest.raises(InputError, match=r"^vectors: 'not finite'"):
            store.add([passage(9)], np.full((1, DIMENSION), np.nan, dtype=np.float32))
    with server.open("changing") as again:
        assert sorted(again.search(query, 9)[0].ids.tolist()) == [0, 1, 2, 4]
        assert again.record.longest >= 0.999 * float(np.linalg.norm(longer[1]))


def test_what_is_there_is_not_written_over(server: Server) -> None:
    server.load(random_vectors(3, DIMENSION), "there")
    address = server.address("there")
    with pytest.raises(InputError, match="it exists already; replace it"):
        store_type(address).load(address, collection(random_vectors(2, DIMENSION)), Loading())
    with server.open("there") as store:
        assert len(store) == 3
    server.load(random_vectors(2, DIMENSION + 1), "there")
    with server.open("there") as store:
        assert (len(store), store.dimension) == (2, DIMENSION + 1)


def test_a_load_that_is_cut_off_cannot_be_searched(server: Server) -> None:
    made = collection(random_vectors(600, DIMENSION))

    def fail(ids: Any) -> list[Passage]:
        if 300 in ids:
            raise KeyboardInterrupt
        return [passage(id) for id in ids]

    address = server.address("cut")
    with pytest.raises(KeyboardInterrupt):
        store_type(address).load(address, replace(made, passages=fail), Loading())
    with pytest.raises(KnowledgeBaseError, match=r"was cut off|does not exist"):
        server.open("cut")
    server.load(random_vectors(4, DIMENSION), "cut")
    with server.open("cut") as store:
        assert len(store) == 4


def test_what_does_not_fit_is_named(server: Server) -> None:
    server.load(random_vectors(3, DIMENSION), "fits")

    class Encoder:
        name, dimension, fingerprint = "other", DIMENSION, "fedcba9876543210"

    other: Any = Encoder()
    with pytest.raises(KnowledgeBaseError, match=r"encoder: 'other' .* does not fit .*'fits'"):
        server.open("fits", encoder=other)
    other.dimension = DIMENSION + 1
    with pytest.raises(KnowledgeBaseError, match=rf"encoder: 'other' .* {DIMENSION + 1} dimensions"):
        server.open("fits", encoder=other)
    with pytest.raises(KnowledgeBaseError, match=r"'nowhere' at .* does not exist"):
        server.open("nowhere")
    with pytest.raises(KnowledgeBaseError, match=r"'fits' at .* has no HNSW index"):
        server.open("fits", index="hnsw")
    with server.open("fits") as store:
        for bad in (random_vectors(1, DIMENSION - 1), np.full((1, DIMENSION), np.nan, dtype=np.float32)):
            with pytest.raises(InputError, match=r"^queries\[0\]\.vector: "):
                store.search(questions(bad), 1)
        assert len(store.search(questions(random_vectors(1, DIMENSION)), 3)[0]) == 3
    with pytest.raises(StoreUnavailable, match="has been closed: open it again"):
        store.search(questions(random_vectors(1, DIMENSION)), 3)


@pytest.mark.parametrize(
    "address",
    [
        "qdrant://:pa55word@/notes",
        "qdrant://host:port/notes",
        "qdrant://:pa55@word@127.0.0.1/a@b",
        "milvus://root:pa55word@host/",
        "milvus://root:pa55word@host:1:2/notes",
        "qdrant://root:pa55/word@host/notes",
    ],
)
def test_an_address_that_cannot_be_read_is_not_shown(address: str) -> None:
    pytest.importorskip("qdrant_client")
    pytest.importorskip("pymilvus")
    with pytest.raises(
        InputError, match=r"^store: '\(not shown\)' .* give (qdrant|milvus)://HOST:PORT/NAME"
    ) as error:
        open_store(address)
    assert "pa55" not in str(error.value)


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(
        InputError, match=r"store: 'redis' .* begins with postgresql, postgres, qdrant, milvus"
    ):
        open_store("redis://host/notes")


@pytest.mark.parametrize("kind", ["qdrant", "milvus"])
def test_nobody_is_there(kind: str) -> None:
    pytest.importorskip({"qdrant": "qdrant_client", "milvus": "pymilvus"}[kind])
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # a port on which nobody listens
        port = taken.getsockname()[1]
        began = time.monotonic()
        with pytest.raises(StoreUnavailable) as error:
            open_store(f"{kind}://me:pa55word@127.0.0.1:{port}/notes")
        assert time.monotonic() - began < 5
    assert f"{kind}: collection 'notes' at 127.0.0.1:{port} cannot be reached" in str(error.value)
    assert "pa55word" not in repr(error.value)


def test_a_store_of_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is installed is found by its entry point, with no line of specrag changed."""
    from specrag.extras import brought

    (tmp_path / "shelf.py").write_text(
        "class Shelf:\n"
        "    @staticmethod\n"
        "    def open(address, limits):\n"
        "        raise RuntimeError(address + ' at ' + str(limits.timeout))\n"
    )
    info = tmp_path / "shelf-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shelf\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[specrag.stores]\nshelf = shelf:Shelf\nbroken = shelf:Nothing\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    brought.cache_clear()
    try:
        with pytest.raises(RuntimeError, match="shelf://a/b at 3"):
            open_store("shelf://a/b", limits=Limits(timeout=3))
        with pytest.raises(SpecragError, match=r"store 'broken' of shelf:Nothing cannot be imported"):
            open_store("broken://a/b")
    finally:
        brought.cache_clear()


def test_the_record_says_what_cannot_be_read() -> None:
    from specrag.retrieval.stores.base import StoreInfo

    info = StoreInfo(3, collection(random_vectors(1, 4)).encoder, 2.5, ("a", "b"), 7, ("b",), complete=False)
    assert StoreInfo.from_json(info.to_json(), "place") == info
    assert StoreInfo.from_json(info.to_json(), "place", 9) == replace(info, passages=9)
    older = {"passages": 3, "longest": 1.0, "encoder": json.loads(info.to_json())["encoder"], "fields": ["a"]}
    graph = {"neighbors": 8, "ef_construction": 32, "ef_search": 40}
    assert StoreInfo.from_json(json.dumps({"format": 1, **older, "hnsw": graph}), "place").breadth == 40
    for text, message in (
        (None, "place was not made by specrag"),
        ('{"format": 2}', "place has format 2 and this version of specrag reads format 1"),
        ('{"format": 1}', "the record of place is damaged"),
        ("[]", "the record of place is damaged"),
        ("{", "the record of place is damaged"),
    ):
        with pytest.raises(KnowledgeBaseError, match=message):
            StoreInfo.from_json(text, "place")
