"""Passages in PostgreSQL with the pgvector extension.

Each store is a table with one row per passage, in the first schema of the search path, which anybody may query and
join. The table ``specrag_stores`` in the same schema records what a search must know about each store.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, LiteralString
from urllib.parse import quote, urlencode

import numpy as np
import psycopg
from pgvector.psycopg import register_vector
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import TupleRow
from psycopg.types.json import Jsonb

from specrag.checks import check_whole
from specrag.errors import InputError
from specrag.retrieval.index.filters import Filter
from specrag.retrieval.index.hnsw import HnswSettings
from specrag.retrieval.index.scoring import Floats
from specrag.retrieval.manifest import KnowledgeBaseError
from specrag.retrieval.passage import Passage
from specrag.retrieval.progress import Progress
from specrag.retrieval.stores.base import Collection, Fetched, Found, Limits, Loading, StoreInfo
from specrag.retrieval.stores.pgvector.connection import Database, database_url
from specrag.retrieval.stores.pgvector.statements import (
    COLUMNS,
    EXACT_SETTINGS,
    LOOKUP_SETTINGS,
    Conditions,
    Statements,
    sampled_percent,
    walk_settings,
)

STORES = "specrag_stores"
DEFAULT_TABLE = "passages"

#: pgvector's limits: elements of a stored vector, elements of a vector in an HNSW index, candidates of an HNSW search.
MOST_DIMENSIONS, MOST_INDEXED_DIMENSIONS, MOST_CANDIDATES = 16_000, 2_000, 1_000

_LONGEST_NAME = 63  # bytes; PostgreSQL silently truncates longer names
_TYPES = ("int8", "vector", "text", "text", "text", "text", "jsonb")

# Vectors up to this dimension are stored in the rows themselves, so that a row fits a page of 8 KiB: a scan that had to
# look up each vector in the TOAST table would take many times as long.
_MOST_IN_ROW = 1_900

_FOUND = sql.SQL(
    """
    SELECT to_regtype('vector') IS NOT NULL,
           to_regclass({stores}) IS NOT NULL,
           to_regclass(quote_ident({table}))::oid,
           (SELECT atttypmod FROM pg_attribute
            WHERE attrelid = to_regclass(quote_ident({table})) AND attname = 'embedding' AND NOT attisdropped),
           EXISTS (SELECT 1 FROM pg_index JOIN pg_opclass ON pg_opclass.oid = indclass[0]
                   WHERE indrelid = to_regclass(quote_ident({table})) AND indisvalid
                   AND opcname = 'vector_ip_ops'
                   AND opcmethod = (SELECT oid FROM pg_am WHERE amname = 'hnsw'))
    """
)
_RECORD = sql.SQL("SELECT content::text FROM {stores} WHERE name = {table}")
_CREATE_STORES = "CREATE TABLE IF NOT EXISTS {stores} (name text PRIMARY KEY, content jsonb NOT NULL)"
_REMEMBER = """
INSERT INTO {stores} (name, content) VALUES (%s, %s::jsonb) ON CONFLICT (name) DO UPDATE SET content = excluded.content
"""
_CREATE = """
CREATE TABLE {table} (
    id bigint NOT NULL, embedding vector({dimension}) NOT NULL, source text NOT NULL, title text NOT NULL,
    place text NOT NULL, text text NOT NULL, metadata jsonb NOT NULL
)
"""


class PgVectorStore:
    """A table of passages; a :class:`~specrag.retrieval.stores.base.Store`. Made by :meth:`open`.

    Args:
        database: the database that holds the table.
        table: the table's name.
    """

    def __init__(self, database: Database, table: str) -> None:
        self.table = table
        self.place = database.words.place
        self._database = database
        self._statements = Statements(table)
        self._oid: int | None = None
        self._passages = 0

    @classmethod
    def open(cls, address: str | None, limits: Limits | None = None) -> PgVectorStore:
        """See :class:`~specrag.retrieval.stores.base.StoreType`.

        Args:
            address: ``postgresql://...#TABLE``; the default table is ``passages``, and for an empty URL the database is
                taken from the environment.
            limits: timeouts.
        """
        store = cls(*_database(address, limits or Limits()))
        store._database.open()
        try:
            store.info()
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def check(cls, address: str | None, loading: Loading) -> None:
        database, table = _database(address, loading.limits)
        with database.connect() as own, own.transaction():
            job = _Loading(own, table, database.words.place)
            job.prepare()
            job.find_place(loading.replace)

    @classmethod
    def load(
        cls,
        address: str | None,
        collection: Collection,
        loading: Loading | None = None,
        hnsw: HnswSettings | None = None,
    ) -> StoreInfo:
        """See :class:`~specrag.retrieval.stores.base.StoreType`.

        The whole load is one transaction: if the process is killed or the database goes away, everything stays as it
        was. Searches of an old table with this name go on until the new one replaces it.

        Args:
            address: as for :meth:`open`.
            collection: what to load.
            loading: how to load it.
            hnsw: settings of the approximate index, which takes long to build and needs PostgreSQL's
                ``maintenance_work_mem``.
        """
        loading = loading or Loading()
        if hnsw is None and loading.approximate:
            hnsw = HnswSettings()
        database, table = _database(address, loading.limits)
        dimension = collection.encoder.dimension
        if dimension > MOST_DIMENSIONS:
            raise InputError(
                "vectors", f"{dimension} dimensions", f"pgvector stores at most {MOST_DIMENSIONS}"
            )
        if hnsw is not None:
            check_graph(hnsw, dimension)
        with database.connect() as own:
            job = _Loading(own, table, database.words.place)
            with own.transaction():
                job.prepare()
            register_vector(own)
            with own.transaction():
                return job.run(collection, hnsw, loading)

    def close(self) -> None:
        """Close all connections."""
        self._database.close()

    # -- what there is ----------------------------------------------------------------------------------------

    def info(self) -> StoreInfo:
        with self._database.connect() as own:
            info, oid = _find(own, self.table, self.place)
        if self._oid not in (None, oid):
            raise self._replaced()
        self._oid, self._passages = oid, info.passages
        return info

    def fetch(self, ids: Sequence[int]) -> list[Fetched]:
        rows = self._database.rows(self._statements.lookup(), {"ids": list(ids)}, LOOKUP_SETTINGS)
        return [self._fetched(row) for row in rows]

    def search(
        self, vectors: Floats, most: int, filter: Filter | None = None, breadth: int | None = None
    ) -> list[Found]:
        """See :class:`~specrag.retrieval.stores.base.Store`.

        Exact search scans the table once for all queries. It replaces a walk through the HNSW index that finds fewer
        candidates than it should (a graph torn by duplicates), however many passages are asked for.
        """
        if breadth is None:
            return self._exact(vectors, most, filter)
        check_breadth(breadth)
        parameters = {"vectors": list(vectors), "most": most, "breadth": breadth}
        rows = self._database.rows(self._statements.walk(), parameters, walk_settings(breadth))
        found, candidates = self._read(rows, len(vectors), most)
        torn = [place for place, count in enumerate(candidates) if count < min(breadth, self._passages)]
        if torn:
            for place, answer in zip(torn, self._exact(vectors[torn], most, None), strict=True):
                found[place] = answer
        return found

    def _exact(self, vectors: Floats, most: int, filter: Filter | None) -> list[Found]:
        conditions = Conditions(filter)
        percent = sampled_percent(most, self._passages)
        parameters = {"vectors": list(vectors), "most": most, "percent": percent, **conditions.parameters}
        statement = self._statements.exact(conditions.clause)
        rows = self._database.rows(statement, parameters, EXACT_SETTINGS)
        return self._read(rows, len(vectors), most)[0]

    def _read(self, rows: Sequence[TupleRow], queries: int, most: int) -> tuple[list[Found], list[int]]:
        """The passages found for each query, and how many candidates they were chosen from."""
        passages: list[list[Fetched]] = [[] for _ in range(queries)]
        farthest = [-math.inf] * queries
        candidates = [0] * queries
        for numbers, distances, counts, *row in rows:
            fetched = self._fetched(row)
            for number, distance, count in zip(numbers, distances, counts, strict=True):
                passages[number - 1].append(fetched)
                farthest[number - 1] = max(farthest[number - 1], distance)
                candidates[number - 1] = count
        found = [
            Found(some, -limit if len(some) >= most else -math.inf)
            for some, limit in zip(passages, farthest, strict=True)
        ]
        return found, candidates

    def _fetched(self, row: Sequence[Any]) -> Fetched:
        oid, id, embedding, source, title, place, text, metadata = row
        if oid != self._oid:
            raise self._replaced()
        return Fetched(Passage(id, source, title, place, text, metadata), embedding.to_numpy())

    def _replaced(self) -> KnowledgeBaseError:
        return KnowledgeBaseError(f"{self.place} has been replaced since it was opened: open it again")

    # -- changes ----------------------------------------------------------------------------------------------

    def add(self, passages: Sequence[Passage], vectors: Floats) -> None:
        """See :class:`~specrag.retrieval.stores.base.Store`; one transaction."""
        new = sql.Identifier(f"specrag_{uuid.uuid4().hex}")
        names = sql.SQL(", ").join(map(sql.Identifier, COLUMNS))
        kept = sql.SQL(", ").join(
            sql.SQL("{0} = excluded.{0}").format(sql.Identifier(name)) for name in COLUMNS[1:]
        )
        with self._changing() as (own, info):
            storable = [_storable_passage(passage) for passage in passages]
            changed = info.with_passages(storable, vectors)
            table = sql.Identifier(self.table)
            own.execute(sql.SQL("CREATE TEMPORARY TABLE {} (LIKE {}) ON COMMIT DROP").format(new, table))
            _copy(own, new, [(storable, vectors)], freeze=False)
            own.execute(
                sql.SQL("INSERT INTO {} ({}) SELECT {} FROM {} ON CONFLICT (id) DO UPDATE SET {}").format(
                    table, names, names, new, kept
                )
            )
            self._remember(own, changed)

    def remove(self, ids: Sequence[int]) -> None:
        """See :class:`~specrag.retrieval.stores.base.Store`; one transaction."""
        with self._changing() as (own, info):
            own.execute(
                sql.SQL("DELETE FROM {} WHERE id = ANY(%s::bigint[])").format(sql.Identifier(self.table)),
                (list(ids),),
            )
            self._remember(own, info)

    @contextmanager
    def _changing(self) -> Iterator[tuple[psycopg.Connection[TupleRow], StoreInfo]]:
        with self._database.connect() as own:
            register_vector(own)
            with own.transaction():
                _be_alone(own, self.table, self.place)
                info, oid = _find(own, self.table, self.place)
                if oid != self._oid:
                    raise self._replaced()
                yield own, info

    def _remember(self, own: psycopg.Connection[TupleRow], info: StoreInfo) -> None:
        row = own.execute(sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(self.table))).fetchone()
        assert row is not None
        _write_record(own, self.table, replace(info, passages=row[0]))


def _database(address: str | None, limits: Limits) -> tuple[Database, str]:
    """The database and the table name of an address.

    Raises:
        InputError: it cannot be used.
    """
    url, _, table = (address or "").partition("#")
    given = None if not url or url.endswith("://") else url
    named = check_table(table or DEFAULT_TABLE)
    return Database(database_url(given), named, limits), named


def table_address(url: str | None, table: str | None) -> str:
    """An address made from separate URL and table.

    Args:
        url: the database's URL, or ``key=value`` words as for libpq; None for the URL in the environment.
        table: the table's name; None for the default.

    Raises:
        InputError: one of them cannot be used. The message does not show the URL, since it may hold a password.
    """
    if url is not None and "://" not in database_url(url):
        url = f"postgresql:///?{urlencode(conninfo_to_dict(url), quote_via=quote)}"
    return f"{url or 'postgresql://'}#{DEFAULT_TABLE if table is None else check_table(table)}"


# -- checks -------------------------------------------------------------------------------------------------------


def check_table(table: object) -> str:
    """Check the name of a table.

    Raises:
        InputError: it is empty, too long, reserved, or contains characters that no name can contain.
    """
    if not isinstance(table, str) or not table or "\0" in table:
        raise InputError("table", table, "give the name of a table")
    try:
        length = len(table.encode())
    except UnicodeEncodeError:
        raise InputError("table", table, "give a name in UTF-8") from None
    if length > _LONGEST_NAME:
        raise InputError("table", table, f"PostgreSQL's names have at most {_LONGEST_NAME} bytes")
    if table == STORES:
        raise InputError("table", table, "this one says what the others hold; give another name")
    return table


def check_graph(settings: HnswSettings, dimension: int) -> None:
    """Check HNSW settings against the limits of pgvector.

    Raises:
        InputError: a value is outside its limits.
    """
    if dimension > MOST_INDEXED_DIMENSIONS:
        remedy = f"pgvector indexes at most {MOST_INDEXED_DIMENSIONS}"
        raise InputError("hnsw", f"{dimension} dimensions", remedy)
    if settings.neighbors > 100:
        raise InputError("neighbors", settings.neighbors, "pgvector takes at most 100")
    least = max(4, 2 * settings.neighbors)
    if not least <= settings.ef_construction <= MOST_CANDIDATES:
        remedy = f"pgvector takes {least} (twice the neighbors) to {MOST_CANDIDATES}"
        raise InputError("ef_construction", settings.ef_construction, remedy)
    check_breadth(settings.ef_search)


def check_breadth(breadth: int) -> None:
    """Check the number of candidates of an HNSW search.

    Raises:
        InputError: it is outside pgvector's limits.
    """
    check_whole("ef_search", breadth, 1, MOST_CANDIDATES)


def _find(connection: psycopg.Connection[TupleRow], table: str, place: str) -> tuple[StoreInfo, int]:
    """The record of a table, and its OID; a table that replaces it has another OID.

    Raises:
        KnowledgeBaseError: the extension, the table or its record is missing, or table and record do not match.
    """
    names = {"table": sql.Literal(table), "stores": sql.Literal(STORES)}
    row = connection.execute(_FOUND.format(**names)).fetchone()
    assert row is not None
    has_vectors, has_stores, oid, dimension, has_graph = row
    if not has_vectors:
        raise KnowledgeBaseError(
            f"pgvector: the database of {place} has no type for vectors: install pgvector on the server and run "
            "CREATE EXTENSION vector in this database"
        )
    if oid is None:
        raise KnowledgeBaseError(
            f"{place} does not exist: load a knowledge base with `specrag index --pgvector URL --table`, "
            "or name another table"
        )
    info = StoreInfo.from_json(_read_record(connection, table) if has_stores else None, place)
    if dimension != info.encoder.dimension:
        raise KnowledgeBaseError(
            f"{place} holds vectors of {dimension or 'no'} dimensions and should hold "
            f"{info.encoder.dimension}: load the knowledge base again"
        )
    return info if has_graph else replace(info, breadth=None), oid


def _read_record(connection: psycopg.Connection[TupleRow], table: str) -> str | None:
    """The record of a table in :data:`STORES`, which must exist; None without one."""
    names = {"table": sql.Literal(table), "stores": sql.Identifier(STORES)}
    row = connection.execute(_RECORD.format(**names)).fetchone()
    return None if row is None else str(row[0])


def _write_record(connection: psycopg.Connection[TupleRow], table: str, info: StoreInfo) -> None:
    stores = sql.Identifier(STORES)
    connection.execute(sql.SQL(_REMEMBER).format(stores=stores), (table, info.to_json()))


def _be_alone(connection: psycopg.Connection[TupleRow], table: str, place: str) -> None:
    """Exclude other writers until the commit; table locks would also block searches."""
    row = connection.execute(
        "SELECT pg_try_advisory_xact_lock(hashtextextended(current_schema() || '.' || %s, 0))", (table,)
    ).fetchone()
    if row != (True,):
        raise KnowledgeBaseError(f"{place} is being loaded by another process: wait until it has ended")


# -- loading ------------------------------------------------------------------------------------------------------


class _Loading:
    """The statements of a load."""

    def __init__(self, connection: psycopg.Connection[TupleRow], table: str, place: str) -> None:
        self.connection = connection
        self.table = table
        self.place = place
        self.new = sql.Identifier(f"specrag_{uuid.uuid4().hex}")  # temporary name of the new table

    def prepare(self) -> None:
        """Create the extension and the table of stores, if they are missing."""
        # Two processes creating them at the same time would fail despite IF NOT EXISTS.
        self.connection.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (STORES,))
        try:
            self.connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
        except (
            psycopg.errors.FeatureNotSupported,
            psycopg.errors.UndefinedFile,
            psycopg.errors.InsufficientPrivilege,
        ):
            raise KnowledgeBaseError(
                f"pgvector: the database of {self.place} has no type for vectors: install pgvector on the server and "
                "let an administrator run CREATE EXTENSION vector in this database"
            ) from None
        self.connection.execute(sql.SQL(_CREATE_STORES).format(stores=sql.Identifier(STORES)))

    def run(self, collection: Collection, hnsw: HnswSettings | None, loading: Loading) -> StoreInfo:
        """Do everything but the commit."""
        _be_alone(self.connection, self.table, self.place)
        taken = self.find_place(loading.replace)
        dimension = collection.encoder.dimension
        self._execute(_CREATE, dimension=sql.Literal(dimension))
        if dimension <= _MOST_IN_ROW:
            self._execute("ALTER TABLE {table} ALTER embedding SET STORAGE PLAIN")
        info = StoreInfo(
            len(collection), collection.encoder, breadth=None if hnsw is None else hnsw.ef_search
        )

        def portions() -> Iterable[tuple[Sequence[Passage], Floats]]:
            nonlocal info
            for passages, vectors in collection.portions(loading.progress):
                storable = [_storable_passage(passage) for passage in passages]
                info = info.with_passages(storable, vectors)
                yield storable, vectors

        # FREEZE makes the rows final at once, so that the first searches need not write to the table.
        _copy(self.connection, self.new, portions(), freeze=True)
        loading.progress(Progress("indexing", 0, 1))
        self._execute("ALTER TABLE {table} ADD PRIMARY KEY (id)")
        if hnsw is not None:
            self._execute(
                "CREATE INDEX ON {table} USING hnsw (embedding vector_ip_ops) "
                "WITH (m = {neighbors}, ef_construction = {breadth})",
                neighbors=sql.Literal(hnsw.neighbors),
                breadth=sql.Literal(hnsw.ef_construction),
            )
        if taken:
            self.connection.execute(sql.SQL("DROP TABLE {}").format(sql.Identifier(self.table)))
        self._execute("ALTER TABLE {table} RENAME TO {name}", name=sql.Identifier(self.table))
        self.connection.execute(sql.SQL("ANALYZE {}").format(sql.Identifier(self.table)))
        _write_record(self.connection, self.table, info)
        loading.progress(Progress("indexing", 1, 1))
        return info

    def _execute(self, statement: LiteralString, **parts: sql.Composable) -> None:
        self.connection.execute(sql.SQL(statement).format(table=self.new, **parts))

    def find_place(self, replacing: bool) -> bool:
        """Whether there is a table to replace.

        Raises:
            InputError: there is a table that specrag has not made, or that must not be replaced.
        """
        row = self.connection.execute(
            "SELECT to_regclass(quote_ident(%s)) IS NOT NULL", (self.table,)
        ).fetchone()
        if row == (False,):
            return False
        if _read_record(self.connection, self.table) is None:
            raise InputError("table", self.table, "there is another table of this name; give another one")
        if not replacing:
            raise InputError("table", self.table, "it exists already; replace it, or give another name")
        return True


def _copy(
    connection: psycopg.Connection[TupleRow],
    table: sql.Identifier,
    portions: Iterable[tuple[Sequence[Passage], Floats]],
    *,
    freeze: bool,
) -> None:
    columns = sql.SQL(", ").join(map(sql.Identifier, COLUMNS))
    options = sql.SQL("FORMAT binary, FREEZE" if freeze else "FORMAT binary")
    statement = sql.SQL("COPY {} ({}) FROM STDIN ({})").format(table, columns, options)
    with connection.cursor().copy(statement) as copy:
        copy.set_types(_TYPES)
        for passages, vectors in portions:
            for passage, vector in zip(passages, vectors, strict=True):
                texts = (passage.source, passage.title, passage.place, passage.text)
                copy.write_row((passage.id, np.asarray(vector), *texts, Jsonb(passage.metadata, _dumps)))


_dumps: Callable[[Any], str] = partial(json.dumps, ensure_ascii=False)


def _storable_passage(passage: Passage) -> Passage:
    source, title, place, text = map(_storable, (passage.source, passage.title, passage.place, passage.text))
    return Passage(passage.id, source, title, place, text, _storable(passage.metadata))


def _storable(value: Any) -> Any:
    """Replace what PostgreSQL cannot hold: NUL in texts, infinite numbers in JSON."""
    if isinstance(value, str):
        return value.replace("\0", "\ufffd")
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {_storable(name): _storable(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_storable(item) for item in value]
    return value
