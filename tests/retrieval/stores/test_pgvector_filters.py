"""Conditions in PostgreSQL select what they select in a knowledge base on the disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import psycopg
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from psycopg import sql

from specrag.bench.postgres import PostgresServer
from specrag.errors import InputError
from specrag.retrieval.index.filters import find_allowed, read_filter
from specrag.retrieval.index.flat import FlatIndex
from specrag.retrieval.passage_store import PassageStore, StoredPassage
from specrag.retrieval.stores.pgvector.statements import Conditions
from specrag.retrieval.stores.retriever import StoreRetriever
from tests.retrieval.library import write_passages
from tests.retrieval.stores.tables import collection, load, open_table, questions, random_vectors, same

METADATA: list[dict[str, Any]] = [
    {},
    {"year": 1999, "tags": ["metal", "coin"], "open": True},
    {"year": 2004.5, "tags": "metal", "open": False},
    {"year": "2004", "tags": [], "open": None},
    {"year": [1999, "2004", 7], "tags": [["metal"], {"a": "coin"}, "Coin"]},
    {"author": {"name": "Anna", "born": {"year": 1950}}},
    {"author": {"name": ["Cäsar", "Dora"]}, "a.b.c": 1},
    {"author.name": "Berta", "a": {"b": {"c": 2}}, "source": "not this one", "year": 10**25},
    {"a": {"b.c": 3}},
    {"a.b": {"c": 4}},
    {"year": -0.0, "tags": "", "open": 1, "note": "a'b\"c%s{}\\ \u2028"},
    {"year": 1e300, "tags": "Zebra", "open": "true", "title": "hidden", "empty": {}},
]
FIELDS = (
    "year",
    "tags",
    "open",
    "author.name",
    "author.born.year",
    "a.b.c",
    "source",
    "title",
    "place",
    "note",
)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PassageStore]:
    """The passages in SQLite, as a knowledge base has them."""
    documents = [
        (
            f"folder/{number}.txt",
            [StoredPassage(f"T{number % 3}", f"line {number}", f"text {number}", json.dumps(metadata))],
        )
        for number, metadata in enumerate(METADATA)
    ]
    store = write_passages(tmp_path_factory.mktemp("passages") / "passages", documents)
    yield store
    store.close()


@pytest.fixture(scope="module")
def remote(postgres: PostgresServer, local: PassageStore) -> Iterator[StoreRetriever]:
    made_up, vectors = collection(random_vectors(len(METADATA), 4)), random_vectors(len(METADATA), 4)
    held = replace(
        made_up, ids=local.rows.ids, vectors=lambda ids: vectors[: len(ids)], passages=local.passages
    )
    load(postgres.url, held, "filters", replace=True)
    with open_table(postgres.url, "filters") as store:
        yield store


VALUES = st.sampled_from(
    [
        1999,
        2004,
        2004.5,
        "2004",
        "metal",
        "coin",
        "Coin",
        True,
        False,
        0,
        1,
        2,
        3,
        4,
        "Anna",
        "Berta",
        "Cäsar",
        "Dora",
        1950,
        "folder/3.txt",
        "T1",
        "line 4",
        "",
        "Zebra",
        "a'b\"c%s{}\\ \u2028",
        2**62,
        -1,
        "a\0",
        "true",
    ]
)
CONDITIONS = st.one_of(
    VALUES,
    st.lists(VALUES, min_size=1, max_size=4),
    st.dictionaries(st.sampled_from(["=", "<", "<=", ">", ">="]), VALUES, min_size=1, max_size=3),
    st.dictionaries(st.sampled_from(["in", "not in"]), st.lists(VALUES, min_size=1, max_size=3), min_size=1),
    st.dictionaries(st.just("between"), st.tuples(VALUES, VALUES), min_size=1),
    st.dictionaries(st.just("!="), VALUES, min_size=1),
    st.dictionaries(st.just("is null"), st.booleans(), min_size=1),
)
FILTERS = st.recursive(
    st.dictionaries(st.sampled_from(FIELDS), CONDITIONS, min_size=1, max_size=3),
    lambda parts: (
        st.dictionaries(
            st.sampled_from(["$and", "$or"]), st.lists(parts, min_size=1, max_size=3), min_size=1, max_size=2
        )
        | st.dictionaries(st.just("$not"), parts, min_size=1)
    ),
    max_leaves=4,
)


@settings(max_examples=150, deadline=None)
@example(where={"open": True})
@example(where={"open": {">=": 0, "<": 1}})
@example(where={"open": [1, "true"]})
@example(where={"tags": ["metal", "coin"]})
@example(where={"tags": {">": "C", "<": "n"}})
@example(where={"year": 10**18})
@example(where={"note": "a'b\"c%s{}\\ \u2028"})
@example(where={"$not": {"tags": "metal"}})
@example(where={"title": {"!=": "T1"}, "source": {"is null": False}, "tags": {"is null": True}})
@given(where=FILTERS)
def test_the_same_passages_are_allowed(
    where: dict[str, Any], local: PassageStore, remote: StoreRetriever, postgres: PostgresServer
) -> None:
    expected = find_allowed(local, where, len(METADATA))
    ids = sorted(local.rows.ids[np.flatnonzero(expected)].tolist())
    if not ids:
        with pytest.raises(InputError, match="no passage satisfies it"):
            remote.narrowed(where)
        return
    (everything,) = remote.narrowed(where).search(questions(random_vectors(1, 4)), 99)
    assert sorted(everything.ids.tolist()) == ids
    found = Conditions(read_filter(where))  # and the database alone decides so
    query = sql.SQL("SELECT id FROM filters AS passage WHERE {} ORDER BY id").format(found.clause)
    with psycopg.connect(postgres.url) as connection:
        assert [id for (id,) in connection.execute(query, found.parameters)] == ids


def test_every_field_is_known(local: PassageStore, remote: StoreRetriever) -> None:
    assert set(local.field_names()) <= set(remote.record.fields)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"yaer": 1999}, "where: 'yaer' .* did you mean 'year'"),
        ({"year": {"~": 1999}}, "where: year: '~' .* take one of"),
        ({"year": {}}, "where: year: "),
        ({"year": []}, "where: year: "),
        ({"year": [float("nan")]}, "where: year: "),
        ({"x'; DROP TABLE filters; --": 1}, "where: "),
        (["year"], "where: "),
    ],
    ids=str,
)
def test_conditions_that_cannot_be_used(where: Any, message: str, remote: StoreRetriever) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        remote.narrowed(where)
    assert len(remote.search(questions(random_vectors(1, 4)), 3)[0]) == 3


def test_a_store_opened_with_conditions(
    postgres: PostgresServer, remote: StoreRetriever, local: PassageStore
) -> None:
    where = {"title": ["T1", "T2"]}
    allowed = find_allowed(local, where, len(METADATA))
    flat = FlatIndex.build(random_vectors(len(METADATA), 4), local.rows)
    queries = questions(random_vectors(3, 4, seed=1))
    with open_table(postgres.url, "filters", where=where) as store:
        assert same(store.search(queries, 99), flat.search(queries, 99, allowed))
    with pytest.raises(InputError, match=r"^where: .* no passage satisfies it; widen the conditions"):
        open_table(postgres.url, "filters", where={"title": "T9"})
