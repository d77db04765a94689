"""Tables of passages in PostgreSQL: layout, checks, loading.

Each store is a table with one row a passage, in the first schema of the search path, that anybody may query and join.
The table ``specrag_stores`` beside it says of each store what a search must know: the encoder that made the vectors,
their dimension, number and greatest length.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, LiteralString

import psycopg
from pgvector.psycopg import register_vector
from psycopg import sql
from psycopg.rows import TupleRow
from psycopg.types.json import Jsonb

from specrag.checks import check_whole
from specrag.errors import InputError
from specrag.retrieval.index.flat import FlatIndex
from specrag.retrieval.index.hnsw import HnswSettings
from specrag.retrieval.manifest import EncoderRecord, KnowledgeBaseError
from specrag.retrieval.passage import Passage
from specrag.retrieval.passage_store import flatten
from specrag.retrieval.progress import Progress, Reporter
from specrag.retrieval.stores.pgvector.connection import ConnectionSettings, Database, database_url

if TYPE_CHECKING:
    from specrag.retrieval.encoder.encoder import Encoder
    from specrag.retrieval.knowledge_base import KnowledgeBase

FORMAT = 1
"""The version of the table's columns and of the record in :data:`STORES`."""

STORES = "specrag_stores"
DEFAULT_TABLE = "passages"
INDEXES = ("flat", "hnsw")
"""Exact search, and the approximate one if the table was loaded with it."""

COLUMNS = ("id", "embedding", "source", "title", "place", "text", "metadata")
TYPES = ("int8", "vector", "text", "text", "text", "text", "jsonb")

#: pgvector's limits: elements of a vector that is stored, and of one that an HNSW index takes; candidates of a walk.
MOST_DIMENSIONS, MOST_INDEXED_DIMENSIONS, MOST_CANDIDATES = 16_000, 2_000, 1_000

_LONGEST_NAME = 63  # bytes; PostgreSQL cuts longer ones without a word


