"""What a store of passages looks like in PostgreSQL, and whether a table is one that fits.

Each store is a table with one row a passage, in the first schema of the search path, that anybody may query and join.
The table ``specrag_stores`` beside it says of each store what a search must know: the encoder that made the vectors,
their dimension, number and greatest length.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql
from psycopg.rows import TupleRow

from specrag.errors import InputError
from specrag.retrieval.disk import KnowledgeBaseError
from specrag.retrieval.hnsw import HnswSettings
from specrag.retrieval.manifest import EncoderRecord

if TYPE_CHECKING:
    from specrag.retrieval.encoder import Encoder

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
    """What :data:`STORES` says of a table.

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
        """As it is stored."""
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
    """A store that is there and fits.

    Attributes:
        record: what is said of it.
        oid: the table's number in the database; a table that replaces it has another one.
    """

    record: StoreRecord
    oid: int


def check_table(table: str) -> str:
    """Make sure that a text can name a table.

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
    """Make sure that a store can have this index.

    Raises:
        InputError: it cannot.
    """
    if index not in INDEXES:
        raise InputError("index", index, f"a table of PostgreSQL has {' and '.join(INDEXES)}")
    return index


def check_graph(settings: HnswSettings, dimension: int) -> None:
    """Make sure that pgvector can build this HNSW index.

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
    """Make sure that a walk can keep so many candidates.

    Raises:
        InputError: it cannot.
    """
    if isinstance(ef_search, bool) or not isinstance(ef_search, int) or not 1 <= ef_search <= MOST_CANDIDATES:
        raise InputError("ef_search", ef_search, f"give a whole number from 1 to {MOST_CANDIDATES}")


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
    """What is known of a table.

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
    """What :data:`STORES`, which exists, says of a table; None if nothing."""
    names = {"table": sql.Literal(table), "stores": sql.Identifier(STORES)}
    row = connection.execute(_RECORD.format(**names)).fetchone()
    return None if row is None else StoreRecord.from_json(row[0], place)


def _lacks_extension(place: str) -> KnowledgeBaseError:
    return KnowledgeBaseError(
        f"pgvector: the database of {place} has no type for vectors: install pgvector on the server and run "
        "CREATE EXTENSION vector in this database"
    )


def check_encoder(encoder: Encoder, record: StoreRecord, place: str) -> None:
    """Make sure that an encoder is the one that made the vectors.

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
