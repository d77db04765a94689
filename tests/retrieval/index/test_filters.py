"""Conditions on passages: what they select, how they are written, what is refused."""

from __future__ import annotations

import math
import operator
import re
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specrag.errors import InputError
from specrag.retrieval.index.filters import Filter, Where, find_allowed, matches, read_filter
from specrag.retrieval.passage_store import (
    PassageStore,
    StoredPassage,
    flatten,
    metadata_json,
)
from tests.retrieval.library import write_passages

ROWS: list[dict[str, Any]] = [
    {"year": 1999, "src": "a", "tags": ["metal", "coin"], "open": True},
    {"year": 2000, "src": "b", "tags": [], "open": False},
    {"year": 2000.5, "src": "c", "author": {"name": "Ann", "age": 31}},
    {"year": "2001", "src": "a"},
    {"src": None, 'odd "name" $.x': "yes", "year": -5},
    {"year": 2**70, "date": "2024-02-29", "ratio": math.nan},
]


def write_store(folder: Path, rows: list[dict[str, Any]]) -> PassageStore:
    """Two passages a row: titles alternate, rows 0 and 1 are one document."""
    documents = []
    for start in range(0, len(rows), 2):
        passages = [
            StoredPassage(f"Title {place}", f"line {number + 1}", "text", metadata_json(row))
            for number, row in enumerate(rows[start : start + 2])
            for place in "AB"
        ]
        documents.append((f"file-{start // 2}.jsonl", passages))
    return write_passages(folder, documents)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[PassageStore]:
    store = write_store(tmp_path / "passages", ROWS)
    yield store
    store.close()


def select(store: PassageStore, where: Where) -> list[int]:
    """Rows selected; both passages of a row must agree."""
    mask = find_allowed(store, where, store.state.rows).reshape(-1, 2)
    assert (mask[:, 0] == mask[:, 1]).all()
    return [int(row) for row in np.flatnonzero(mask[:, 0])]


@pytest.mark.parametrize(
    ("where", "rows"),
    [
        ({"src": "a"}, [0, 3]),
        ({"src": ["a", "b"]}, [0, 1, 3]),
        ({"src": {"=": "c"}}, [2]),
        ({"src": {"in": {"b", "c"}}}, [1, 2]),
        ({"year": 2000}, [1]),
        ({"year": 2000.0}, [1]),
        ({"year": "2001"}, [3]),
        ({"year": {">=": 2000}}, [1, 2, 5]),
        ({"year": {">": 1999, "<": 2000.5}}, [1]),
        ({"year": {"<=": 2000.5}}, [0, 1, 2, 4]),
        ({"year": {">=": "2000"}}, [3]),
        ({"tags": "coin"}, [0]),
        ({"tags": ["coin", "metal"]}, [0]),
        ({"open": True}, [0]),
        ({"open": False}, [1]),
        ({"author.name": "Ann", "author.age": {">": 30}}, [2]),
        ({'odd "name" $.x': "yes"}, [4]),
        ({"date": {">=": "2024-01-01", "<": "2025-01-01"}}, [5]),
        ({"source": "file-0.jsonl"}, [0, 1]),
        ({"place": ["line 1"]}, [0, 2, 4]),
        ({"source": ["file-0.jsonl", "file-1.jsonl"], "src": "a"}, [0, 3]),
        ({"src": "a", "year": {"<": 0}}, []),
        ({"src": "'; DROP TABLE fields; --"}, []),
        ("year = 1999, 2000 or src = c", [0, 1, 2]),
        ("not year >= 2000", [0, 3, 4]),
        ("not year = 1999", [1, 2, 3, 4, 5]),
        ("src != a", [1, 2]),
        ("src is null", [4, 5]),
        ("not (src = a or year > 2000)", [1]),
        ("tags != coin", []),
        ("tags = coin and tags = metal", [0]),
        ("tags > ca and tags < cz", [0]),
        ({"tags": {">": "coin", "<": "metal"}}, []),
        ("tags > coin and tags < metal", []),
        ("tags is null and year between 2000 and 2000.5", [1, 2]),
        ({"author.name": {"is null": False}}, [2]),
        ({"$or": [{"open": False}, {"author.age": {"!=": 30}}]}, [1, 2]),
    ],
)
def test_selects(where: dict[str, Any], rows: list[int], store: PassageStore) -> None:
    assert select(store, where) == rows


def test_title_differs_inside_a_document(store: PassageStore) -> None:
    mask = find_allowed(store, {"title": "Title A"}, store.state.rows)
    assert mask.tolist() == [True, False] * len(ROWS)


