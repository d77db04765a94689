"""Build and update a knowledge base; a kill at any moment leaves either the old or the new state.

A build is one transaction: changed documents are read, changed passages are encoded and made searchable, and the rest
is not touched. Passages that were encoded before, for this knowledge base or by a build that was killed, are not
encoded again. The approximate index is built after everything else has been published.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from specrag.artifacts import (
    BUILDING,
    check_target,
    fsync_tree,
    make_folder,
    publish_generation,
    remove_generations,
)
from specrag.checks import check_whole, nearest
from specrag.errors import InputError
from specrag.retrieval.documents.chunking import Chunker
from specrag.retrieval.documents.converters import UNLIMITED, ReadingLimits
from specrag.retrieval.documents.files import Skipped
from specrag.retrieval.documents.reader import Document, read_file
from specrag.retrieval.graph import refresh_graph
from specrag.retrieval.manifest import (
    ChunkingRecord,
    EncoderRecord,
    KnowledgeBaseError,
    Manifest,
    write_errors,
    writer_lock,
)
from specrag.retrieval.passage_store import (
    PassageStore,
    State,
    StoredFile,
    StoredPassage,
    clean_text,
    metadata_json,
)
from specrag.retrieval.passage_writer import PassageWriter, Unencoded
from specrag.retrieval.progress import BuildReport, Counts, Progress, Reporter
from specrag.retrieval.read_passages import forget_read
from specrag.retrieval.reading import Changes, Entry, find_changes, reliable, skipped_by_reader

if TYPE_CHECKING:
    from specrag.retrieval.encoder.encoder import Encoder
    from specrag.retrieval.index.scoring import Floats

LOT = 2048
"""Passages encoded between two writes to the disk: the most that a kill can lose."""

#: A build compacts once more than this many rows are left behind, provided that they outnumber the passages.
_MOST_GONE = 4096


def build(
    paths: str | Path | Sequence[str | Path],
    folder: str | Path,
    settings: BuildSettings | None = None,
    progress: Reporter | None = None,
    *,
    encoder: Encoder | None = None,
    limits: ReadingLimits = UNLIMITED,
) -> BuildReport:
    """Index documents into a folder: create the knowledge base, or bring it up to date with the files at these paths.

    New documents are added, changed ones are read again, and those gone from these paths are removed; documents that
    were indexed from elsewhere stay. A document that can no longer be read keeps its passages. If nothing has changed,
    nothing is written.

    Args:
        paths: files and folders, one or several.
        folder: the knowledge base: a new or empty folder, or one made by this function.
        settings: values that are given must agree with those of an existing knowledge base.
        progress: called now and then with the progress of the build.
        encoder: an encoder to use instead of loading the one in the settings.
        limits: limits of each document; one that exceeds them counts as unreadable.

    Raises:
        InputError: a path or a setting cannot be used, or there is nothing to index.
        KnowledgeBaseError: another process is writing there, the folder is damaged, or the disk refuses the write.
    """
    started = time.perf_counter()
    folder = Path(folder).expanduser()
    given = [paths] if isinstance(paths, str | Path) else paths
    sources = [Path(path).expanduser() for path in given]
    check_target(folder, "kb")
    if not folder.exists():
        find_changes(sources, folder, None)  # so that a wrong path leaves no folder behind
    with write_errors(folder):
        make_folder(folder)
    report = progress or _silent
    with _writing(folder):
        run = _Build(folder, settings or BuildSettings(), report, encoder)
        run.update(sources, limits)
        state = _finish(folder, report)
    counts = run.counts
    return BuildReport(
        added=counts.added,
        updated=counts.updated,
        removed=counts.removed,
        unchanged=counts.unchanged,
        skipped=(*counts.skipped, *run.left_out),  # unreadable documents first
        passages=state.passages,
        encoded=run.encoded,
        seconds=time.perf_counter() - started,
    )


def remove(sources: Sequence[str], folder: str | Path) -> int:
    """Remove documents from a knowledge base, whether or not their files still exist.

    Files that still exist are added again by the next build of the path that they came from.

    Args:
        sources: names of documents as given by their passages, or the paths of their files.
        folder: the knowledge base.

    Returns:
        The number of passages left.

    Raises:
        InputError: there is no such document, or none would be left.
        KnowledgeBaseError: another process is writing there, the folder is damaged, or the disk refuses the write.
    """
    folder = Path(folder).expanduser()
    Manifest.read(folder)
    with _writing(folder), contextlib.closing(_open_writer(folder, Manifest.read(folder))) as writer:
        with write_errors(folder):
            gone = {_named(source, writer) for source in sources}
            if len(gone) == writer.before.documents:
                raise _nothing_left(sources)
            for file in gone:
                writer.drop(file.document)
            writer.commit(writer.before.roots)
        writer.close()
        return _finish(folder, _silent).passages


def compact(folder: str | Path, progress: Reporter | None = None) -> State:
    """Rewrite a knowledge base without the rows that changes have left behind. Readers go on meanwhile.

    Raises:
        KnowledgeBaseError: another process is writing there, the folder is damaged, or the disk refuses the write.
    """
    folder = Path(folder).expanduser()
    Manifest.read(folder)
    with _writing(folder):
        _compact(folder, progress or _silent)
        return _finish(folder, progress or _silent)


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Hold the writer lock, and remove what an unfinished change leaves behind."""
    with contextlib.ExitStack() as stack:
        with write_errors(folder):
            stack.enter_context(writer_lock(folder))
            shutil.rmtree(_new_generation(folder), ignore_errors=True)
        try:
            yield
        finally:
            shutil.rmtree(_new_generation(folder), ignore_errors=True)


