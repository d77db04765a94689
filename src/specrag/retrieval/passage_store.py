"""The passages of a knowledge base on disk: an SQLite database, and next to it a file of vectors.

Rows are numbered in the order in which passages were added, and never reused: a changed passage gets a new row, and a
removed one leaves its row behind, until :func:`~specrag.retrieval.build.compact` renumbers them. What is written for a
row is therefore never overwritten. The file of vectors only grows; the database says how much of it is valid, and its
transactions are those of the knowledge base. A reader holds a read transaction and therefore sees one state of
everything for as long as it is open.

The tables:

- ``state``: a single row with a :class:`State`;
- ``documents``: files, and ``passages``: what they were cut into, by row;
- ``blocks``: ids, lengths in terms, and the checksum of the vectors, for a run of rows; ``gone``: rows left behind;
- ``fields``: for filters, each value of source, title, place and metadata, with the run of rows that have it;
- ``terms`` and ``postings``: for BM25, the rows that contain a term and how often, in chunks of ascending rows.

SQLite detects torn transactions but not flipped bits, so everything that a search reads carries a checksum of its own,
a *seal*.
"""

from __future__ import annotations

import json
import math
import sqlite3
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import xxhash

from specrag.errors import InputError, SpecragError
from specrag.retrieval.index.base import Rows
from specrag.retrieval.index.bm25 import BM25Settings, Occurrences
from specrag.retrieval.index.scoring import Bools, Floats, Ints
from specrag.retrieval.manifest import DATABASE, VECTORS, KnowledgeBaseError, Manifest
from specrag.retrieval.passage import Passage, passage_text

Scalar: TypeAlias = str | int | float | bool

SCHEMA = """
CREATE TABLE state (content TEXT, seal INTEGER);
CREATE TABLE documents (
    document INTEGER PRIMARY KEY, path TEXT UNIQUE, source TEXT, size INTEGER, mtime_ns INTEGER, sha256 TEXT,
    seal INTEGER
);
CREATE TABLE passages (
    row INTEGER PRIMARY KEY, id INTEGER UNIQUE, document INTEGER, title TEXT, place TEXT, text TEXT, metadata TEXT,
    key BLOB, seal INTEGER
);
CREATE INDEX passages_of ON passages (document);
CREATE INDEX passages_by_key ON passages (key);
CREATE TABLE blocks (
    first INTEGER PRIMARY KEY, last INTEGER, ids BLOB, lengths BLOB, vectors INTEGER, seal INTEGER
);
CREATE TABLE gone (first INTEGER PRIMARY KEY, last INTEGER);
CREATE TABLE fields (
    field TEXT, value, first INTEGER, last INTEGER, PRIMARY KEY (field, value, first)
) WITHOUT ROWID;
CREATE INDEX fields_by_row ON fields (first);
CREATE TABLE terms (id INTEGER PRIMARY KEY, term TEXT UNIQUE);
CREATE TABLE postings (
    term INTEGER, first INTEGER, rows BLOB, times BLOB, seal INTEGER, PRIMARY KEY (term, first)
);
"""

#: Types of the numbers stored in blobs.
ROW, TIMES, ID, LENGTH = "<i4", "<u2", "<i8", "<i4"

_WAIT = 30.0  # seconds to wait for another process to release the database, which it locks only briefly
_AT_ONCE = 500  # SQLite limits the number of parameters


def _range(path: str) -> tuple[str, str, str]:
    """A path, and bounds of the paths below it: the path with `/` appended, and with the character after `/`."""
    folder = path.rstrip("/")
    return path, f"{folder}/", f"{folder}0"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A document as it was when it was indexed.

    Attributes:
        path: absolute path.
        source: the name that its passages give.
        size, mtime_ns, sha256: tell whether it has changed since.
        document: its number in the database; 0 if it is not there yet.
    """

    path: str
    source: str
    size: int
    mtime_ns: int
    sha256: str
    document: int = 0

    @property
    def seal(self) -> int:
        """A checksum of everything but the number."""
        return seal(self.path, self.source, self.size, self.mtime_ns, self.sha256)


@dataclass(frozen=True, slots=True)
class StoredPassage:
    """A passage's content, without its id and document."""

    title: str
    place: str
    text: str
    metadata: str  # JSON

    @property
    def key(self) -> bytes:
        """Hash of the text that an encoder reads, 16 bytes."""
        return xxhash.xxh3_128_digest(passage_text(self.title, self.text).encode())