_SCALARS = st.one_of(
    st.integers(-3, 3),
    st.sampled_from([0.5, -1.5, 2.0]),
    st.booleans(),
    st.sampled_from(["", "a", "B", "2", "é"]),
)
_FIELDS = st.sampled_from(["x", "y"])
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda value, values: value in values,
}
_CONDITIONS = st.one_of(
    st.tuples(st.sampled_from(["=", "<", "<=", ">", ">="]), _SCALARS),
    st.tuples(st.just("in"), st.lists(_SCALARS, min_size=1, max_size=3)),
)


def _agrees(row: dict[str, Any], field: str, comparisons: dict[str, Any]) -> bool:
    """The definition: one value of the field satisfies every comparison, text and numbers apart."""
    return any(
        all(
            isinstance(value, str) == isinstance(operand, str) and _COMPARE[name](value, operand)
            if name != "in"
            else any(isinstance(value, str) == isinstance(one, str) and value == one for one in operand)
            for name, operand in comparisons.items()
        )
        for value in flatten(row).get(field, [])
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(
        st.dictionaries(_FIELDS, st.one_of(_SCALARS, st.lists(_SCALARS, max_size=2)), max_size=2),
        min_size=1,
        max_size=6,
    ),
    wanted=st.dictionaries(
        _FIELDS, st.lists(_CONDITIONS, min_size=1, max_size=2).map(dict), min_size=1, max_size=2
    ),
)
def test_selects_what_the_definition_says(
    rows: list[dict[str, Any]], wanted: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    path = tmp_path / "random"
    shutil.rmtree(path, ignore_errors=True)
    store = write_store(path, [*rows, {"x": "known", "y": "known"}])
    try:
        expected = [
            number
            for number, row in enumerate(rows)
            if all(_agrees(row, *condition) for condition in wanted.items())
        ]
        found = [row for row in select(store, wanted) if row < len(rows)]
        assert found == expected
    finally:
        store.close()


@pytest.mark.parametrize(
    ("where", "named"),
    [
        ({"yaer": 2000}, ("yaer", "did you mean 'year'", "source", "tags")),
        ({"year": {"=>": 2000}}, ("year", "'=>'", "take one of =, !=, <, <=, >, >=, in")),
        ({"year": {}}, ("year", "{}", "compare with one of")),
        ({"src": []}, ("src", "[]", "at least one value")),
        ({"src": {"in": "abc"}}, ("src", "'abc'", "give a list")),
        ({"year": math.inf}, ("year", "inf", "a finite number")),
        ({"year": 2**70}, ("year", str(2**70), "a finite number")),
        ({"year": [None]}, ("year", "None", "give a text")),
        ({"year": {"=": None}}, ("year", "None", "give a text")),
        ({"year": {"between": [1]}}, ("year: between", "[1]", "the least and the greatest")),
        ({"year": {"is null": 1}}, ("year: is null", "give true or false")),
        ({"$or": []}, ("$or", "[]", "give a list of filters")),
        ({"$and": {"year": 1}}, ("$and", "give a list of filters")),
        ({"$not": {}}, ("$not", "at least one condition")),
        ({"$or": [{"src": "a"}, {"yaer": 1}]}, ("yaer", "did you mean 'year'")),
        ({"yaer": None}, ("yaer", "did you mean 'year'")),
        (3, ("where", "give a text")),
        ({"year": [[2000]]}, ("year", "[2000]", "give a text")),
        ({"src": "\ud800"}, ("src", "UTF-8")),
        ({"": 1}, ("where", "name a field")),
        ([("src", "a")], ("where", "a mapping such as")),
    ],
    ids=str,
)
def test_refused(where: Any, named: tuple[str, ...], store: PassageStore) -> None:
    with pytest.raises(InputError) as caught:
        find_allowed(store, where, store.state.rows)
    assert [part for part in named if part not in str(caught.value)] == [], str(caught.value)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (["year>=2000"], {"year": {">=": 2000}}),
        (["year >= 2000", "year<2010.5"], {"year": {">=": 2000, "<": 2010.5}}),
        (["src=a,b"], {"src": {"in": ["a", "b"]}}),
        ("src==a", {"src": {"in": ["a"]}}),
        ("id=17", {"id": {"in": [17, "17"]}}),
        ("open=true", {"open": {"in": [True, "true"]}}),
        ('title="Paris, Texas"', {"title": {"in": ["Paris, Texas"]}}),
        ('title="a ""b""", c', {"title": ['a "b"', "c"]}),
        ("name='O''Brien'", {"name": "O'Brien"}),
        ("date>=2024-01-05", {"date": {">=": "2024-01-05"}}),
        ('year>="2000"', {"year": {">=": "2000"}}),
        ("note>a,b", {"note": {">": "a,b"}}),
        ("place=lines 10-24", {"place": {"in": ["lines 10-24"]}}),
        ("zip=00501", {"zip": {"in": ["00501"]}}),
        ("formula=a=b", {"formula": {"in": ["a=b"]}}),
        ("title=Tom and Jerry", {"title": "Tom and Jerry"}),
        ("title=Foo (bar), b", {"title": ["Foo (bar)", "b"]}),
        ('size=12" pipe', {"size": '12" pipe'}),
        ("odd name >= 3", {"odd name": {">=": 3}}),
        ('"a=(b)" < 3', {"a=(b)": {"<": 3}}),
        ("is=x", {"is": "x"}),
        ("src!=a", {"src": {"not in": ["a"]}}),
        ("src <> a, b", {"src": {"not in": ["a", "b"]}}),
        ("src in (a, b c)", {"src": ["a", "b c"]}),
        ("src NOT IN (a)", {"src": {"not in": ["a"]}}),
        ("year between 1 and 2.5", {"year": {"between": [1, 2.5]}}),
        ("year not between 1 and 2", {"year": {"not between": [1, 2]}}),
        ("year is null", {"year": None}),
        ("year is not null", {"year": {"is null": False}}),
        ("not year is null", {"year": {"is null": False}}),
        ("not not src=a", {"src": "a"}),
        ("a=x or b=x and c=x", {"$or": [{"a": "x"}, {"b": "x", "c": "x"}]}),
        ("(a=x or b=x) and c=x", {"$and": [{"$or": [{"a": "x"}, {"b": "x"}]}, {"c": "x"}]}),
        ("not (a=x or b<1) and c=x", {"$not": {"$or": [{"a": "x"}, {"b": {"<": 1}}]}, "c": "x"}),
        ("not a=x and b=x", {"$and": [{"$not": {"a": "x"}}, {"b": "x"}]}),
        (["a=x or b=x", {"c": "x"}], {"$and": [{"$or": [{"a": "x"}, {"b": "x"}]}, {"c": "x"}]}),
        (["tags=a", "tags=b"], {"$and": [{"tags": "a"}, {"tags": "b"}]}),
        ([], {}),
    ],
)
def test_text_and_mapping_are_one_language(text: Where, where: dict[str, Any]) -> None:
    if where:
        assert _flat(read_filter(text)) == _flat(read_filter(where))
    else:
        assert read_filter(text) is None
        assert read_filter(where) is None


