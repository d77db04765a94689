"""The statements that search a table, each answered in one round trip whatever the number of queries.

The database computes inner products in float32, in an order of its own. Its distance ``d`` (the negative product) and
the kernel's score ``s`` of the same pair differ by at most ``slack`` (``rounding.py``): ``|d + s| <= slack``. Let
``b`` be the greatest distance among any k passages. Their scores are at least ``-b - slack``, so the k-th best score of
all passages is too, and a passage that reaches it has a distance of at most ``b + 2 slack``. Hence both filters below
lose none of the best k, nor any passage that ties with the last of them.

**Exact search** is one scan of the table for all queries. ``b`` of a small sample of the table's pages comes first;
then each row is read once, compared with every query, and kept for those whose limit it meets. The few rows that
are kept are sorted. With one ``ORDER BY ... LIMIT`` for each query the server would scan the table once for each.

**HNSW** takes one walk for each query, side by side in one statement.
"""

from __future__ import annotations

import math

from psycopg import sql

from specrag.retrieval.pgvector_schema import COLUMNS

#: Rows returned for a query of exact search beyond k: what lies within the rounding error of the k-th.
NEAR_TIES = 64

#: Settings of the server for exact search. It guesses that a third of all pairs meet the limit, and far less than a
#: hundredth do: it would compile the statement, which takes long, and not share the scan among its processes. Of a
#: small table it would first make a copy.
EXACT_SETTINGS = {"jit": "off", "parallel_tuple_cost": "0", "enable_material": "off"}

#: For reading rows by id.
LOOKUP_SETTINGS = {"jit": "off"}


def walk_settings(candidates: int) -> dict[str, str]:
    """Settings of the server for HNSW: the width of the walk, and no scan in its place."""
    return {"jit": "off", "enable_seqscan": "off", "hnsw.ef_search": str(candidates)}


def sampled_percent(k: int, passages: int) -> float:
    """Share of the table's pages that limits are taken from.

    A sample of m passages leaves about ``k * passages / m`` that meet the limit, and both are work: the sum is least
    at the root of ``k * passages``. Twice that, since neighbouring rows are alike.
    """
    return min(100.0, 200.0 * math.sqrt(k * passages) / max(1, passages))


_BEST = """
ranked AS (
    SELECT number, id, distance, slack,
           row_number() OVER (PARTITION BY number ORDER BY distance, id) AS rank,
           nth_value(distance, %(k)s::int) OVER (PARTITION BY number ORDER BY distance, id
               ROWS BETWEEN UNBOUNDED PRECEDING AND UNBOUNDED FOLLOWING) AS border,
           count(*) OVER (PARTITION BY number) AS candidates
    FROM candidates
), best AS (
    SELECT id, array_agg(number) AS numbers, array_agg(candidates) AS candidates FROM ranked
    WHERE rank <= %(most)s::bigint AND (border IS NULL OR distance <= border + 2 * slack) GROUP BY id
)
SELECT best.numbers, best.candidates, found.* FROM best, LATERAL (
    SELECT {columns} FROM {table} AS passage WHERE passage.id = best.id OFFSET 0
) AS found
"""

_EXACT = """
WITH candidates AS MATERIALIZED (
    SELECT query.number, passage.id, passage.embedding <#> query.vector AS distance, query.slack
    FROM {table} AS passage JOIN unnest(%(vectors)b::vector[], %(slacks)b::float8[], (
        SELECT array_agg(coalesce((
            SELECT near.distance FROM (
                SELECT passage.embedding <#> asked.vector AS distance
                FROM {table} AS passage TABLESAMPLE SYSTEM (%(percent)s::float8) REPEATABLE (0) WHERE {allowed}
            ) AS near ORDER BY near.distance LIMIT 1 OFFSET %(k)s::bigint - 1
        ), 'infinity') + 2 * asked.slack ORDER BY asked.number)
        FROM unnest(%(vectors)b::vector[], %(slacks)b::float8[]) WITH ORDINALITY AS asked (vector, slack, number)
    )) WITH ORDINALITY AS query (vector, slack, farthest, number)
    ON passage.embedding <#> query.vector <= query.farthest
    WHERE {allowed}
),"""

_WALK = """
WITH candidates AS MATERIALIZED (
    SELECT query.number, near.id, near.distance, query.slack
    FROM unnest(%(vectors)b::vector[], %(slacks)b::float8[]) WITH ORDINALITY AS query (vector, slack, number),
    LATERAL (
        SELECT passage.id, passage.embedding <#> query.vector AS distance FROM {table} AS passage
        ORDER BY passage.embedding <#> query.vector LIMIT %(most)s::bigint
    ) AS near
),"""

_NEAR = """
SELECT passage.id, passage.tableoid, passage.embedding FROM {table} AS passage
WHERE passage.embedding <#> %(vector)b::vector <= %(farthest)s::float8 AND {allowed}
"""

_LOOKUP = "SELECT {columns} FROM {table} AS passage WHERE passage.id = ANY(%(ids)s::bigint[])"

_MASKED = "get_bit(%(mask)b::bytea, passage.id) = 1"


class Statements:
    """The statements for one table.

    Args:
        table: its name.
    """

    def __init__(self, table: str) -> None:
        # A statement with parameters is searched for their marks, also inside a name.
        self.table = sql.Identifier(table.replace("%", "%%"))
        self.columns = sql.SQL(", ").join(
            sql.SQL("passage.{}").format(sql.Identifier(name)) for name in ("tableoid", *COLUMNS)
        )

    def exact(self, *, masked: bool) -> sql.Composed:
        """Exact search. Parameters: vectors, slacks, k, most, percent, and mask if it is masked.

        A row is: the queries (from 1) that it is for, how many candidates each of them had, the table's number and
        :data:`~specrag.retrieval.pgvector_schema.COLUMNS`.
        """
        return sql.SQL(_EXACT + _BEST).format(
            table=self.table, columns=self.columns, allowed=_allowed(masked)
        )

    def walk(self) -> sql.Composed:
        """Search in the HNSW index. Parameters: vectors, slacks, k, most; rows as for :meth:`exact`."""
        return sql.SQL(_WALK + _BEST).format(table=self.table, columns=self.columns)

    def near(self, *, masked: bool) -> sql.Composed:
        """Every passage within a distance. Parameters: vector, farthest, and mask; a row is id, table, vector."""
        return sql.SQL(_NEAR).format(table=self.table, allowed=_allowed(masked))

    def lookup(self) -> sql.Composed:
        """Passages by their ids. Parameter: ids; a row is the table's number and the columns."""
        return sql.SQL(_LOOKUP).format(table=self.table, columns=self.columns)


def _allowed(masked: bool) -> sql.SQL:
    return sql.SQL(_MASKED if masked else "true")
