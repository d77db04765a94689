"""Passages of one generation in SQLite: written once by :class:`PassageWriter`, read-only afterwards.

Three tables. ``files`` has one row a document, with the range of its passages. ``passages`` has one row a
passage. ``fields`` serves the filters: one row for each value of source, title, place and metadata, with the
range of neighbouring passages that have it.
"""

from __future__ import annotations

import json
import math
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import xxhash

from specrag.errors import InputError
from specrag.retrieval.passage import Passage, passage_text

PASSAGES = "passages.sqlite"

Scalar: TypeAlias = str | int | float | bool

_SCHEMA = """
CREATE TABLE files (
    path TEXT PRIMARY KEY, source TEXT, size INTEGER, mtime_ns INTEGER, sha256 TEXT, first INTEGER, last INTEGER
);
CREATE TABLE passages (
    id INTEGER PRIMARY KEY, source TEXT, title TEXT, place TEXT, text TEXT, metadata TEXT, key BLOB
);
CREATE TABLE fields (
    field TEXT, value, first INTEGER, last INTEGER, PRIMARY KEY (field, value, first)
) WITHOUT ROWID;
"""
_FILE = "path, source, size, mtime_ns, sha256, first, last"
_AT_ONCE = 500  # SQLite takes a limited number of parameters


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A document as it was when it was indexed.

    Attributes:
        path: absolute.
        source: how its passages name it.
        size, mtime_ns, sha256: tell whether it has changed since.
        first, last: its passages are ``first`` to ``last - 1``.
    """

    path: str
    source: str
    size: int
    mtime_ns: int
    sha256: str
    first: int = 0
    last: int = 0


@dataclass(frozen=True, slots=True)
class StoredPassage:
    """A passage without id and document: what an update copies."""

    title: str
    place: str
    text: str
    metadata: str  # JSON

    @property
    def key(self) -> bytes:
        """Hash of the text that an encoder reads, 16 bytes."""
        return xxhash.xxh3_128_digest(passage_text(self.title, self.text).encode())


class PassageStore:
    """Reads the passages of a generation. Thread-safe.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # Nobody writes the file any more, so that SQLite needs neither locks nor files beside it.
        uri = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
        self._database = sqlite3.connect(uri, uri=True, check_same_thread=False)
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def rows(self, query: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """All rows of a query."""
        with self._lock:
            return self._database.execute(query, parameters).fetchall()

    def __len__(self) -> int:
        return int(self.rows("SELECT coalesce(max(id) + 1, 0) FROM passages")[0][0])

    def passages(self, ids: Sequence[int]) -> list[Passage]:
        """These passages, in this order.

        Raises:
            InputError: there is no passage of this number.
        """
        wanted = [int(number) for number in ids]
        found: dict[int, Passage] = {}
        for start in range(0, len(wanted), _AT_ONCE):
            some = wanted[start : start + _AT_ONCE]
            marks = ", ".join("?" * len(some))
            query = f"SELECT id, source, title, place, text, metadata FROM passages WHERE id IN ({marks})"  # noqa: S608
            for number, source, title, place, text, metadata in self.rows(query, some):
                found[number] = Passage(number, source, title, place, text, json.loads(metadata))
        for number in wanted:
            if number not in found:
                raise InputError("passage id", number, f"give a number from 0 to {len(self) - 1}")
        return [found[number] for number in wanted]

    def files(self) -> list[StoredFile]:
        """All documents, in the order of their passages."""
        return [StoredFile(*row) for row in self.rows(f"SELECT {_FILE} FROM files ORDER BY first, path")]  # noqa: S608

    def copies(self, file: StoredFile) -> list[StoredPassage]:
        """The passages of one document."""
        query = "SELECT title, place, text, metadata FROM passages WHERE id >= ? AND id < ? ORDER BY id"
        return [StoredPassage(*row) for row in self.rows(query, (file.first, file.last))]

    def texts(self) -> Iterator[str]:
        """The text of each passage as the encoder and BM25 read it."""
        first = 0
        while rows := self.rows(
            "SELECT title, text FROM passages WHERE id >= ? ORDER BY id LIMIT ?", (first, _AT_ONCE)
        ):
            yield from (passage_text(title, text) for title, text in rows)
            first += len(rows)

    def texts_of(self, ids: Sequence[int]) -> list[str]:
        """The texts of these passages as the encoder reads them."""
        return [passage_text(passage.title, passage.text) for passage in self.passages(ids)]

    def keys(self) -> list[bytes]:
        """The key of each passage. [passages]."""
        return [key for (key,) in self.rows("SELECT key FROM passages ORDER BY id")]

    def field_names(self) -> list[str]:
        """The fields that a filter can name."""
        return [name for (name,) in self.rows("SELECT DISTINCT field FROM fields ORDER BY field")]

    def mask(self, query: str, parameters: Sequence[Any], passages: int) -> np.ndarray:
        """Passages in the ranges (first, last) that a query returns, bool [passages]."""
        mask = np.zeros(passages, dtype=bool)
        for first, last in self.rows(query, parameters):
            mask[first:last] = True
        return mask


class PassageWriter:
    """Writes the passages of a new generation; documents come in the order of their sources.

    The file is unusable until :meth:`close`.

    Args:
        path: the file, which is not there yet.
    """

    def __init__(self, path: Path) -> None:
        self._database = sqlite3.connect(path, isolation_level=None)
        self._database.executescript(
            f"PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -65536; {_SCHEMA} BEGIN;"
        )
        self.files = 0
        self.passages = 0

    def add(self, file: StoredFile, passages: Iterable[StoredPassage]) -> int:
        """Append a document; its passages get the next numbers. Returns how many they are."""
        first = self.passages
        runs: dict[tuple[str, Scalar], list[int]] = {}
        for passage in passages:
            self._database.execute(
                "INSERT INTO passages VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    self.passages,
                    file.source,
                    passage.title,
                    passage.place,
                    passage.text,
                    passage.metadata,
                    passage.key,
                ),
            )
            self._note_fields(runs, file.source, passage)
            self.passages += 1
        self._write_runs((field, value, *run) for (field, value), run in runs.items())
        self._database.execute(
            "INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?)",
            (file.path, file.source, file.size, file.mtime_ns, file.sha256, first, self.passages),
        )
        self.files += 1
        return self.passages - first

    def _note_fields(
        self, runs: dict[tuple[str, Scalar], list[int]], source: str, passage: StoredPassage
    ) -> None:
        """Extend the runs of equal values, and write those that have ended."""
        values: dict[str, list[Scalar]] = {}
        if passage.metadata != "{}":
            values = flatten(json.loads(passage.metadata))
        values |= {"source": [source], "title": [passage.title], "place": [passage.place]}
        for field, several in values.items():
            for value in several:
                run = runs.setdefault((field, value), [self.passages, self.passages])
                if run[1] < self.passages:
                    self._write_runs([(field, value, *run)])
                    run[0] = self.passages
                run[1] = self.passages + 1

    def _write_runs(self, runs: Iterable[tuple[Any, ...]]) -> None:
        self._database.executemany("INSERT INTO fields VALUES (?, ?, ?, ?)", runs)

    def close(self) -> None:
        """Finish the file."""
        self._database.execute("COMMIT")
        self._database.close()

    def abandon(self) -> None:
        """Close without finishing."""
        self._database.close()


def flatten(metadata: Mapping[str, Any], prefix: str = "") -> dict[str, list[Scalar]]:
    """Values that a filter can compare, by field; lists give several values, mappings dotted names."""
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
    """SQLite's integers have 64 bits; larger ones are compared as floating-point numbers."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        try:
            return float(value)
        except OverflowError:
            return math.copysign(1.7976931348623157e308, value)
    return value


def clean_text(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot hold, by question marks."""
    return text.encode(errors="replace").decode()


def metadata_json(metadata: Mapping[str, Any]) -> str:
    """Metadata as stored JSON."""
    return clean_text(json.dumps(dict(metadata), ensure_ascii=False, default=str))