def _flat(filter: Filter | None) -> str:
    """Whether values of one comparison stand in a list alone, and of what type its nested parts are, is no matter."""
    return re.sub(r"AllOf\(parts=\((AllOf.*)\)\)", r"\1", repr(filter))


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("year", "at its end"),
        ("=2000", "at '=2000'"),
        ("year>=", "at its end: give a value"),
        ("year~2", "at its end"),
        ("", "at its end"),
        ("year!2000", "at '!2000'"),
        ("year>=2000 and", "at its end"),
        ("year>=2000 and month", "at its end"),
        ("year>=2000)", "at [')]+: join"),
        ("(year>=2000", "there has to be a )"),
        ("year is nothing", "at 'nothing'"),
        ("year in ()", "at [')]+: give a value"),
        ("year in 3", "at '3': there has to be a"),
        ("year between 3", "write FIELD between"),
        ("a=x and (b=x or c=x", "there has to be a )"),
        ('title="a" b', "at 'b': join"),
        ("not " * 40 + "a=x", "at most 32 deep"),
        ("(" * 40 + "a=x" + ")" * 40, "at most 32 deep"),
        ("year=1e999", "year: inf"),
    ],
)
def test_unclear_texts_are_refused(text: str, place: str) -> None:
    with pytest.raises(InputError, match=place.replace("a )", r"a \)")) as caught:
        read_filter(text)
    assert str(caught.value).startswith(("where: ", "year: "))


def test_hostile_filters_are_refused() -> None:
    nested: Any = {"a": 1}
    for _ in range(2000):
        nested = {"$not": nested}
    with pytest.raises(InputError, match="at most 32 deep"):
        read_filter(nested)
    with pytest.raises(InputError, match="at most 256 conditions"):
        read_filter(" or ".join(["a=x"] * 257))
    with pytest.raises(InputError, match="300,000 values"):
        read_filter({"source": ["a"] * 300_000})
    assert read_filter({"source": ["a"] * 10_000}) is not None
    assert read_filter(" or ".join(["a=x"] * 256)) is not None


