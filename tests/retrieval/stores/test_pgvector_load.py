"""Loading PostgreSQL: whole or not at all, never over what is somebody else's, and opened only where it fits."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrag.bench.postgres import PostgresServer
from specrag.errors import InputError, StoreUnavailable
from specrag.retrieval.index.flat import FlatIndex
from specrag.retrieval.index.hnsw import HnswSettings
from specrag.retrieval.manifest import KnowledgeBaseError
from specrag.retrieval.passage import Passage
from specrag.retrieval.progress import Progress
from specrag.retrieval.stores.base import Collection
from tests.retrieval.library import QUESTIONS, encoder, index, open_base, write_library
from tests.retrieval.stores.tables import (
    collection,
    connected,
    leftovers,
    load,
    open_table,
    passage,
    questions,
    random_vectors,
    same,
)

VECTORS = random_vectors(30, 6)


def test_a_knowledge_base_answers_from_the_database_as_from_the_disk(
    postgres: PostgresServer, model_home: Path, tmp_path: Path
) -> None:
    index(write_library(tmp_path / "library"), kb=tmp_path / "kb")
    with open_base(tmp_path / "kb") as base:
        load(postgres.url, Collection.of(base), "library", hnsw=HnswSettings(), replace=True)
        for name in ("flat", "hnsw"):
            with open_table(postgres.url, "library", index=name, encoder=encoder()) as store:
                assert len(store) == len(base)
                queries = store.encode(QUESTIONS)
                expected = base.index("flat").search(base.encode(QUESTIONS, "flat"), 3)
                for theirs, mine in zip(store.search(queries, 3), expected, strict=True):
                    assert theirs.scores.tolist() == mine.scores.tolist()
                    held = store.passages(theirs.ids.tolist()), base.passages(mine.ids.tolist())
                    assert [replace(passage, id=0) for passage in held[0]] == [
                        replace(passage, id=0) for passage in held[1]
                    ]


def test_the_table_names_its_encoder(postgres: PostgresServer, model_home: Path, tmp_path: Path) -> None:
    index(write_library(tmp_path / "library"), kb=tmp_path / "kb")
    with open_base(tmp_path / "kb") as base:
        load(postgres.url, Collection.of(base), "named", replace=True)
    with open_table(postgres.url, "named") as store:
        (query,) = store.encode(["copper"])
        assert store.encoder().fingerprint == encoder().fingerprint
        assert query.vector is not None
        assert query.vector.tobytes() == encoder().encode_queries(["copper"])[0].tobytes()
        with pytest.raises(InputError, match="query: ' ' "):
            store.encode(["copper", " "])
    with connected(postgres.url) as connection:
        connection.execute(
            "UPDATE specrag_stores SET content = jsonb_set(content, '{encoder,fingerprint}', '\"other\"') "
            "WHERE name = 'named'"
        )
    with (
        open_table(postgres.url, "named") as store,
        pytest.raises(
            KnowledgeBaseError, match=r"encoder: 'minilm-l6-v2' \(.*\) does not fit pgvector: table 'named'"
        ),
    ):
        store.encode(["copper"])


class OtherEncoder:
    """All that is looked at before an encoder is used."""

    def __init__(self, dimension: int, fingerprint: str) -> None:
        self.name = "other"
        self.dimension = dimension
        self.fingerprint = fingerprint


@pytest.mark.parametrize(
    ("dimension", "fingerprint", "message"),
    [
        (
            7,
            "0123456789abcdef",
            r"'other' makes vectors of 7 dimensions and pgvector: table 'fits' at .* holds 6: use 'made-up'",
        ),
        (
            6,
            "fedcba9876543210",
            r"'other' \(fedcba9876543210\) does not fit pgvector: table 'fits' .* made with 'made-up'",
        ),
    ],
)
def test_another_encoder_is_refused(
    dimension: int, fingerprint: str, message: str, postgres: PostgresServer
) -> None:
    load(postgres.url, collection(VECTORS), "fits", replace=True)
    other: Any = OtherEncoder(dimension, fingerprint)
    with pytest.raises(KnowledgeBaseError, match=message):
        open_table(postgres.url, "fits", encoder=other)


def test_what_is_no_store_is_refused(postgres: PostgresServer) -> None:
    load(postgres.url, collection(VECTORS), "store", replace=True)
    with connected(postgres.url) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS mine (id int)")
        for table, index_name, message in (
            ("nowhere", "flat", r"table 'nowhere' at .* does not exist: load a knowledge base"),
            ("mine", "flat", r"table 'mine' at .* was not made by specrag"),
            ("store", "hnsw", r"table 'store' at .* has no HNSW index: search it exactly"),
        ):
            with pytest.raises(KnowledgeBaseError, match=message):
                open_table(postgres.url, table, index=index_name)
        with pytest.raises(InputError, match=r"^index: 'bm25' .* flat and hnsw"):
            open_table(postgres.url, "store", index="bm25")
        with pytest.raises(InputError, match=r"^breadth: 0 "):
            open_table(postgres.url, "store", ef_search=0)
        with pytest.raises(InputError, match=r"^remembered: 0 "):
            open_table(postgres.url, "store", remembered=0)
        connection.execute("ALTER TABLE store ALTER embedding TYPE vector USING embedding::vector")
        connection.execute(
            "ALTER TABLE store ALTER embedding TYPE vector(7) USING (embedding::real[] || 0::real)::vector"
        )
        with pytest.raises(KnowledgeBaseError, match="holds vectors of 7 dimensions and should hold 6"):
            open_table(postgres.url, "store")
        connection.execute(
            "UPDATE specrag_stores SET content = content || '{\"format\": 2}' WHERE name = 'store'"
        )
        with pytest.raises(
            KnowledgeBaseError, match="has format 2 and this version of specrag reads format 1"
        ):
            open_table(postgres.url, "store")
        connection.execute("UPDATE specrag_stores SET content = '{\"format\": 1}' WHERE name = 'store'")
        with pytest.raises(KnowledgeBaseError, match=r"the record of pgvector: table 'store' .* is damaged"):
            open_table(postgres.url, "store")


def test_a_database_without_the_extension(postgres: PostgresServer) -> None:
    with connected(postgres.url) as connection:
        connection.execute("DROP DATABASE IF EXISTS bare")
        connection.execute("DROP ROLE IF EXISTS reader")
        connection.execute("CREATE DATABASE bare")
        connection.execute("CREATE ROLE reader LOGIN")
        bare = postgres.url.replace("/postgres?", "/bare?")
        with pytest.raises(KnowledgeBaseError, match="has no type for vectors: install pgvector"):
            open_table(bare)
        reader = bare.replace("//postgres@", "//reader@")
        with pytest.raises(KnowledgeBaseError, match="let an administrator run CREATE EXTENSION vector"):
            load(reader, collection(VECTORS))
        load(bare, collection(VECTORS))
        with pytest.raises(StoreUnavailable, match=r"cannot be used \(permission denied"):
            open_table(reader)
        connection.execute("DROP DATABASE bare WITH (FORCE)")
        connection.execute("DROP ROLE reader")


@settings(max_examples=10, deadline=None)
@given(
    name=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=15)
)
def test_any_name_is_a_name_and_nothing_else(name: str, postgres: PostgresServer) -> None:
    _load_and_drop(name, postgres)


@pytest.mark.parametrize(
    "name",
    [
        'x"; DROP TABLE specrag_stores; --',
        "x'; DROP TABLE specrag_stores; --",
        "a%sb",
        "a%(k)sb",
        "{table}",
        "$1",
        "\\",
        "public.passages",
        "select",
        "größe 日本",
        "x" * 63,
    ],
)
def test_hostile_names(name: str, postgres: PostgresServer) -> None:
    _load_and_drop(name, postgres)


def _load_and_drop(name: str, postgres: PostgresServer) -> None:
    load(postgres.url, collection(VECTORS), name, hnsw=HnswSettings(4, 16, 30))
    try:
        where = {"title": ["title 3", "'; DROP TABLE x"], "number": {">": 1}}
        for index_name in ("flat", "hnsw"):
            with open_table(postgres.url, name, index=index_name) as store:
                assert len(store.search(questions(VECTORS[:2]), 3)[1]) == 3
                assert store.passages([5]) == [passage(5)]
                assert store.narrowed(where).search(questions(VECTORS[:1]), 3)[0].ids.tolist() == [3]
        with pytest.raises(InputError, match=r"^table: .* exists already"):
            load(postgres.url, collection(VECTORS), name)
    finally:
        with connected(postgres.url) as connection:
            connection.execute(psycopg.sql.SQL("DROP TABLE {}").format(psycopg.sql.Identifier(name)))
            connection.execute("DELETE FROM specrag_stores WHERE name = %s", (name,))


@pytest.mark.parametrize("name", ["", "a\0b", "x" * 64, "ü" * 32, "\ud800", "specrag_stores", 7])
def test_names_that_cannot_be(name: Any, postgres: PostgresServer) -> None:
    for call in (
        lambda: load(postgres.url, collection(VECTORS), name),
        lambda: open_table(postgres.url, name),
    ):
        with pytest.raises(InputError, match=r"^table: "):
            call()


def test_nobody_elses_table_is_replaced(postgres: PostgresServer) -> None:
    with connected(postgres.url) as connection:
        connection.execute(
            "DROP TABLE IF EXISTS theirs; CREATE TABLE theirs (id int); INSERT INTO theirs VALUES (7)"
        )
        for replacing in (False, True):
            with pytest.raises(InputError, match=r"^table: 'theirs' .* another table of this name"):
                load(postgres.url, collection(VECTORS), "theirs", replace=replacing)
        assert connection.execute("SELECT id FROM theirs").fetchall() == [(7,)]


def test_replacing_takes_the_whole_place(postgres: PostgresServer) -> None:
    load(postgres.url, collection(VECTORS), "again", hnsw=HnswSettings(4, 16, 9), replace=True)
    other = random_vectors(12, 9, seed=1)
    reports: list[Progress] = []
    load(postgres.url, collection(other), "again", replace=True, progress=reports.append)
    with open_table(postgres.url, "again") as store:
        assert (len(store), store.dimension, store.record.breadth) == (12, 9, None)
    assert reports == [
        Progress("loading", 0, 12),
        Progress("loading", 12, 12),
        Progress("indexing", 0, 1),
        Progress("indexing", 1, 1),
    ]
    assert leftovers(postgres.url) == 0


def test_vectors_that_pgvector_cannot_take(postgres: PostgresServer) -> None:
    with pytest.raises(InputError, match=r"16001 dimensions' .* at most 16000"):
        load(postgres.url, collection(random_vectors(1, 16001)), "big")
    with pytest.raises(InputError, match=r"2001 dimensions' .* at most 2000"):
        load(postgres.url, collection(random_vectors(1, 2001)), "big", hnsw=HnswSettings())
    for graph, field in (
        (HnswSettings(neighbors=101, ef_construction=300), "neighbors"),
        (HnswSettings(neighbors=32, ef_construction=63), "ef_construction"),
        (HnswSettings(ef_search=1001), "ef_search"),
    ):
        with pytest.raises(InputError, match=f"^{field}: "):
            load(postgres.url, collection(VECTORS), "big", hnsw=graph)


@pytest.mark.parametrize("dimension", [1900, 1901, 3000])
def test_large_vectors_come_back_as_they_went(dimension: int, postgres: PostgresServer) -> None:
    vectors = random_vectors(20, dimension)
    vectors[3, 5], vectors[4, 6] = np.float32(1e-40), np.float32(-0.0)  # a denormal number, a negative zero
    long = replace(
        collection(vectors), passages=lambda ids: [replace(passage(id), text="long " * 9000) for id in ids]
    )
    load(postgres.url, long, "wide", replace=True)
    with open_table(postgres.url, "wide") as store:
        queries = questions(vectors[:3])
        assert same(store.search(queries, 5), FlatIndex.build(vectors).search(queries, 5))
        assert store.passages([4])[0].text == "long " * 9000


def test_what_postgresql_cannot_hold_is_replaced(postgres: PostgresServer) -> None:
    metadata = {"a\0": ["b\0", {"c": math.nan}], "d": math.inf, "e": 10**30, "f": None, "g": 1.5, "h": True}
    odd = replace(
        collection(VECTORS[:1]),
        passages=lambda ids: [Passage(id, "s\0", "t", "", "x\0y", metadata) for id in ids],
    )
    load(postgres.url, odd, "odd", replace=True)
    with open_table(postgres.url, "odd") as store:
        stored = {"a\ufffd": ["b\ufffd", {"c": None}], "d": None, "e": 10**30, "f": None, "g": 1.5, "h": True}
        assert store.passages([0]) == [Passage(0, "s\ufffd", "t", "", "x\ufffdy", stored)]
