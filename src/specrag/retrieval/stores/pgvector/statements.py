"""The SQL statements that search a table for candidates, with conditions as SQL with parameters."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any, LiteralString

from psycopg import sql

from specrag.retrieval.index.filters import Comparison, Filter, Leaf, Null, fold
from specrag.retrieval.stores.base import is_column, key_paths

COLUMNS = ("id", "embedding", "source", "title", "place", "text", "metadata")

#: Server settings for exact search. The planner guesses that a third of all pairs meet the limit, while far less than a
#: hundredth do: it would compile the statement, which takes long, and not run the scan in parallel. It would also
#: materialise a small table first.
EXACT_SETTINGS = {"jit": "off", "parallel_tuple_cost": "0", "enable_material": "off"}

#: Server settings for reading rows by id.
LOOKUP_SETTINGS = {"jit": "off"}


def walk_settings(candidates: int) -> dict[str, str]:
    """Server settings for HNSW: the number of candidates, and no sequential scan instead."""
    return {"jit": "off", "enable_seqscan": "off", "hnsw.ef_search": str(candidates)}


def sampled_percent(most: int, passages: int) -> float:
    """Percentage of the table's pages that are sampled to determine the limits.

    With a sample of m passages, about ``most * passages / m`` passages meet the limit. Both numbers cost work, and
    their sum is smallest for m equal to the square root of ``most * passages``. The sample is twice that, since
    neighbouring rows are alike.
    """
    return min(100.0, 200.0 * math.sqrt(most * passages) / max(1, passages))


_BEST: LiteralString = """
ranked AS (
    SELECT number, id, distance,
           row_number() OVER (PARTITION BY number ORDER BY distance, id) AS rank,
           count(*) OVER (PARTITION BY number) AS candidates
    FROM candidates
), best AS (
    SELECT id, array_agg(number) AS numbers, array_agg(distance) AS distances, array_agg(candidates) AS candidates
    FROM ranked WHERE rank <= %(most)s::bigint GROUP BY id
)
SELECT best.numbers, best.distances, best.candidates, found.* FROM best, LATERAL (
    SELECT {columns} FROM {table} AS passage WHERE passage.id = best.id OFFSET 0
) AS found
"""

_EXACT: LiteralString = """
WITH candidates AS MATERIALIZED (
    SELECT query.number, passage.id, passage.embedding <#> query.vector AS distance
    FROM {table} AS passage JOIN unnest(%(vectors)b::vector[], (
        SELECT array_agg(coalesce((
            SELECT near.distance FROM (
                SELECT passage.embedding <#> asked.vector AS distance
                FROM {table} AS passage TABLESAMPLE SYSTEM (%(percent)s::float8) REPEATABLE (0) WHERE {allowed}
            ) AS near ORDER BY near.distance LIMIT 1 OFFSET %(most)s::bigint - 1
        ), 'infinity') ORDER BY asked.number)
        FROM unnest(%(vectors)b::vector[]) WITH ORDINALITY AS asked (vector, number)
    )) WITH ORDINALITY AS query (vector, farthest, number)
    ON passage.embedding <#> query.vector <= query.farthest
    WHERE {allowed}
),"""

_WALK: LiteralString = """
WITH candidates AS MATERIALIZED (
    SELECT query.number, near.id, near.distance
    FROM unnest(%(vectors)b::vector[]) WITH ORDINALITY AS query (vector, number),
    LATERAL (
        SELECT passage.id, passage.embedding <#> query.vector AS distance FROM {table} AS passage
        ORDER BY passage.embedding <#> query.vector LIMIT %(breadth)s::bigint
    ) AS near
),"""

_LOOKUP: LiteralString = "SELECT {columns} FROM {table} AS passage WHERE passage.id = ANY(%(ids)s::bigint[])"


class Statements:
    """The statements for one table.

    Args:
        table: the table's name.
    """

    def __init__(self, table: str) -> None:
        # psycopg looks for parameter marks in the whole statement, even inside names.
        self.table = sql.Identifier(table.replace("%", "%%"))
        self.columns = sql.SQL(", ").join(
            sql.SQL("passage.{}").format(sql.Identifier(name)) for name in ("tableoid", *COLUMNS)
        )

    def exact(self, allowed: sql.Composable) -> sql.Composed:
        """Exact search. Parameters: vectors, most, percent, and those of ``allowed``.

        A result row holds: the numbers (from 1) of the queries that found the passage, its distance to each of them,
        how many candidates each of them had, the table's OID, and :data:`COLUMNS`.
        """
        return sql.SQL(_EXACT + _BEST).format(table=self.table, columns=self.columns, allowed=allowed)

    def walk(self) -> sql.Composed:
        """Search in the HNSW index. Parameters: vectors, most, breadth; result rows as for :meth:`exact`."""
        return sql.SQL(_WALK + _BEST).format(table=self.table, columns=self.columns)

    def lookup(self) -> sql.Composed:
        """Passages by their ids. Parameter: ids; a result row holds the table's OID and :data:`COLUMNS`."""
        return sql.SQL(_LOOKUP).format(table=self.table, columns=self.columns)


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
_AT = sql.SQL("passage.metadata #> {path}::text[]")