@dataclass(frozen=True, slots=True)
class Graph:
    """A file with an approximate index of the first rows.

    Attributes:
        file: its name, in the folder of the database.
        rows: number of rows that it links.
        checksum: checksum of the file.
    """

    file: str
    rows: int
    checksum: str


@dataclass(frozen=True, slots=True)
class State:
    """What a knowledge base holds.

    Attributes:
        version: grows with each change of the documents.
        documents, passages: how many there are.
        rows: number of rows of vectors and indexes, including those left behind.
        terms: greater than the number of every term.
        longest: upper bound of the vectors' lengths.
        roots: the paths that were indexed, absolute; a document's source is its path below one of them.
        languages: languages of the texts, the most frequent first, by Snowball's names.
        graph: the approximate index, if there is one.
    """

    version: int = 0
    documents: int = 0
    passages: int = 0
    rows: int = 0
    terms: int = 1
    longest: float = 0.0
    roots: tuple[str, ...] = ()
    languages: tuple[str, ...] = ()
    graph: Graph | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, content: str) -> State:
        """Read what :meth:`to_json` wrote; a ValueError, KeyError or TypeError means damage."""
        values = json.loads(content)
        for name in ("roots", "languages"):
            values[name] = tuple(values[name])
        values["graph"] = None if values["graph"] is None else Graph(**values["graph"])
        return cls(**values)


def seal(*parts: object) -> int:
    """A checksum of some values that fits SQLite's integers: 64 bits, signed."""
    pieces: list[bytes | memoryview] = []
    for part in parts:
        data = part if isinstance(part, bytes | memoryview) else str(part).encode()
        pieces += (len(data).to_bytes(8, "little"), data)
    return int.from_bytes(xxhash.xxh3_64_digest(b"".join(pieces)), "little", signed=True)


def connect(path: Path, *, write: bool = False) -> sqlite3.Connection:
    """Connect to an existing database.

    Args:
        write: fail if it cannot be written; otherwise it is opened with as many rights as the disk grants. If nobody
            can write it, SQLite must be told so (``immutable``).

    Raises:
        sqlite3.Error: it cannot be read.
    """
    modes = ["mode=rw"]
    log = path.with_name(f"{path.name}-wal")
    if not write:
        modes.append("mode=ro")
        if not log.exists() or not log.stat().st_size:
            modes.append("mode=ro&immutable=1")
    for mode in modes:
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?{mode}",
            uri=True,
            timeout=_WAIT,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            connection.execute("SELECT content FROM state").fetchall()
            return connection
        except sqlite3.OperationalError:
            connection.close()
            if mode == modes[-1]:
                raise
    raise AssertionError


def damaged(path: Path, what: str) -> SpecragError:
    """The error for a damaged file of a knowledge base."""
    return Manifest.damaged(path, what)


