"""Conditions on passages, as in ``filters.py``, for a table of PostgreSQL.

A value reaches the server as a parameter, never as a part of the statement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from itertools import product
from typing import Any

from psycopg import sql

from specrag.retrieval.filters import Comparison, comparisons

_COLUMNS = ("source", "title", "place")

# A name a.b.c means the key "c" in "b" in "a", and also the key "b.c" in "a", and so on.
_MOST_DOTS = 6

_METADATA = sql.SQL(
    """
    EXISTS (
        SELECT 1 FROM unnest(ARRAY[{found}]) AS field (value), LATERAL jsonb_array_elements(
            CASE jsonb_typeof(field.value) WHEN 'array' THEN field.value ELSE jsonb_build_array(field.value) END
        ) AS item (value)
        WHERE {terms}
    )
    """
)
_AT = sql.SQL("metadata #> {path}::text[]")

# Text has the order of its characters, whatever the database's language.
_TEXT_OF_ITEM = sql.SQL(
    """CASE WHEN jsonb_typeof(item.value) = 'string' THEN item.value #>> '{{}}' END COLLATE "C" """
).format()
_NUMBER_OF_ITEM = sql.SQL(
    """
    CASE jsonb_typeof(item.value)
        WHEN 'number' THEN (item.value #>> '{{}}')::numeric
        WHEN 'boolean' THEN (item.value #>> '{{}}')::boolean::int::numeric
    END
    """
).format()
_OPERATORS = {"=": "=", "<": "<", "<=": "<=", ">": ">", ">=": ">="}


@dataclass(frozen=True, slots=True)
class Selection:
    """A statement for the ids of the passages that satisfy conditions, and its parameters."""

    statement: sql.Composed
    parameters: dict[str, Any]


def select(table: sql.Identifier, where: Mapping[str, Any]) -> Selection:
    """The passages that satisfy all conditions.

    Raises:
        InputError: an operator is unknown, or a value cannot be compared.
    """
    writer = _Writer()
    terms = [writer.field(field, comparisons(field, condition)) for field, condition in where.items()]
    statement = sql.SQL("SELECT id FROM {} WHERE {}").format(table, sql.SQL(" AND ").join(terms))
    return Selection(statement, writer.parameters)


class _Writer:
    """Collects parameters while terms are written."""

    def __init__(self) -> None:
        self.parameters: dict[str, Any] = {}

    def field(self, field: str, several: list[Comparison]) -> sql.Composable:
        if field in _COLUMNS:
            column = sql.SQL('{} COLLATE "C"').format(sql.Identifier(field))
            return _all([self._term(column, None, comparison) for comparison in several])
        found = [_AT.format(path=self._parameter(path)) for path in _paths(field.replace("\0", "\ufffd"))]
        terms = [self._term(_TEXT_OF_ITEM, _NUMBER_OF_ITEM, comparison) for comparison in several]
        return _METADATA.format(found=sql.SQL(", ").join(found), terms=_all(terms))

    def _term(
        self, text: sql.Composable, number: sql.Composable | None, comparison: Comparison
    ) -> sql.Composable:
        # A stored text has this in place of the one character that PostgreSQL's texts cannot hold.
        texts = [value.replace("\0", "\ufffd") for value in comparison.values if isinstance(value, str)]
        numbers = [_exact(value) for value in comparison.values if not isinstance(value, str)]
        operator = sql.SQL(_OPERATORS[comparison.operator])
        terms: list[sql.Composable] = []
        if texts:
            chosen = self._parameter(texts)
            terms.append(sql.SQL("coalesce({} {} ANY({}::text[]), false)").format(text, operator, chosen))
        if numbers and number is not None:
            chosen = self._parameter(numbers)
            terms.append(
                sql.SQL("coalesce({} {} ANY({}::numeric[]), false)").format(number, operator, chosen)
            )
        return sql.SQL("({})").format(sql.SQL(" OR ").join(terms)) if terms else sql.SQL("false")

    def _parameter(self, value: Any) -> sql.Placeholder:
        name = f"p{len(self.parameters)}"
        self.parameters[name] = value
        return sql.Placeholder(name)


def _all(terms: list[sql.Composable]) -> sql.Composable:
    return sql.SQL("({})").format(sql.SQL(" AND ").join(terms))


def _exact(value: str | int | float) -> Decimal:
    """The decimal number that a value is written as, in JSON as well."""
    return Decimal(repr(value + 0))  # type: ignore[operator]  # + 0: true is 1


def _paths(field: str) -> list[list[str]]:
    """The keys, from the outside to the inside, that a dotted name may stand for."""
    parts = field.split(".")
    if len(parts) - 1 > _MOST_DOTS:
        return [parts]
    paths = []
    for joined in product((False, True), repeat=len(parts) - 1):
        path = [parts[0]]
        for part, same in zip(parts[1:], joined, strict=True):
            path[-1:] = [f"{path[-1]}.{part}"] if same else [path[-1], part]
        paths.append(path)
    return paths