# Text is ordered by its characters, whatever the database's collation.
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
_IS_VALUE = sql.SQL("jsonb_typeof(item.value) IN ('string', 'number', 'boolean')")
_OPERATORS = {
    "=": sql.SQL("="),
    "<": sql.SQL("<"),
    "<=": sql.SQL("<="),
    ">": sql.SQL(">"),
    ">=": sql.SQL(">="),
}


class Conditions:
    """A filter as an SQL clause, for rows with the alias ``passage``.

    Attributes:
        clause: the SQL.
        parameters: its parameters by name.
    """

    def __init__(self, filter: Filter | None) -> None:
        self.parameters: dict[str, Any] = {}
        self.clause: sql.Composable = sql.SQL("true")
        if filter is not None:
            self.clause = fold(filter, self._leaf, _all, _any)

    def _leaf(self, leaf: Leaf) -> sql.Composable:
        if isinstance(leaf, Null):
            has_value = self._any_value(leaf.field, _IS_VALUE)
            return has_value if leaf.negated else _not(has_value)
        if is_column(leaf.field):
            column = sql.SQL('passage.{} COLLATE "C"').format(sql.Identifier(leaf.field))
            agrees = _all([self._term(column, None, comparison) for comparison in leaf.comparisons])
            return _not(agrees) if leaf.negated else agrees
        terms = [self._term(_TEXT_OF_ITEM, _NUMBER_OF_ITEM, comparison) for comparison in leaf.comparisons]
        agrees = self._any_value(leaf.field, _all(terms))
        return _all([self._any_value(leaf.field, _IS_VALUE), _not(agrees)]) if leaf.negated else agrees

    def _any_value(self, field: str, terms: sql.Composable) -> sql.Composable:
        """A condition that one of the field's values satisfies some terms."""
        if is_column(field):
            return sql.SQL("true")
        paths = key_paths(field.replace("\0", "\ufffd"))
        found = sql.SQL(", ").join(_AT.format(path=self._parameter(path)) for path in paths)
        return _METADATA.format(found=found, terms=terms)

    def _term(
        self, text: sql.Composable, number: sql.Composable | None, comparison: Comparison
    ) -> sql.Composable:
        # In stored texts, U+FFFD replaces NUL, the one character that PostgreSQL's texts cannot hold.
        texts = [value.replace("\0", "\ufffd") for value in comparison.values if isinstance(value, str)]
        numbers = [_exact(value) for value in comparison.values if not isinstance(value, str)]
        operator = _OPERATORS[comparison.operator]
        terms: list[sql.Composable] = []
        for found, values, kind in ((text, texts, "text[]"), (number, numbers, "numeric[]")):
            if found is not None and values:
                chosen = self._parameter(values)
                terms.append(
                    sql.SQL("coalesce({} {} ANY({}::{}), false)").format(
                        found, operator, chosen, _KINDS[kind]
                    )
                )
        return _any(terms) if terms else sql.SQL("false")

    def _parameter(self, value: Any) -> sql.Placeholder:
        name = f"p{len(self.parameters)}"
        self.parameters[name] = value
        return sql.Placeholder(name)


_KINDS = {"text[]": sql.SQL("text[]"), "numeric[]": sql.SQL("numeric[]")}


def _all(terms: list[sql.Composable]) -> sql.Composable:
    return sql.SQL("({})").format(sql.SQL(" AND ").join(terms))


def _any(terms: list[sql.Composable]) -> sql.Composable:
    return sql.SQL("({})").format(sql.SQL(" OR ").join(terms))


def _not(term: sql.Composable) -> sql.Composable:
    return sql.SQL("NOT {}").format(term)


def _exact(value: str | int | float) -> Decimal:
    """A value as the decimal number that it is written as, also in JSON."""
    return Decimal(repr(value + 0))  # type: ignore[operator]  # + 0: true is 1