class PassageStore:
    """Reads one state of the passages. Thread-safe.

    Args:
        folder: the folder of the generation.

    Raises:
        KnowledgeBaseError: it is damaged or cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / DATABASE
        self._lock = threading.Lock()
        try:
            self._database = connect(self.path)
        except sqlite3.Error as error:
            raise self._refused(error) from error
        try:
            self.rows_of("BEGIN")
            ((self.content, sealed),) = self.rows_of("SELECT content, seal FROM state")
            if seal(self.content) != sealed:
                raise ValueError("another seal")
            self.state = State.from_json(self.content)
        except (ValueError, KeyError, TypeError) as error:
            self._database.close()
            raise damaged(self.path, "does not say what it holds") from error
        except BaseException:
            self._database.close()
            raise

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._database.close()

    def rows_of(self, query: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """All result rows of a query.

        Raises:
            KnowledgeBaseError: the database is damaged or cannot be read.
        """
        try:
            with self._lock:
                return self._database.execute(query, parameters).fetchall()
        except sqlite3.ProgrammingError:
            raise KnowledgeBaseError(
                f"knowledge base: {str(self.folder)!r} is closed: open it again"
            ) from None
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise self._refused(error) from error

    def _refused(self, error: Exception) -> SpecragError:
        reason = " ".join(str(error).split())
        if isinstance(error, sqlite3.OperationalError) and "no such" not in reason:
            return KnowledgeBaseError(
                f"knowledge base: {str(self.path)!r} cannot be read ({reason}): make it readable"
            )
        return damaged(self.path, f"cannot be read ({reason})")

    # -- rows -----------------------------------------------------------------------------------------------

    @cached_property
    def blocks(self) -> list[tuple[int, int, int]]:
        """Runs of rows with the seals of their vectors: (first, last, seal)."""
        return [(first, last, vectors) for first, last, _, _, vectors in self._read_blocks()]

    @cached_property
    def rows(self) -> Rows:
        """Which passage each row holds."""
        ids = np.frombuffer(b"".join(ids for _, _, ids, _, _ in self._read_blocks()), dtype=ID).copy()
        live = np.ones(self.state.rows, dtype=bool)
        for first, last in self.rows_of("SELECT first, last FROM gone"):
            live[first:last] = False
        if np.count_nonzero(live) != self.state.passages:
            raise damaged(self.path, "has another number of passages than it says")
        return Rows(self.state.rows, ids, live)

    @cached_property
    def lengths(self) -> Ints:
        """Number of terms of each row's passage, int32 [rows]."""
        lengths: Ints = np.frombuffer(b"".join(own for _, _, _, own, _ in self._read_blocks()), dtype=LENGTH)
        return lengths

    def _read_blocks(self) -> Iterator[tuple[int, int, bytes, bytes, int]]:
        expected = 0
        for *block, sealed in self.rows_of(
            "SELECT first, last, ids, lengths, vectors, seal FROM blocks ORDER BY first"
        ):
            first, last, ids, lengths, vectors = block
            if first != expected or seal(*block) != sealed:
                raise damaged(self.path, f"has other rows from {expected} on than it says")
            expected = last
            yield first, last, ids, lengths, vectors
        if expected != self.state.rows:
            raise damaged(self.path, "has another number of rows than it says")

    def vectors(self, dimension: int) -> Floats:
        """The vectors of all rows, memory-mapped, float32 [rows, dimension]; read once to check their checksums.

        Raises:
            KnowledgeBaseError: the file is damaged.
        """
        path = self.folder / VECTORS
        try:
            if path.stat().st_size < 4 * dimension * self.state.rows:
                raise damaged(path, "is cut")
            found = np.memmap(path, dtype="<f4", mode="r", shape=(self.state.rows, dimension))
        except OSError as error:
            raise damaged(path, f"cannot be read ({error.strerror or error})") from error
        vectors: Floats = np.asarray(found)
        for first, last, sealed in self.blocks:
            if seal(vectors[first:last].data.cast("B")) != sealed:
                raise damaged(
                    path, f"has another checksum than the one recorded for its rows {first} to {last - 1}"
                )
        return vectors

    # -- passages -------------------------------------------------------------------------------------------

    def passages(self, ids: Sequence[int]) -> list[Passage]:
        """These passages, in the order given.

        Raises:
            InputError: there is no passage with one of these ids.
            KnowledgeBaseError: one is damaged.
        """
        wanted = [int(number) for number in ids]
        found: dict[int, Passage] = {}
        for start in range(0, len(wanted), _AT_ONCE):
            some = wanted[start : start + _AT_ONCE]
            marks = ", ".join("?" * len(some))
            query = f"""
                SELECT row, id, source, title, place, text, metadata, passages.seal FROM passages LEFT JOIN documents
                USING (document) WHERE id IN ({marks})
            """  # noqa: S608
            for *values, sealed in self.rows_of(query, some):
                if seal(*values) != sealed:
                    raise damaged(self.path, f"has another passage {values[1]} than was written")
                _, number, source, title, place, text, metadata = values
                found[number] = Passage(number, source, title, place, text, json.loads(metadata))
        for number in wanted:
            if number not in found:
                if number in self.rows.sorted_ids():
                    raise damaged(self.path, f"lacks the passage {number}")
                raise InputError("passage id", number, "there is no passage of this id; take one of a search")
        return [found[number] for number in wanted]

    def files(self) -> list[StoredFile]:
        """All documents, sorted by name."""
        return self._files("ORDER BY source, path")

    def files_at(self, path: str) -> list[StoredFile]:
        """The documents at or below a path."""
        return self._files("WHERE path = ? OR (path > ? AND path < ?)", _range(path))

    def files_named(self, names: Collection[str]) -> list[StoredFile]:
        """The documents with these names, and all that go by their path because another document has their name."""
        marks = ", ".join("?" * len(names))
        return self._files(f"WHERE source = path OR source IN ({marks})", tuple(names))

    def count_at(self, path: str) -> int:
        """How many documents there are at or below a path."""
        query = "SELECT count(*) FROM documents WHERE path = ? OR (path > ? AND path < ?)"
        ((count,),) = self.rows_of(query, _range(path))
        return int(count)

    def _files(self, which: str, parameters: Sequence[Any] = ()) -> list[StoredFile]:
        query = f"SELECT path, source, size, mtime_ns, sha256, document, seal FROM documents {which}"  # noqa: S608
        files = []
        for *values, sealed in self.rows_of(query, parameters):
            file = StoredFile(*values)
            if file.seal != sealed:
                raise damaged(self.path, f"has another document {file.source!r} than was written")
            files.append(file)
        return files

    def counts(self) -> dict[int, int]:
        """Number of passages of each document, by the document's number."""
        return dict(self.rows_of("SELECT document, count(*) FROM passages GROUP BY document"))

    def stored(self, first: int = 0) -> Iterator[tuple[int, int, StoredPassage]]:
        """Row, document and content of all passages from row ``first`` on."""
        query = """
            SELECT row, document, title, place, text, metadata FROM passages WHERE row >= ? ORDER BY row LIMIT ?
        """
        while some := self.rows_of(query, (first, _AT_ONCE)):
            yield from ((row, document, StoredPassage(*rest)) for row, document, *rest in some)
            first = some[-1][0] + 1

    # -- filters --------------------------------------------------------------------------------------------

    def field_names(self) -> list[str]:
        """The fields that a filter can name."""
        return [name for (name,) in self.rows_of("SELECT DISTINCT field FROM fields ORDER BY field")]

    def mask(self, query: str, parameters: Sequence[Any], rows: int) -> Bools:
        """Mask of the rows in the runs (first, last) that a query of ``fields`` returns, bool [rows]."""
        mask = np.zeros(rows, dtype=bool)
        for first, last in self.rows_of(query, parameters):
            mask[first:last] = True
        return mask

    # -- terms ----------------------------------------------------------------------------------------------

    @property
    def settings(self) -> BM25Settings:
        """How texts are split into terms."""
        return BM25Settings(languages=self.state.languages)

    @property
    def vocabulary(self) -> int:
        """Greater than the number of every term."""
        return self.state.terms

    def find(self, terms: Sequence[str]) -> Mapping[str, int]:
        """The numbers of those terms that are known."""
        found: dict[str, int] = {}
        for start in range(0, len(terms), _AT_ONCE):
            some = terms[start : start + _AT_ONCE]
            marks = ", ".join("?" * len(some))
            found.update(self.rows_of(f"SELECT term, id FROM terms WHERE term IN ({marks})", some))  # noqa: S608
        return found

    def occurrences(self, term: int) -> Occurrences:
        """The rows that contain a term, and how often.

        Raises:
            KnowledgeBaseError: they are damaged.
        """
        rows, times = [], []
        for first, own, often, sealed in self.rows_of(
            "SELECT first, rows, times, seal FROM postings WHERE term = ? ORDER BY first", (term,)
        ):
            if seal(term, first, own, often) != sealed:
                raise damaged(self.path, f"has other postings of the term {term} than were written")
            rows.append(own)
            times.append(often)
        if not rows:
            raise damaged(self.path, f"lacks the postings of the term {term}")
        return Occurrences(
            np.frombuffer(b"".join(rows), dtype=ROW),
            np.frombuffer(b"".join(times), dtype=TIMES).astype(np.int32),
        )


def flatten(metadata: Mapping[str, Any], prefix: str = "") -> dict[str, list[Scalar]]:
    """Values that a filter can compare, by field; lists become several values, nested mappings dotted names."""
    values: dict[str, list[Scalar]] = {}
    for name, value in metadata.items():
        field = f"{prefix}{name}"
        if isinstance(value, Mapping):
            values |= flatten(value, f"{field}.")
        else:
            several = value if isinstance(value, list) else [value]
            usable = [_number_in_range(item) for item in several if _is_scalar(item)]
            values[field] = list(dict.fromkeys(usable))
    return values


def _is_scalar(value: object) -> bool:
    return isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


def _number_in_range(value: Scalar) -> Scalar:
    """SQLite's integers have 64 bits; larger ones become floating-point numbers."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        try:
            return float(value)
        except OverflowError:
            return math.copysign(1.7976931348623157e308, value)
    return value


def clean_text(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode, by question marks."""
    return text.encode(errors="replace").decode()


def metadata_json(metadata: Mapping[str, Any]) -> str:
    """Metadata as the JSON that is stored."""
    return clean_text(json.dumps(dict(metadata), ensure_ascii=False, default=str))