def _new_generation(folder: Path) -> Path:
    return folder / BUILDING / "generation"


def _open_writer(folder: Path, manifest: Manifest) -> PassageWriter:
    with write_errors(folder):
        return PassageWriter(manifest.generation_folder(folder), manifest.encoder.dimension)


def _finish(folder: Path, report: Reporter) -> State:
    """After a change: compact if needed, update the approximate index, and remove what is no longer needed."""
    manifest = Manifest.read(folder)
    state = _state(folder, manifest)
    gone = state.rows - state.passages
    if gone > max(_MOST_GONE, state.passages):
        _compact(folder, report)
        manifest = Manifest.read(folder)
        state = _state(folder, manifest)
    with write_errors(folder):
        refresh_graph(folder, manifest, state)
        forget_read(folder, lambda: _ids(folder, manifest))
    remove_generations(folder, keep=manifest.generation)
    shutil.rmtree(folder / BUILDING, ignore_errors=True)
    return state


def _state(folder: Path, manifest: Manifest) -> State:
    with contextlib.closing(PassageStore(manifest.generation_folder(folder))) as store:
        return store.state


def _ids(folder: Path, manifest: Manifest) -> list[int]:
    with contextlib.closing(PassageStore(manifest.generation_folder(folder))) as store:
        ids: list[int] = store.rows.sorted_ids().tolist()
        return ids


def _compact(folder: Path, report: Reporter) -> None:
    old, new = Manifest.read(folder), _new_generation(folder)
    with contextlib.closing(PassageStore(old.generation_folder(folder))) as store, write_errors(folder):
        new.mkdir(parents=True)
        with contextlib.closing(PassageWriter(new, old.encoder.dimension, new=True)) as writer:
            writer.copy(store, lambda done, total: report(Progress("compacting", done, total)))
            writer.commit(store.state.roots)
        fsync_tree(new)
        publish_generation(folder, new, replace(old, generation=old.generation + 1))


def _named(source: str, writer: PassageWriter) -> StoredFile:
    for file in writer.files(source):
        return file
    near = nearest(source, [file.source for file in writer.files()])
    hint = f"did you mean {near!r}? " if near else ""
    raise InputError("document", source, f"{hint}`specrag kb list` names those that are there")