# -- a second opinion: SQLite's own three-valued logic over a table with a column a field ----------------------

_COLUMNS = ("n", "t")
_NUMBERS = st.sampled_from([-1, 0, 1, 2, 2.5, 3])
_TEXTS = st.sampled_from(["", "a", "B", "it's", 'q"q', "é", "2"])
_SQL_ROWS = st.lists(
    st.fixed_dictionaries({"n": st.none() | _NUMBERS, "t": st.none() | _TEXTS}), min_size=1, max_size=8
)


@st.composite
def _clauses(draw: st.DrawFn) -> tuple[str, str, list[Any]]:
    """A condition in our language and in SQL."""
    field = draw(st.sampled_from(_COLUMNS))
    values = _NUMBERS if field == "n" else _TEXTS
    kind = draw(st.sampled_from(["compare", "in", "between", "null"]))
    negated = draw(st.booleans())
    if kind == "null":
        text = f"{field} is {'not ' if negated else ''}null"
        return text, text, []
    if kind == "compare":
        sign, value = draw(st.sampled_from(["=", "!=", "<", "<=", ">", ">="])), draw(values)
        return f"{field} {sign} {_write(value)}", f"{field} {sign} ?", [value]
    if kind == "in":
        several = draw(st.lists(values, min_size=1, max_size=3))
        word = f"{field} {'not ' if negated else ''}in "
        ours = word + f"({', '.join(map(_write, several))})"
        return ours, word + f"({', '.join('?' * len(several))})", several
    low, high = draw(values), draw(values)
    word = f"{field} {'not ' if negated else ''}between "
    return word + f"{_write(low)} and {_write(high)}", word + "? and ?", [low, high]


def _write(value: Any) -> str:
    return '"' + value.replace('"', '""') + '"' if isinstance(value, str) else str(value)


def _joined(parts: Any) -> Any:
    joins = st.tuples(st.sampled_from([" and ", " or "]), st.lists(parts, min_size=2, max_size=3)).map(
        lambda found: (
            f"({found[0].join(part[0] for part in found[1])})",
            f"({found[0].join(part[1] for part in found[1])})",
            [value for part in found[1] for value in part[2]],
        )
    )
    return joins | parts.map(lambda part: (f"not ({part[0]})", f"NOT ({part[1]})", part[2]))


@settings(max_examples=300, deadline=None)
@given(rows=_SQL_ROWS, filter=st.recursive(_clauses(), _joined, max_leaves=6))
def test_selects_what_sql_selects(rows: list[dict[str, Any]], filter: tuple[str, str, list[Any]]) -> None:
    ours, theirs, parameters = filter
    found = read_filter(ours)
    assert found is not None
    selected = [number for number, row in enumerate(rows) if matches(found, flatten(row))]
    with closing(sqlite3.connect(":memory:")) as database:
        database.execute("CREATE TABLE rows (id INTEGER, n NUMERIC, t TEXT)")
        database.executemany(
            "INSERT INTO rows VALUES (?, ?, ?)", [(i, row["n"], row["t"]) for i, row in enumerate(rows)]
        )
        query = f"SELECT id FROM rows WHERE {theirs} ORDER BY id"
        assert selected == [id for (id,) in database.execute(query, parameters)], ours


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=_SQL_ROWS, filter=st.recursive(_clauses(), _joined, max_leaves=4))
def test_a_store_on_the_disk_selects_the_same(
    rows: list[dict[str, Any]], filter: tuple[str, str, list[Any]], tmp_path: Path
) -> None:
    found = read_filter(filter[0])
    assert found is not None
    path = tmp_path / "passages"
    shutil.rmtree(path, ignore_errors=True)
    # Fields that no passage has are refused; here they are not what is looked at.
    store = write_store(path, [*rows, {"n": 0, "t": ""}])
    try:
        assert select(store, found) == [
            number for number, row in enumerate([*rows, {"n": 0, "t": ""}]) if matches(found, flatten(row))
        ]
    finally:
        store.close()


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "text", ["a in (" + " " * 200_000, " " * 200_000 + "=", "a " * 50_000, "a=" + "b " * 50_000 + "("]
)
def test_long_texts_are_read_in_linear_time(text: str) -> None:
    with pytest.raises(InputError):
        read_filter(text)
