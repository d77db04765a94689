"""Search a table: candidates from PostgreSQL, ranked by the kernel of ``scoring.py``.

The database hands over candidates with their vectors, and a few more than asked for: all whose order its own rounding
might have changed. The client scores them, so that no bit of a ranking is the database's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import product
from typing import Any

import numpy as np
from psycopg import sql
from psycopg.rows import TupleRow

from specrag.retrieval.index.base import Ranking, best_of, norms
from specrag.retrieval.index.filters import Comparison, Filter, Leaf, Null, fold
from specrag.retrieval.index.scoring import Bools, Doubles, Floats, Longs, dense_scores, dense_slack
from specrag.retrieval.manifest import KnowledgeBaseError
from specrag.retrieval.passage import Passage
from specrag.retrieval.stores.pgvector.connection import Database, Session
from specrag.retrieval.stores.pgvector.table import COLUMNS, FoundStore
from specrag.retrieval.stores.seen_passages import Fetched, SeenPassages


@dataclass(slots=True)
class _Asked:
    """Result of a statement for one query.

    Attributes:
        places: of its passages among all that were returned.
        candidates: how many passages they were chosen from.
    """

    places: list[int]
    candidates: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Answer:
    """Result of a statement: distinct passages, and those of each query."""

    ids: Longs
    vectors: Floats
    queries: list[_Asked]


class TableSearch:
    """Searches one table. Every method may raise what :meth:`Database.run` raises.

    Args:
        database: where it is.
        table: its name.
        found: what is known of it.
        seen: is told every passage that comes.
    """

    def __init__(self, database: Database, table: str, found: FoundStore, seen: SeenPassages) -> None:
        self._database = database
        self._record = found.record
        self._oid = found.oid
        self._statements = Statements(table)
        self._seen = seen

    def exact(self, vectors: Floats, k: int, mask: Bools | None) -> list[Ranking]:
        """The best ``k`` allowed passages for each query, by one scan of the table.

        Args:
            vectors: float32 [queries, dimension].
            mask: bool [passages], or None: all are allowed.
        """
        most = k + NEAR_TIES
        parameters = {
            **self._parameters(vectors, k, most),
            "percent": sampled_percent(k, self._record.passages),
            **_masking(mask),
        }
        statement = self._statements.exact(masked=mask is not None)
        rows = self._database.run(lambda session: session.rows(statement, parameters, EXACT_SETTINGS))
        answer = self._read(rows, len(vectors))
        rankings = _rank_each(vectors, answer, k)
        for place, asked in enumerate(answer.queries):
            if len(asked.places) == most:
                rankings[place] = self._with_all_near_ties(vectors[place], rankings[place], mask)
        return rankings

    def walk(self, vectors: Floats, k: int, ef_search: int) -> list[Ranking]:
        """The best ``k`` of the ``ef_search`` candidates that the HNSW index finds for each query.

        A walk that finds fewer candidates than there are (a graph torn by duplicates) is replaced by exact search,
        whatever ``k`` is, so that a smaller one gives a prefix of the same ranking.
        """
        most = min(ef_search, self._record.passages)
        parameters = self._parameters(vectors, k, most)
        statement, settings = self._statements.walk(), walk_settings(ef_search)
        rows = self._database.run(lambda session: session.rows(statement, parameters, settings))
        answer = self._read(rows, len(vectors))
        rankings = _rank_each(vectors, answer, k)
        torn = [place for place, asked in enumerate(answer.queries) if asked.candidates < most]
        if torn:
            for place, ranking in zip(torn, self.exact(vectors[torn], k, None), strict=True):
                rankings[place] = ranking
        return rankings

    def fetch(self, ids: Sequence[int]) -> dict[int, Fetched]:
        """Passages with their vectors, by id.

        Raises:
            KnowledgeBaseError: one is not there any more.
        """
        parameters = {"ids": list(ids)}
        statement = self._statements.lookup()
        rows = self._database.run(lambda session: session.rows(statement, parameters, LOOKUP_SETTINGS))
        fetched = [self._fetched(row) for row in rows]
        self._seen.add(fetched)
        found = {one.passage.id: one for one in fetched}
        for id in ids:
            if id not in found:
                raise KnowledgeBaseError(
                    f"pgvector: {self._database.place} has no passage {id} any more: load the knowledge base again"
                )
        return found

    def allowed(self, filter: Filter) -> Bools:
        """The passages that satisfy a filter, bool [passages]; reads the whole table."""
        selection = select(self._statements.table, filter)
        rows = self._database.run(
            lambda session: session.rows(selection.statement, selection.parameters, LOOKUP_SETTINGS)
        )
        mask = np.zeros(self._record.passages, dtype=bool)
        mask[[id for (id,) in rows]] = True
        return mask

    def _parameters(self, vectors: Floats, k: int, most: int) -> dict[str, Any]:
        return {"vectors": list(vectors), "slacks": self._slacks(vectors).tolist(), "k": k, "most": most}

    def _slacks(self, vectors: Floats) -> Doubles:
        return dense_slack(norms(vectors), self._record.longest, vectors.shape[1])

    def _read(self, rows: Sequence[TupleRow], queries: int) -> _Answer:
        asked = [_Asked([]) for _ in range(queries)]
        for place, (numbers, counts, *_) in enumerate(rows):
            for number, count in zip(numbers, counts, strict=True):
                asked[number - 1].places.append(place)
                asked[number - 1].candidates = count
        fetched = [self._fetched(row[2:]) for row in rows]
        self._seen.add(fetched)
        ids = np.array([one.passage.id for one in fetched], dtype=np.int64)
        return _Answer(ids, _stacked([one.vector for one in fetched]), asked)

    def _fetched(self, row: Sequence[Any]) -> Fetched:
        oid, id, embedding, source, title, place, text, metadata = row
        self._check_table([oid])
        return Fetched(Passage(id, source, title, place, text, metadata), embedding.to_numpy())

    def _check_table(self, oids: Iterable[int]) -> None:
        if any(oid != self._oid for oid in oids):
            raise KnowledgeBaseError(
                f"pgvector: {self._database.place} has been replaced since it was opened: open it again"
            )

    def _with_all_near_ties(self, vector: Floats, ranking: Ranking, mask: Bools | None) -> Ranking:
        """The ranking after every passage has been scored that might reach its last score."""
        slack = float(self._slacks(vector[None])[0])
        parameters = {"vector": vector, "farthest": slack - float(ranking.scores[-1]), **_masking(mask)}
        statement = self._statements.near(masked=mask is not None)

        def rank(session: Session) -> Ranking:
            best = ranking

            def take(rows: list[TupleRow]) -> None:
                nonlocal best
                self._check_table(oid for _, oid, _ in rows)
                ids = np.array([id for id, _, _ in rows], dtype=np.int64)
                new = np.flatnonzero(~np.isin(ids, best.ids))
                vectors = _stacked([embedding.to_numpy() for _, _, embedding in rows])
                best = _merged(best, _rank(vector, vectors, ids, new, len(ranking)))

            session.each_batch(statement, parameters, EXACT_SETTINGS, take)
            return best

        return self._database.run(rank)


def _masking(mask: Bools | None) -> dict[str, Any]:
    """The parameter that tells a statement which passages are allowed: a bit for each id."""
    return {} if mask is None else {"mask": np.packbits(mask, bitorder="little").tobytes()}


def _stacked(vectors: Sequence[Floats]) -> Floats:
    return np.stack(vectors) if vectors else np.empty((0, 1), dtype=np.float32)


def _rank_each(vectors: Floats, answer: _Answer, k: int) -> list[Ranking]:
    return [
        _rank(vector, answer.vectors, answer.ids, np.array(asked.places, dtype=np.int64), k)
        for vector, asked in zip(vectors, answer.queries, strict=True)
    ]


def _rank(query: Floats, vectors: Floats, ids: Longs, places: Longs, k: int) -> Ranking:
    """The best ``k`` of the passages at some places, by the kernel."""
    scores = np.empty(len(places), dtype=np.float32)
    dense_scores(query, vectors, places, scores)
    return best_of(scores, ids[places], k)


def _merged(first: Ranking, second: Ranking) -> Ranking:
    """The best of two rankings that share no passage, as many as the first has."""
    scores = np.concatenate([first.scores, second.scores])
    return best_of(scores, np.concatenate([first.ids, second.ids]), len(first))


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
        :data:`~specrag.retrieval.stores.pgvector.table.COLUMNS`.
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
_IS_VALUE = sql.SQL("jsonb_typeof(item.value) IN ('string', 'number', 'boolean')")
_OPERATORS = {"=": "=", "<": "<", "<=": "<=", ">": ">", ">=": ">="}


@dataclass(frozen=True, slots=True)
class Selection:
    """A statement for the ids of the passages that satisfy conditions, and its parameters."""

    statement: sql.Composed
    parameters: dict[str, Any]


def select(table: sql.Identifier, filter: Filter) -> Selection:
    """The passages that satisfy a filter."""
    writer = _Writer()
    clause = fold(filter, writer.leaf, _all, _any)
    return Selection(sql.SQL("SELECT id FROM {} WHERE {}").format(table, clause), writer.parameters)


class _Writer:
    """Collects parameters while terms are written."""

    def __init__(self) -> None:
        self.parameters: dict[str, Any] = {}

    def leaf(self, leaf: Leaf) -> sql.Composable:
        if isinstance(leaf, Null):
            has_value = self._any_value(leaf.field, _IS_VALUE)
            return has_value if leaf.negated else _not(has_value)
        if leaf.field in _COLUMNS:
            column = sql.SQL('{} COLLATE "C"').format(sql.Identifier(leaf.field))
            agrees = _all([self._term(column, None, comparison) for comparison in leaf.comparisons])
            return _not(agrees) if leaf.negated else agrees
        terms = [self._term(_TEXT_OF_ITEM, _NUMBER_OF_ITEM, comparison) for comparison in leaf.comparisons]
        agrees = self._any_value(leaf.field, _all(terms))
        return _all([self._any_value(leaf.field, _IS_VALUE), _not(agrees)]) if leaf.negated else agrees

    def _any_value(self, field: str, terms: sql.Composable) -> sql.Composable:
        """That one of the field's values satisfies some terms."""
        if field in _COLUMNS:
            return sql.SQL("true")
        found = [_AT.format(path=self._parameter(path)) for path in _paths(field.replace("\0", "\ufffd"))]
        return _METADATA.format(found=sql.SQL(", ").join(found), terms=terms)

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


def _any(terms: list[sql.Composable]) -> sql.Composable:
    return sql.SQL("({})").format(sql.SQL(" OR ").join(terms))


def _not(term: sql.Composable) -> sql.Composable:
    return sql.SQL("NOT {}").format(term)


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