def _nothing_left(sources: Sequence[object]) -> InputError:
    return InputError(
        "document",
        ", ".join(map(str, sources)),
        "no document would be left; to give the knowledge base up, delete its folder",
    )


def _silent(progress: Progress) -> None:
    """No-op progress callback."""


class _Build:
    """One run of :func:`build`, under the writer lock."""

    def __init__(
        self, folder: Path, settings: BuildSettings, report: Reporter, encoder: Encoder | None
    ) -> None:
        self.folder = folder
        self.report = report
        self.counts = Counts()
        self.left_out: tuple[Skipped, ...] = ()
        self.encoded = 0
        self._given_encoder = encoder
        self._old = Manifest.read(folder) if Manifest.exists(folder) else None
        self._writer: PassageWriter | None = None
        self._unchanged: list[StoredFile] = []
        if encoder is not None and settings.encoder is None and settings.encoder_dtype is None:
            settings = BuildSettings(
                encoder.name, encoder.dtype, settings.chunk_tokens, settings.chunk_overlap
            )
        self.settings = settle(settings, folder, self._old)

    @cached_property
    def encoder(self) -> Encoder:
        return load_checked_encoder(self.settings, self.folder, self._old, self._given_encoder)

    @cached_property
    def chunker(self) -> Chunker:
        chunking = self.settings.chunking
        return Chunker(self.encoder.tokenizer_file, chunking.tokens, chunking.overlap)

    @property
    def made(self) -> EncoderRecord:
        """The record of the encoder that makes the vectors."""
        if self._old is not None:
            return self._old.encoder
        encoder = self.encoder
        return EncoderRecord(encoder.name, encoder.dtype, encoder.fingerprint, encoder.dimension)

    @property
    def writer(self) -> PassageWriter:
        """The transaction, begun when the first change is found."""
        if self._writer is None:
            if self._old is not None:
                self._writer = _open_writer(self.folder, self._old)
            else:
                new, dimension = _new_generation(self.folder), self.made.dimension
                with write_errors(self.folder):
                    new.mkdir(parents=True)
                    self._writer = PassageWriter(new, dimension, new=True)
        return self._writer

    def update(self, paths: Sequence[Path], limits: ReadingLimits) -> None:
        """Find what has changed, and publish it."""
        changes = self._changes(paths)
        self.left_out = changes.skipped
        self.counts.removed = len(changes.removed)
        if self._old is not None and changes.none:
            self.counts.unchanged = len(changes.entries) + changes.others
            return
        self.counts.unchanged = changes.others
        try:
            self._apply(changes, limits)
            if self._writer is not None:
                self._publish(changes, self._writer)
        finally:
            if self._writer is not None:
                self._writer.close()

    def _changes(self, paths: Sequence[Path]) -> Changes:
        if self._old is None:
            return find_changes(paths, self.folder, None)
        with contextlib.closing(PassageStore(self._old.generation_folder(self.folder))) as store:
            return find_changes(paths, self.folder, store)

    # -- documents ------------------------------------------------------------------------------------------

    def _apply(self, changes: Changes, limits: ReadingLimits) -> None:
        """Write the documents that have changed.

        Raises:
            InputError: no document could be read.
        """
        total = len(changes.entries)
        for file in changes.removed:
            with write_errors(self.folder):
                self.writer.drop(file.document)
        for number, entry in enumerate(changes.entries):
            if number % 64 == 0 or entry.changed:
                self.report(Progress("reading", number, total))
            if entry.changed:
                self._read(entry, limits)
            elif entry.is_elsewhere:
                self.counts.unchanged += 1
            else:
                self._keep(entry)
        self.report(Progress("reading", total, total))
        if self._writer is None and self._old is None:
            first = self.counts.skipped[0]
            remedy = f"none of the documents can be read, first {first.source}: {first.reason}"
            raise InputError("path", f"{total} documents", remedy)
        if self._writer is not None:
            with write_errors(self.folder):
                for file in self._unchanged:
                    self._writer.update(file)

    def _keep(self, entry: Entry, sure: bool = True) -> None:
        """Note a document with unchanged content; if ``sure``, its new time stamp is recorded as proof."""
        assert entry.known is not None
        self.counts.unchanged += 1
        file = replace(entry.known, path=entry.path, source=entry.source)
        if entry.found is not None and sure:
            file = replace(file, mtime_ns=reliable(entry.found.mtime_ns))
        with write_errors(self.folder):
            if file.source != entry.known.source:
                self.writer.put(file, self.writer.passages_of(file.document))
            elif file.path != entry.known.path:
                self.writer.update(file)
            elif file != entry.known:
                self._unchanged.append(file)  # not worth a transaction of its own

    def _read(self, entry: Entry, limits: ReadingLimits) -> None:
        """Read a document that may have changed."""
        assert entry.found is not None
        read = read_file(entry.found, limits)
        passages = [passage for document in read.documents for passage in self._cut(document)]
        same = entry.known is not None and entry.known.sha256 == read.sha256
        if not passages or same:
            skipped = read.skipped
            if not skipped and not passages:
                skipped = (Skipped(entry.source, "it holds no text"),)
            self.counts.skipped += skipped if same else skipped_by_reader(entry, skipped)
            if entry.known is not None:
                self._keep(entry, sure=False)
            return
        self.counts.skipped += read.skipped
        if entry.known is None:
            self.counts.added += 1
        else:
            self.counts.updated += 1
        found, document = entry.found, 0 if entry.known is None else entry.known.document
        file = StoredFile(
            entry.path, entry.source, found.size, reliable(found.mtime_ns), read.sha256, document
        )
        with write_errors(self.folder):
            self.writer.put(file, passages)

    def _cut(self, document: Document) -> list[StoredPassage]:
        metadata = metadata_json(document.metadata)
        return [
            StoredPassage(clean_text(chunk.title), clean_text(chunk.place), clean_text(chunk.text), metadata)
            for chunk in self.chunker.chunk(document)
        ]

    # -- passages -------------------------------------------------------------------------------------------

    def _publish(self, changes: Changes, writer: PassageWriter) -> None:
        self._encode(writer)
        with write_errors(self.folder):
            total = writer.rows - writer.before.rows + 1  # the last step publishes
            self.report(Progress("indexing", 0, total))
            writer.index(lambda done: self.report(Progress("indexing", done, total)))
            writer.commit(changes.roots)
            writer.close()
            if self._old is None:
                new = _new_generation(self.folder)
                fsync_tree(new)
                manifest = Manifest(
                    generation=1, files={}, encoder=self.made, chunking=self.settings.chunking
                )
                publish_generation(self.folder, new, manifest)
            self.report(Progress("indexing", total, total))

    def _encode(self, writer: PassageWriter) -> None:
        """Write the vectors of the new passages; a kill loses at most the last lot."""
        done, total = 0, writer.rows - writer.before.rows
        self.report(Progress("encoding", 0, total))
        with (
            contextlib.closing(_Encoded(self.folder / BUILDING, self.made)) as kept,
            write_errors(self.folder),
        ):
            for lot in writer.unencoded(LOT):
                vectors = np.empty((len(lot), writer.dimension), dtype=np.float32)
                places: dict[bytes, list[int]] = {}
                for place, row in enumerate(lot):
                    known = (
                        kept.find(row.key)
                        if row.like is None
                        else writer.read_vectors(row.like, row.like + 1)[0]
                    )
                    if known is None:
                        places.setdefault(row.key, []).append(place)
                    else:
                        vectors[place] = known
                self._encode_lot(lot, places, vectors, done, total)
                if places and total > LOT:
                    kept.add(list(places), vectors[[first for first, *_ in places.values()]])
                writer.write_vectors(lot[0].row, vectors)
                done += len(lot)
        self.report(Progress("encoding", total, total))

    def _encode_lot(
        self, lot: list[Unencoded], places: dict[bytes, list[int]], vectors: Floats, done: int, total: int
    ) -> None:
        """Encode each distinct text of a lot once, and store its vector at all places where it occurs."""
        if not places:
            return
        done += len(lot) - len(places)

        def advance(finished: int) -> None:
            nonlocal done
            done += finished
            self.report(Progress("encoding", min(done, total), total))

        texts = [lot[first].text for first, *_ in places.values()]
        encoded = self.encoder.encode_passages(texts, advance)
        self.encoded += len(texts)
        for vector, own in zip(encoded, places.values(), strict=True):
            vectors[own] = vector


