"""Conditions on passages: what they select, how they are written, what is refused."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specrag.errors import InputError
from specrag.retrieval.index.filters import find_allowed, parse_conditions
from specrag.retrieval.passage_store import (
    PassageStore,
    PassageWriter,
    StoredFile,
    StoredPassage,
    flatten,
    metadata_json,
)

ROWS: list[dict[str, Any]] = [
    {"year": 1999, "src": "a", "tags": ["metal", "coin"], "open": True},
    {"year": 2000, "src": "b", "tags": [], "open": False},
    {"year": 2000.5, "src": "c", "author": {"name": "Ann", "age": 31}},
    {"year": "2001", "src": "a"},
    {"src": None, 'odd "name" $.x': "yes", "year": -5},
    {"year": 2**70, "date": "2024-02-29", "ratio": math.nan},
]


def write_store(path: Path, rows: list[dict[str, Any]]) -> PassageStore:
    """Two passages a row: titles alternate, rows 0 and 1 are one document."""
    writer = PassageWriter(path)
    for start in range(0, len(rows), 2):
        source = f"file-{start // 2}.jsonl"
        passages = [
            StoredPassage(f"Title {place}", f"line {number + 1}", "text", metadata_json(row))
            for number, row in enumerate(rows[start : start + 2])
            for place in "AB"
        ]
        writer.add(StoredFile(f"/x/{source}", source, 1, 1, ""), passages)
    writer.close()
    return PassageStore(path)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[PassageStore]:
    store = write_store(tmp_path / "passages.sqlite", ROWS)
    yield store
    store.close()


def select(store: PassageStore, where: Mapping[str, Any]) -> list[int]:
    """Rows selected; both passages of a row must agree."""
    mask = find_allowed(store, where, len(store)).reshape(-1, 2)
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
    ],
)
def test_selects(where: dict[str, Any], rows: list[int], store: PassageStore) -> None:
    assert select(store, where) == rows


def test_title_differs_inside_a_document(store: PassageStore) -> None:
    mask = find_allowed(store, {"title": "Title A"}, len(store))
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
    path = tmp_path / "random.sqlite"
    path.unlink(missing_ok=True)
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
        ({"year": {"=>": 2000}}, ("year", "'=>'", "take one of = < <= > >= in")),
        ({"year": {}}, ("year", "{}", "compare with one of")),
        ({"src": []}, ("src", "[]", "at least one value")),
        ({"src": {"in": "abc"}}, ("src", "'abc'", "give a list")),
        ({"year": math.inf}, ("year", "inf", "a finite number")),
        ({"year": 2**70}, ("year", str(2**70), "a finite number")),
        ({"year": None}, ("year", "None", "give a text")),
        ({"year": [[2000]]}, ("year", "[2000]", "give a text")),
        ({"src": "\ud800"}, ("src", "UTF-8")),
        ({"": 1}, ("where", "name a field")),
        ([("src", "a")], ("where", "give a mapping")),
    ],
    ids=str,
)
def test_refused(where: Any, named: tuple[str, ...], store: PassageStore) -> None:
    with pytest.raises(InputError) as caught:
        find_allowed(store, where, len(store))
    assert [part for part in named if part not in str(caught.value)] == [], str(caught.value)


@pytest.mark.parametrize(
    ("texts", "where"),
    [
        (["year>=2000"], {"year": {">=": 2000}}),
        (["year >= 2000", "year<2010.5"], {"year": {">=": 2000, "<": 2010.5}}),
        (["src=a,b"], {"src": {"in": ["a", "b"]}}),
        (["src==a"], {"src": {"in": ["a"]}}),
        (["id=17"], {"id": {"in": [17, "17"]}}),
        (["open=true"], {"open": {"in": [True, "true"]}}),
        (['title="Paris, Texas"'], {"title": {"in": ["Paris, Texas"]}}),
        (["date>=2024-01-05"], {"date": {">=": "2024-01-05"}}),
        (['year>="2000"'], {"year": {">=": "2000"}}),
        (["place=lines 10-24"], {"place": {"in": ["lines 10-24"]}}),
        (["zip=00501"], {"zip": {"in": ["00501"]}}),
        (["formula=a=b"], {"formula": {"in": ["a=b"]}}),
    ],
)
def test_parses(texts: list[str], where: dict[str, Any]) -> None:
    assert parse_conditions(texts) == where


@pytest.mark.parametrize("text", ["year", "=2000", "year>=", "year!=2000", "year~2", ""])
def test_unclear_conditions_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="--where"):
        parse_conditions([text])


def test_comparing_twice_is_refused() -> None:
    with pytest.raises(InputError, match="compared twice"):
        parse_conditions(["src=a", "src=b"])