@dataclass(frozen=True, slots=True)
class StoreRecord:
    """Record of a table in :data:`STORES`.

    Attributes:
        passages: their number; their ids go from 0 on.
        longest: the greatest Euclidean length of a vector, which bounds the rounding error of the database.
        encoder: that made the vectors.
        fields: that conditions can name.
        hnsw: how the approximate index was built; None without one.
    """

    passages: int
    longest: float
    encoder: EncoderRecord
    fields: tuple[str, ...]
    hnsw: HnswSettings | None

    def to_json(self) -> str:
        """Serialise."""
        return json.dumps({"format": FORMAT, **asdict(self)})

    @classmethod
    def from_json(cls, content: Mapping[str, Any], place: str) -> StoreRecord:
        """Read what :meth:`to_json` wrote.

        Raises:
            KnowledgeBaseError: another version of specrag wrote it, or it is damaged.
        """
        if content.get("format") != FORMAT:
            raise KnowledgeBaseError(
                f"pgvector: {place} has format {content.get('format')!r} and this version of specrag reads format "
                f"{FORMAT}: load the knowledge base again"
            )
        try:
            return cls(
                passages=int(content["passages"]),
                longest=float(content["longest"]),
                encoder=EncoderRecord(**content["encoder"]),
                fields=tuple(content["fields"]),
                hnsw=None if content["hnsw"] is None else HnswSettings(**content["hnsw"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise KnowledgeBaseError(
                f"pgvector: the record of {place} in {STORES} is damaged: load the knowledge base again"
            ) from error


@dataclass(frozen=True, slots=True)
class FoundStore:
    """A usable store.

    Attributes:
        record: what is said of it.
        oid: the table's number in the database; a table that replaces it has another one.
    """

    record: StoreRecord
    oid: int


def check_table(table: str) -> str:
    """Check the name of a table.

    Raises:
        InputError: it is empty or too long, or holds what no name can hold.
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


def check_index(index: str) -> str:
    """Check the name of an index.

    Raises:
        InputError: it cannot.
    """
    if index not in INDEXES:
        raise InputError("index", index, f"a table of PostgreSQL has {' and '.join(INDEXES)}")
    return index


def check_graph(settings: HnswSettings, dimension: int) -> None:
    """Check HNSW settings against the limits of pgvector.

    Raises:
        InputError: a value is outside its limits.
    """
    if dimension > MOST_INDEXED_DIMENSIONS:
        raise InputError(
            "hnsw", f"{dimension} dimensions", f"pgvector indexes at most {MOST_INDEXED_DIMENSIONS}"
        )
    if settings.neighbors > 100:
        raise InputError("neighbors", settings.neighbors, "pgvector takes at most 100")
    least = max(4, 2 * settings.neighbors)
    if not least <= settings.ef_construction <= MOST_CANDIDATES:
        remedy = f"pgvector takes {least} (twice the neighbors) to {MOST_CANDIDATES}"
        raise InputError("ef_construction", settings.ef_construction, remedy)
    check_walk(settings.ef_search)


def check_walk(ef_search: int) -> None:
    """Check the number of candidates of an HNSW search.

    Raises:
        InputError: it cannot.
    """
    check_whole("ef_search", ef_search, 1, MOST_CANDIDATES)


_TABLE = sql.SQL(
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
_RECORD = sql.SQL("SELECT content FROM {stores} WHERE name = {table}")


def find_store(connection: psycopg.Connection[TupleRow], table: str, place: str, index: str) -> FoundStore:
    """Find a store and check it.

    Args:
        place: the table and its database, for the messages.
        index: that it is to have.

    Raises:
        KnowledgeBaseError: the extension, the table, its record or its index is missing, or they do not fit.
    """
    names = {"table": sql.Literal(table), "stores": sql.Literal(STORES)}
    row = connection.execute(_TABLE.format(**names)).fetchone()
    assert row is not None
    has_vectors, has_stores, oid, dimension, has_graph = row
    if not has_vectors:
        raise _lacks_extension(place)
    if oid is None:
        raise KnowledgeBaseError(
            f"pgvector: {place} does not exist: load a knowledge base with `specrag index --pgvector URL --table`, "
            "or name another table"
        )
    record = read_record(connection, table, place) if has_stores else None
    if record is None:
        raise KnowledgeBaseError(f"pgvector: {place} was not made by specrag: name another table")
    if dimension != record.encoder.dimension:
        raise KnowledgeBaseError(
            f"pgvector: {place} holds vectors of {dimension or 'no'} dimensions and should hold "
            f"{record.encoder.dimension}: load the knowledge base again"
        )
    if index == "hnsw" and not has_graph:
        raise KnowledgeBaseError(
            f"pgvector: {place} has no HNSW index: search it exactly (flat), or load it again with one"
        )
    return FoundStore(record, oid)


def read_record(connection: psycopg.Connection[TupleRow], table: str, place: str) -> StoreRecord | None:
    """The record of a table in :data:`STORES`, which exists; None without one."""
    names = {"table": sql.Literal(table), "stores": sql.Identifier(STORES)}
    row = connection.execute(_RECORD.format(**names)).fetchone()
    return None if row is None else StoreRecord.from_json(row[0], place)


def _lacks_extension(place: str) -> KnowledgeBaseError:
    return KnowledgeBaseError(
        f"pgvector: the database of {place} has no type for vectors: install pgvector on the server and run "
        "CREATE EXTENSION vector in this database"
    )


def check_encoder(encoder: Encoder, record: StoreRecord, place: str) -> None:
    """Check that an encoder is the one that made the vectors.

    Raises:
        KnowledgeBaseError: it makes others.
    """
    made = record.encoder
    if encoder.dimension != made.dimension:
        raise KnowledgeBaseError(
            f"encoder: {encoder.name!r} makes vectors of {encoder.dimension} dimensions and {place} holds "
            f"{made.dimension}: use {made.name!r}, or load a knowledge base made with this one"
        )
    if encoder.fingerprint != made.fingerprint:
        raise KnowledgeBaseError(
            f"encoder: {encoder.name!r} ({encoder.fingerprint}) does not fit {place}, made with {made.name!r} "
            f"({made.fingerprint}): use that one, or load a knowledge base made with this one"
        )


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
    """Passages and vectors to load.

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
        ids = knowledge_base.ids  # a table numbers its passages in their order
        flat = FlatIndex.build(knowledge_base.vectors(ids))
        made = knowledge_base.manifest.encoder
        return cls(flat, lambda places: knowledge_base.passages(ids[list(places)].tolist()), made)


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
    """Load passages and vectors into a new table.

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
    """Check before a long build whether :func:`load` can succeed.

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
        """Create the extension and the table of stores, if they are missing."""
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
        """Exclude other loads until the commit; table locks would block searches too."""
        row = self.connection.execute(
            "SELECT pg_try_advisory_xact_lock(hashtextextended(current_schema() || '.' || %s, 0))",
            (self.table,),
        ).fetchone()
        if row != (True,):
            raise KnowledgeBaseError(
                f"pgvector: {self.place} is being loaded by another process: wait until it has ended"
            )

    def find_place(self, replace: bool) -> bool:
        """Whether there is a table to replace."""
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
