"""Changes to the passages on disk: one transaction, visible to readers once it is committed."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from specrag.errors import InputError
from specrag.retrieval.index.bm25 import BM25Settings, TermCounts, count_terms
from specrag.retrieval.index.scoring import LONGEST, Floats, Ints, Longs, largest_norm
from specrag.retrieval.language import languages_of
from specrag.retrieval.manifest import DATABASE, VECTORS
from specrag.retrieval.passage import passage_text
from specrag.retrieval.passage_store import (
    ID,
    LENGTH,
    ROW,
    SCHEMA,
    TIMES,
    PassageStore,
    Scalar,
    State,
    StoredFile,
    StoredPassage,
    connect,
    damaged,
    flatten,
    seal,
)

#: Rows whose terms are counted, and whose vectors are sealed, together.
BLOCK = 16_384

#: New postings are appended to a chunk until it has this many; a larger chunk is left as it is.
_OPEN_CHUNK = 512

#: Bits of an id, so that every JSON reader represents it exactly.
_ID_BITS = 53

_MOST_TIMES = np.iinfo(TIMES).max


def passage_ids(source: str, passages: Sequence[StoredPassage]) -> list[int]:
    """The ids of a document's passages: hashes of the document's name and the passage's title and text.

    A passage keeps its id while other passages of its document are added, removed or moved. Passages with the same
    title and text are told apart by how many of them came before.
    """
    seen: dict[bytes, int] = {}
    ids = []
    for passage in passages:
        key = passage.key
        number = seen[key] = seen.get(key, -1) + 1
        digest = xxhash.xxh3_64_intdigest(b"\0".join((source.encode(), key, str(number).encode())))
        ids.append(digest >> (64 - _ID_BITS))
    return ids


@dataclass(frozen=True, slots=True)
class Unencoded:
    """A row whose vector is to be written.

    Attributes:
        key, text: key and text of its passage.
        like: a row with the same text whose vector has been written; None if there is none.
    """

    row: int
    key: bytes
    text: str
    like: int | None


class PassageWriter:
    """Changes passages in one transaction. Only one process may do so at a time.

    First :meth:`write_vectors` writes the vectors of all new rows, then :meth:`index` makes them searchable, then
    :meth:`commit` publishes everything.

    Args:
        folder: the folder of the generation.
        dimension: number of elements of a vector.
        new: create the files, which do not exist yet; what a crash leaves of them is useless.

    Raises:
        sqlite3.Error, OSError: the disk refuses the write.
    """

    def __init__(self, folder: Path, dimension: int, *, new: bool = False) -> None:
        self.folder = folder
        self.dimension = dimension
        self._new = new
        path = folder / DATABASE
        if new:
            self._database = sqlite3.connect(path, isolation_level=None)
            self._database.executescript(
                f"PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -65536; {SCHEMA}"
            )
            self._database.execute("INSERT INTO state VALUES ('', 0)")
        else:
            self._database = connect(path, write=True)
            # A transaction is on disk before it counts as committed.
            self._database.executescript("PRAGMA synchronous = FULL; PRAGMA cache_size = -65536;")
        try:
            self._vectors: BinaryIO = (folder / VECTORS).open("w+b" if new else "r+b")
            self._database.execute(
                "CREATE TEMP TABLE left_behind (key BLOB PRIMARY KEY, row INTEGER) WITHOUT ROWID"
            )
            self._database.execute("BEGIN IMMEDIATE")
            self.before = State() if new else State.from_json(self._one("SELECT content FROM state"))
        except BaseException:
            self._database.close()
            raise
        self.rows = self.before.rows
        self.longest = self.before.longest
        self.languages = self.before.languages
        self._terms = self.before.terms

    def _one(self, query: str, parameters: Sequence[Any] = ()) -> Any:
        """The single value that a query returns."""
        ((value,),) = self._database.execute(query, parameters).fetchall()
        return value

    def close(self) -> None:
        """Discard what is not committed, and close the files."""
        with contextlib.suppress(OSError):  # a full disk has been reported; committed data has been flushed
            self._vectors.close()
        if not self._new:
            with contextlib.suppress(sqlite3.Error):  # readers or a full disk may prevent it
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                # Truncate the log, which may have filled the disk; do not wait for readers, which keep it.
                self._database.execute("PRAGMA busy_timeout = 0")
                self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._database.close()

    # -- documents ------------------------------------------------------------------------------------------

    def put(self, file: StoredFile, passages: Sequence[StoredPassage]) -> None:
        """Make these the passages of a document; those that it already has keep their rows.

        Args:
            file: the document; one with a number replaces the existing document with that number.
            passages: all its passages.
        """
        document = file.document
        values = (file.path, file.source, file.size, file.mtime_ns, file.sha256, file.seal)
        if document:
            self._database.execute(
                "UPDATE documents SET path = ?, source = ?, size = ?, mtime_ns = ?, sha256 = ?, seal = ? "
                "WHERE document = ?",
                (*values, document),
            )
        else:
            document = (
                self._database.execute(
                    "INSERT INTO documents VALUES (NULL, ?, ?, ?, ?, ?, ?)",
                    values,
                ).lastrowid
                or 0
            )
        new = list(zip(passage_ids(file.source, passages), passages, strict=True))
        says = {id: (passage.place, passage.metadata) for id, passage in new}
        old = {
            id: (row, (place, metadata))
            for row, id, place, metadata in self._database.execute(
                "SELECT row, id, place, metadata FROM passages WHERE document = ?", (document,)
            )
        }
        kept = {id for id, (_, said) in old.items() if says.get(id) == said}
        self._leave([row for id, (row, _) in old.items() if id not in kept])
        self._insert((document, file.source, id, passage) for id, passage in new if id not in kept)

    def drop(self, document: int) -> None:
        """Remove a document."""
        query = "SELECT row FROM passages WHERE document = ?"
        self._leave([row for (row,) in self._database.execute(query, (document,))])
        self._database.execute("DELETE FROM documents WHERE document = ?", (document,))

    def update(self, file: StoredFile) -> None:
        """Record a new path and time of a document whose content and source are unchanged."""
        self._database.execute(
            "UPDATE documents SET path = ?, mtime_ns = ?, seal = ? WHERE document = ?",
            (file.path, file.mtime_ns, file.seal, file.document),
        )

    def files(self, name: str | None = None) -> list[StoredFile]:
        """All documents, or those whose name or path is ``name``."""
        query = "SELECT path, source, size, mtime_ns, sha256, document FROM documents"
        if name is not None:
            rows = self._database.execute(f"{query} WHERE source = ? OR path = ?", (name, name))
        else:
            rows = self._database.execute(query)
        return [StoredFile(*row) for row in rows]

    def passages_of(self, document: int) -> list[StoredPassage]:
        """The passages of a document."""
        query = "SELECT title, place, text, metadata FROM passages WHERE document = ? ORDER BY row"
        return [StoredPassage(*row) for row in self._database.execute(query, (document,))]

    def _leave(self, rows: Sequence[int]) -> None:
        """Remove passages; their rows stay behind."""
        for first, last in _runs(sorted(rows)):
            run = (first, last)
            execute = self._database.execute
            # Their vectors can be reused for passages with the same text that are added in this transaction.
            execute(
                "INSERT OR IGNORE INTO left_behind SELECT key, row FROM passages WHERE row >= ? AND row < ?",
                run,
            )
            execute("DELETE FROM passages WHERE row >= ? AND row < ?", run)
            execute("DELETE FROM fields WHERE first >= ? AND first < ? AND last <= ?", (first, last, last))
            execute("INSERT INTO gone VALUES (?, ?)", run)

    def _insert(self, passages: Iterable[tuple[int, str, int, StoredPassage]]) -> None:
        """Insert passages, given as (document, source, id, passage), into the next rows."""
        runs: dict[tuple[str, Scalar], list[int]] = {}
        for document, source, id, passage in passages:
            while self._database.execute("SELECT 1 FROM passages WHERE id = ?", (id,)).fetchone():
                id = (id + 1) % 2**_ID_BITS
            content = (passage.title, passage.place, passage.text, passage.metadata)
            self._database.execute(
                "INSERT INTO passages VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(self.rows, id, document, *content),
                    passage.key,
                    seal(self.rows, id, source, *content),
                ),
            )
            self._note_fields(runs, source, passage)
            self.rows += 1
        self._write_runs((field, value, *run) for (field, value), run in runs.items())

    def _note_fields(
        self, runs: dict[tuple[str, Scalar], list[int]], source: str, passage: StoredPassage
    ) -> None:
        """Extend the runs of equal values, and write the runs that have ended."""
        values: dict[str, list[Scalar]] = {}
        if passage.metadata != "{}":
            values = flatten(json.loads(passage.metadata))
        values |= {"source": [source], "title": [passage.title], "place": [passage.place]}
        for field, several in values.items():
            for value in several:
                run = runs.setdefault((field, value), [self.rows, self.rows])
                if run[1] < self.rows:
                    self._write_runs([(field, value, *run)])
                    run[0] = self.rows
                run[1] = self.rows + 1

    def _write_runs(self, runs: Iterable[tuple[Any, ...]]) -> None:
        self._database.executemany("INSERT INTO fields VALUES (?, ?, ?, ?)", runs)

    # -- vectors --------------------------------------------------------------------------------------------

    def unencoded(self, size: int) -> Iterator[list[Unencoded]]:
        """The new rows, ``size`` at a time; the vectors of a lot must be written before the next one is taken."""
        query = """
            SELECT row, key, title, text,
                coalesce((SELECT min(row) FROM passages AS other WHERE other.key = passages.key), row),
                (SELECT row FROM left_behind WHERE left_behind.key = passages.key)
            FROM passages WHERE row >= ? AND row < ? ORDER BY row
        """
        for first in range(self.before.rows, self.rows, size):
            yield [
                Unencoded(row, key, passage_text(title, text), like if like < first else left_behind)
                for row, key, title, text, like, left_behind in self._database.execute(
                    query, (first, min(first + size, self.rows))
                )
            ]

    def write_vectors(self, first: int, vectors: Floats) -> None:
        """Write the vectors of the rows from ``first`` on, float32 [rows, dimension].

        Raises:
            InputError: they are not finite, or too long.
            OSError: the disk refuses the write.
        """
        longest = float(largest_norm(np.ascontiguousarray(vectors)))
        if not longest <= LONGEST:
            raise InputError("vectors", f"length {longest}", "give finite numbers of a length below 2^60")
        self.longest = max(self.longest, longest)
        self._vectors.seek(4 * self.dimension * first)
        self._vectors.write(np.ascontiguousarray(vectors, dtype="<f4").tobytes())

    def read_vectors(self, first: int, last: int) -> Floats:
        """The vectors of rows ``first`` to ``last - 1``, which have been written, float32 [rows, dimension]."""
        self._vectors.seek(4 * self.dimension * first)
        data = self._vectors.read(4 * self.dimension * (last - first))
        if len(data) < 4 * self.dimension * (last - first):
            raise damaged(self.folder / VECTORS, "is cut")
        return np.frombuffer(data, dtype="<f4").reshape(last - first, self.dimension)

    # -- terms ----------------------------------------------------------------------------------------------

    def index(self, report: Callable[[int], None]) -> None:
        """Make the new rows searchable; their vectors must have been written.

        Args:
            report: called with the number of rows done.
        """
        if self.rows == self.before.rows:
            return
        found = languages_of(self._texts(self.before.rows, self.rows))
        self.languages += tuple(language for language in found if language not in self.languages)
        self.languages = self.languages or ("english",)
        settings = BM25Settings(languages=self.languages)
        for first in range(self.before.rows, self.rows, BLOCK):
            last = min(first + BLOCK, self.rows)
            counts = count_terms(settings.split(list(self._texts(first, last))))
            self._add_terms(first, counts)
            self._seal_block(first, last, counts.lengths)
            report(last - self.before.rows)

    def _texts(self, first: int, last: int) -> Iterator[str]:
        query = "SELECT title, text FROM passages WHERE row >= ? AND row < ? ORDER BY row"
        for title, text in self._database.execute(query, (first, last)):
            yield passage_text(title, text)

    def _seal_block(self, first: int, last: int, lengths: Ints) -> None:
        ids = [id for (id,) in self._database.execute(
            "SELECT id FROM passages WHERE row >= ? AND row < ? ORDER BY row", (first, last)
        )]  # fmt: skip
        block = (
            *(first, last, np.array(ids, dtype=ID).tobytes(), lengths.astype(LENGTH).tobytes()),
            seal(self.read_vectors(first, last).tobytes()),
        )
        self._database.execute("INSERT INTO blocks VALUES (?, ?, ?, ?, ?, ?)", (*block, seal(*block)))

    def _add_terms(self, first: int, counts: TermCounts) -> None:
        """Add the terms of texts whose rows start at ``first``."""
        fresh = self._terms == 1
        rows = (counts.rows.astype(np.int64) + first).astype(ROW)
        times = np.minimum(counts.times, _MOST_TIMES).astype(TIMES)
        starts = counts.starts.tolist()

        def postings() -> Iterator[tuple[Any, ...]]:
            for place, term in enumerate(counts.terms):
                own = slice(starts[place], starts[place + 1])
                number = None if fresh else self._find_term(term)
                if number is None:
                    number = self._terms
                    self._terms += 1
                    self._database.execute("INSERT INTO terms VALUES (?, ?)", (number, term))
                    yield _chunk(number, rows[own].tobytes(), times[own].tobytes())
                else:
                    yield self._continued(number, rows[own].tobytes(), times[own].tobytes())

        self._write_postings(postings())

    def _write_postings(self, postings: Iterable[tuple[Any, ...]]) -> None:
        self._database.executemany("INSERT OR REPLACE INTO postings VALUES (?, ?, ?, ?, ?)", postings)

    def _find_term(self, term: str) -> int | None:
        found = self._database.execute("SELECT id FROM terms WHERE term = ?", (term,)).fetchone()
        return None if found is None else int(found[0])

    def _continued(self, term: int, rows: bytes, times: bytes) -> tuple[Any, ...]:
        """New postings of a term, appended to its last chunk if there is room."""
        last = self._database.execute(
            "SELECT first, rows, times, seal FROM postings WHERE term = ? ORDER BY first DESC LIMIT 1",
            (term,),
        ).fetchone()
        if last is None or len(last[1]) >= _OPEN_CHUNK * np.dtype(ROW).itemsize:
            return _chunk(term, rows, times)
        first, own, often, sealed = last
        if seal(term, first, own, often) != sealed:
            raise damaged(self.folder / DATABASE, f"has other postings of the term {term} than were written")
        return _chunk(term, own + rows, often + times)

    # -- publishing -----------------------------------------------------------------------------------------

    def commit(self, roots: Sequence[str]) -> State:
        """Publish everything; it is on disk when this returns.

        Args:
            roots: the paths indexed so far.

        Raises:
            sqlite3.Error, OSError: the disk refuses the write; everything stays as before.
        """
        state = replace(
            self.before,
            version=self.before.version + 1,
            documents=self._one("SELECT count(*) FROM documents"),
            passages=self._one("SELECT count(*) FROM passages"),
            rows=self.rows,
            terms=self._terms,
            longest=self.longest,
            roots=tuple(roots),
            languages=self.languages,
        )
        self._vectors.flush()
        os.fsync(self._vectors.fileno())
        write_state(self._database, state, new=self._new)
        return state

    # -- copying --------------------------------------------------------------------------------------------

    def copy(self, store: PassageStore, report: Callable[[int, int], None]) -> None:
        """Copy everything from another store into new files, without the rows that it left behind.

        Raises:
            KnowledgeBaseError: the other store is damaged.
        """
        live = np.ones(store.state.rows, dtype=bool) if store.rows.live is None else store.rows.live
        renumbered = np.cumsum(live, dtype=np.int64) - 1
        files = {file.document: file for file in store.files()}
        self._database.executemany(
            "INSERT INTO documents VALUES (?, ?, ?, ?, ?, ?, ?)",
            ((f.document, f.path, f.source, f.size, f.mtime_ns, f.sha256, f.seal) for f in files.values()),
        )
        ids = store.rows.named(np.flatnonzero(live)).tolist()
        content = zip(ids, store.stored(), strict=True)
        for document, some in groupby(content, key=lambda pair: pair[1][1]):
            source = files[document].source
            self._insert((document, source, id, passage) for id, (_, _, passage) in some)
        vectors, lengths, kept = store.vectors(self.dimension), store.lengths[live], np.flatnonzero(live)
        for first in range(0, self.rows, BLOCK):
            last = min(first + BLOCK, self.rows)
            self.write_vectors(first, vectors[kept[first:last]])
            self._seal_block(first, last, lengths[first:last])
            report(last, 2 * self.rows)
        self._write_postings(self._copied_postings(store, live, renumbered))
        self.before = replace(store.state, graph=None)
        self.languages = store.state.languages
        report(2 * self.rows, 2 * self.rows)

    def _copied_postings(
        self, store: PassageStore, live: np.ndarray, renumbered: Longs
    ) -> Iterator[tuple[Any, ...]]:
        for term, number in store.rows_of("SELECT term, id FROM terms ORDER BY term"):
            found = store.occurrences(number)
            held = live[found.rows]
            if held.any():
                self._database.execute("INSERT INTO terms VALUES (?, ?)", (self._terms, term))
                rows = renumbered[found.rows[held]].astype(ROW)
                yield _chunk(self._terms, rows.tobytes(), found.times[held].astype(TIMES).tobytes())
                self._terms += 1


def write_state(database: sqlite3.Connection, state: State, *, new: bool = False) -> None:
    """Write a new state and commit the transaction.

    Args:
        database: has an open transaction.
        state: the new state.
        new: whether it is a new database that nobody has opened yet.
    """
    content = state.to_json()
    database.execute("UPDATE state SET content = ?, seal = ?", (content, seal(content)))
    database.execute("COMMIT")
    if new:
        database.execute("PRAGMA journal_mode = WAL")


def _chunk(term: int, rows: bytes, times: bytes) -> tuple[Any, ...]:
    """A row of ``postings``."""
    first = int.from_bytes(rows[:4], "little")
    return term, first, rows, times, seal(term, first, rows, times)


def _runs(ascending: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Runs of neighbouring numbers, (first, last + 1)."""
    for _, run in groupby(enumerate(ascending), key=lambda pair: pair[1] - pair[0]):
        numbers = [number for _, number in run]
        yield numbers[0], numbers[-1] + 1
