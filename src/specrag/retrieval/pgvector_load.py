"""Loading a knowledge base into PostgreSQL: one transaction, so that the table is whole or not there."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, LiteralString

import psycopg
from pgvector.psycopg import register_vector
from psycopg import sql
from psycopg.rows import TupleRow
from psycopg.types.json import Jsonb

from specrag.errors import InputError
from specrag.retrieval.disk import KnowledgeBaseError
from specrag.retrieval.flat import FlatIndex
from specrag.retrieval.hnsw import HnswSettings
from specrag.retrieval.manifest import EncoderRecord
from specrag.retrieval.passage import Passage
from specrag.retrieval.passage_store import flatten
from specrag.retrieval.pgvector_connection import ConnectionSettings, Database, database_url
from specrag.retrieval.pgvector_schema import (
    COLUMNS,
    DEFAULT_TABLE,
    MOST_DIMENSIONS,
    STORES,
    TYPES,
    StoreRecord,
    check_graph,
    check_table,
    read_record,
)
from specrag.retrieval.progress import Progress, Reporter

if TYPE_CHECKING:
    from specrag.retrieval.knowledge_base import KnowledgeBase

_BATCH = 1000  # passages read at a time, and between two reports

# Vectors lie in the rows themselves wherever a row fits a page of 8 KiB: a scan that had to look up each of them
# in the table for oversized values would take many times as long.
_MOST_IN_ROW = 1_900

_CREATE = """
CREATE TABLE {table} (
    id bigint NOT NULL, embedding vector({dimension}) NOT NULL, source text NOT NULL, title text NOT NULL,
    place text NOT NULL, text text NOT NULL, metadata jsonb NOT NULL
)
"""
_CREATE_STORES = "CREATE TABLE IF NOT EXISTS {stores} (name text PRIMARY KEY, content jsonb NOT NULL)"
_REMEMBER = """
INSERT INTO {stores} (name, content) VALUES (%s, %s::jsonb) ON CONFLICT (name) DO UPDATE SET content = excluded.content
"""


@dataclass(frozen=True, slots=True, eq=False)
class Collection:
    """What is loaded.

    Args:
        flat: the vectors, one for each passage.
        passages: gives those of some ids, which go from 0 on.
        encoder: that made the vectors.
    """

    flat: FlatIndex
    passages: Callable[[Sequence[int]], Sequence[Passage]]
    encoder: EncoderRecord

    @classmethod
    def of(cls, knowledge_base: KnowledgeBase) -> Collection:
        """All of a knowledge base, which must stay open meanwhile."""
        flat = knowledge_base.index("flat")
        assert isinstance(flat, FlatIndex)
        return cls(flat, knowledge_base.passages, knowledge_base.manifest.encoder)


def load(
    url: str | None,
    collection: Collection,
    table: str = DEFAULT_TABLE,
    *,
    hnsw: HnswSettings | None = None,
    replace: bool = False,
    progress: Reporter = lambda _: None,
    connection: ConnectionSettings | None = None,
) -> StoreRecord:
    """Write passages and vectors into a new table.

    All of it is one transaction: a process that is killed, or a database that goes away, leaves what was there before.
    Who searches an old table of this name goes on until the new one takes its place.

    Args:
        url: of the database; None for that of the environment.
        table: its name.
        hnsw: also build an approximate index; takes long, and needs PostgreSQL's ``maintenance_work_mem``.
        replace: put it in the place of a table of this name that specrag has made.
        progress: is told of the stages ``loading`` and ``indexing``.
        connection: ``connect_timeout`` is all that matters here.

    Raises:
        InputError: a value cannot be used, or there is a table of this name already.
        KnowledgeBaseError: another process is loading this table, or pgvector is not there.
        StoreUnavailable: the database cannot be reached or refuses.
    """
    check_table(table)
    dimension = collection.flat.dimension
    if dimension > MOST_DIMENSIONS:
        raise InputError("vectors", f"{dimension} dimensions", f"pgvector stores at most {MOST_DIMENSIONS}")
    if hnsw is not None:
        check_graph(hnsw, dimension)
    database = Database(database_url(url), table, connection or ConnectionSettings())
    with database.connect() as own:
        loading = _Loading(own, table, database.place)
        with own.transaction():
            loading.prepare()
        register_vector(own)
        with own.transaction():
            return loading.run(collection, hnsw, replace, progress)


def check_target(
    url: str | None, table: str, *, replace: bool = False, connection: ConnectionSettings | None = None
) -> None:
    """Find out before a long build whether :func:`load` will be let in.

    Raises:
        InputError, KnowledgeBaseError, StoreUnavailable: it would not, for the same reasons.
    """
    database = Database(database_url(url), check_table(table), connection or ConnectionSettings())
    with database.connect() as own, own.transaction():
        loading = _Loading(own, table, database.place)
        loading.prepare()
        loading.find_place(replace)


class _Loading:
    """The statements of a load."""

    def __init__(self, connection: psycopg.Connection[TupleRow], table: str, place: str) -> None:
        self.connection = connection
        self.table = table
        self.place = place
        self.new = sql.Identifier(f"specrag_{uuid.uuid4().hex}")  # until it takes its place

    def prepare(self) -> None:
        """What the first store of a database needs: the extension, and the table that says what the stores hold."""
        # Two processes that create them at once would fail in spite of IF NOT EXISTS.
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

    def run(
        self, collection: Collection, hnsw: HnswSettings | None, replace: bool, progress: Reporter
    ) -> StoreRecord:
        """Everything but the commit."""
        self._be_alone()
        taken = self.find_place(replace)
        self._execute(_CREATE, dimension=sql.Literal(collection.flat.dimension))
        if collection.flat.dimension <= _MOST_IN_ROW:
            self._execute("ALTER TABLE {table} ALTER embedding SET STORAGE PLAIN")
        fields = self._copy(collection, progress)
        progress(Progress("indexing", 0, 1))
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
        flat = collection.flat
        record = StoreRecord(len(flat), flat.longest, collection.encoder, fields, hnsw)
        stores = sql.Identifier(STORES)
        self.connection.execute(sql.SQL(_REMEMBER).format(stores=stores), (self.table, record.to_json()))
        progress(Progress("indexing", 1, 1))
        return record

    def _execute(self, statement: LiteralString, **parts: sql.Composable) -> None:
        self.connection.execute(sql.SQL(statement).format(table=self.new, **parts))

    def _be_alone(self) -> None:
        """Hold back other loads until the commit; locks on the tables would hold back searches too."""
        row = self.connection.execute(
            "SELECT pg_try_advisory_xact_lock(hashtextextended(current_schema() || '.' || %s, 0))",
            (self.table,),
        ).fetchone()
        if row != (True,):
            raise KnowledgeBaseError(
                f"pgvector: {self.place} is being loaded by another process: wait until it has ended"
            )

    def find_place(self, replace: bool) -> bool:
        """Whether there is a table that may be replaced."""
        row = self.connection.execute(
            "SELECT to_regclass(quote_ident(%s)) IS NOT NULL", (self.table,)
        ).fetchone()
        if row == (False,):
            return False
        made = read_record(self.connection, self.table, self.place) is not None
        if not made:
            raise InputError("table", self.table, "there is another table of this name; give another one")
        if not replace:
            raise InputError("table", self.table, "it exists already; replace it, or give another name")
        return True

    def _copy(self, collection: Collection, progress: Reporter) -> tuple[str, ...]:
        """Write all rows; returns the fields that conditions can name."""
        total = len(collection.flat)
        fields = {"source", "title", "place"}
        columns = sql.SQL(", ").join(map(sql.Identifier, COLUMNS))
        # FREEZE: the rows are final at once, so that the first searches do not write to the table.
        statement = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT binary, FREEZE)").format(self.new, columns)
        with self.connection.cursor().copy(statement) as copy:
            copy.set_types(TYPES)
            for first in range(0, total, _BATCH):
                progress(Progress("loading", first, total))
                ids = range(first, min(first + _BATCH, total))
                for id, passage in zip(ids, collection.passages(ids), strict=True):
                    metadata = _storable(passage.metadata)
                    fields.update(flatten(metadata))
                    texts = [
                        _storable(text)
                        for text in (passage.source, passage.title, passage.place, passage.text)
                    ]
                    copy.write_row((id, collection.flat.vectors[id], *texts, Jsonb(metadata, _dumps)))
        progress(Progress("loading", total, total))
        return tuple(sorted(fields))


_dumps = partial(json.dumps, ensure_ascii=False)


def _storable(value: Any) -> Any:
    """What PostgreSQL can hold: its texts have no NUL characters and its JSON no infinite numbers."""
    if isinstance(value, str):
        return value.replace("\0", "\ufffd")
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {_storable(name): _storable(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_storable(item) for item in value]
    return value