class _Encoded:
    """The vectors that an unfinished build has encoded, for its rerun.

    Vectors are looked up by their passage's key and belong to one encoder.

    Args:
        folder: where they are stored.
        encoder: the encoder that made the vectors.
    """

    def __init__(self, folder: Path, encoder: EncoderRecord) -> None:
        self.path = folder / "encoded.sqlite"
        self._encoder = encoder
        self._database = self._open() if self.path.exists() else None

    def _open(self) -> sqlite3.Connection:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        database = sqlite3.connect(self.path)
        try:
            database.executescript(
                "CREATE TABLE IF NOT EXISTS encoder (fingerprint TEXT);"
                "CREATE TABLE IF NOT EXISTS vectors (key BLOB PRIMARY KEY, vector BLOB) WITHOUT ROWID;"
            )
            made = [fingerprint for (fingerprint,) in database.execute("SELECT fingerprint FROM encoder")]
            if made != [self._encoder.fingerprint]:
                database.execute("DELETE FROM vectors")
                database.execute("DELETE FROM encoder")
                database.execute("INSERT INTO encoder VALUES (?)", (self._encoder.fingerprint,))
        except sqlite3.OperationalError:
            database.close()
            raise
        except sqlite3.DatabaseError:  # damaged: encoded again
            database.close()
            self.path.unlink()
            return self._open()
        return database

    def find(self, key: bytes) -> Floats | None:
        """The vector of a passage, float32 [dimension]; None if there is none."""
        if self._database is None:
            return None
        found = self._database.execute("SELECT vector FROM vectors WHERE key = ?", (key,)).fetchone()
        return None if found is None else np.frombuffer(found[0], dtype="<f4")

    def add(self, keys: Sequence[bytes], vectors: Floats) -> None:
        """Keep vectors, float32 [keys, dimension].

        Raises:
            sqlite3.OperationalError, OSError: the disk refuses the write.
        """
        if self._database is None:
            self._database = self._open()
        with self._database:
            self._database.executemany(
                "INSERT OR REPLACE INTO vectors VALUES (?, ?)",
                ((key, vector.astype("<f4").tobytes()) for key, vector in zip(keys, vectors, strict=True)),
            )

    def close(self) -> None:
        """Close the file, which stays."""
        if self._database is not None:
            self._database.close()


DEFAULT_ENCODER = "minilm-l6-v2"
DEFAULT_CHUNKING = ChunkingRecord(tokens=200, overlap=32)

_SMALLEST_CHUNK = 16
_SPECIAL_TOKENS = 2  # that an encoder puts around a text


@dataclass(frozen=True, slots=True)
class BuildSettings:
    """Build options; ``None`` keeps the knowledge base's own value, or the default for a new one.

    Args:
        encoder: name of a sentence encoder (default ``minilm-l6-v2``).
        encoder_dtype: the dtype in which it computes (default ``bf16``, or ``fp32`` if the processor cannot multiply
            that).
        chunk_tokens: the most tokens of a passage (default 200).
        chunk_overlap: tokens that a passage repeats from the one before (default 32).
    """

    encoder: str | None = None
    encoder_dtype: str | None = None
    chunk_tokens: int | None = None
    chunk_overlap: int | None = None


@dataclass(frozen=True, slots=True)
class SettledSettings:
    """:class:`BuildSettings` with every value filled in."""

    encoder: str
    encoder_dtype: str
    chunking: ChunkingRecord


def _default_dtype() -> str:
    from specrag.retrieval.encoder.encoder import default_dtype  # it imports torch

    return default_dtype()


def settle(settings: BuildSettings, folder: Path, old: Manifest | None) -> SettledSettings:
    """Fill in the values that were left open.

    Args:
        settings: as the caller gave them.
        folder: the knowledge base, for error messages.
        old: its manifest; None for a new one.

    Raises:
        InputError: a value cannot be used, or differs from that of the knowledge base.
    """
    asked = {
        "encoder": settings.encoder,
        "encoder_dtype": settings.encoder_dtype,
        "chunk_tokens": settings.chunk_tokens,
        "chunk_overlap": settings.chunk_overlap,
    }
    made: dict[str, str | int] = {
        "encoder": DEFAULT_ENCODER if old is None else old.encoder.name,
        "encoder_dtype": _default_dtype() if old is None else old.encoder.dtype,
        "chunk_tokens": (DEFAULT_CHUNKING if old is None else old.chunking).tokens,
        "chunk_overlap": (DEFAULT_CHUNKING if old is None else old.chunking).overlap,
    }
    for name, value in asked.items():
        if old is not None and value is not None and value != made[name]:
            remedy = (
                f"the knowledge base {str(folder)!r} was made with {made[name]!r}; leave it out, or index into "
                "another folder"
            )
            raise InputError(name, value, remedy)
    tokens = made["chunk_tokens"] if settings.chunk_tokens is None else settings.chunk_tokens
    overlap = made["chunk_overlap"] if settings.chunk_overlap is None else settings.chunk_overlap
    tokens = check_whole("chunk_tokens", tokens, _SMALLEST_CHUNK)
    if settings.chunk_overlap is None and old is None:
        overlap = min(DEFAULT_CHUNKING.overlap, tokens // 4)
    overlap = check_whole("chunk_overlap", overlap, 0, tokens // 2)
    return SettledSettings(
        encoder=str(made["encoder"] if settings.encoder is None else settings.encoder),
        encoder_dtype=str(
            made["encoder_dtype"] if settings.encoder_dtype is None else settings.encoder_dtype
        ),
        chunking=ChunkingRecord(tokens, overlap),
    )


def load_checked_encoder(
    settings: SettledSettings, folder: Path, old: Manifest | None, given: Encoder | None
) -> Encoder:
    """Load the encoder of these settings and check it against the knowledge base.

    Args:
        settings: the settled settings.
        folder: the knowledge base, for error messages.
        old: its manifest; None for a new one.
        given: an encoder that is loaded already, if there is one.

    Raises:
        InputError: there is no such encoder, or it cannot read passages as long as these.
        KnowledgeBaseError: its vectors would differ from the existing ones.
    """
    encoder = given
    if encoder is None:
        from specrag.retrieval.encoder.encoder import load_encoder  # it imports torch

        encoder = load_encoder(settings.encoder, dtype=settings.encoder_dtype)
    most = encoder.max_tokens - _SPECIAL_TOKENS
    if settings.chunking.tokens > most:
        remedy = f"the encoder {encoder.name!r} reads at most {most} of a text"
        raise InputError("chunk_tokens", settings.chunking.tokens, remedy)
    if old is not None:
        check_fingerprint(encoder, folder, old)
    return encoder


def check_fingerprint(encoder: Encoder, folder: Path, manifest: Manifest) -> None:
    """Check that an encoder is the one that made a knowledge base's vectors.

    Raises:
        KnowledgeBaseError: its vectors would differ from the existing ones.
    """
    made = manifest.encoder
    if encoder.fingerprint != made.fingerprint:
        raise KnowledgeBaseError(
            f"encoder: {encoder.name!r} ({encoder.fingerprint}) does not fit the knowledge base {str(folder)!r}, "
            f"made with {made.name!r} ({made.fingerprint}): use that one, or index into another folder"
        )
