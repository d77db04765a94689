"""Makes a knowledge base and keeps it up to date, so that a kill at any moment leaves it as before or as after.

A build writes a whole new generation beside the current one, waits until it is on the disk, and replaces the
manifest. Passages are numbered by the sources of their documents and their order in them, so that an updated
knowledge base is the one that would be built from scratch. Passages that were encoded before, by the current
generation or by a build that was killed, are not encoded again.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from specrag.errors import InputError
from specrag.retrieval.assembly import GENERATION_FILES, OldVectors, encode_missing, write_indexes
from specrag.retrieval.build_settings import BuildSettings, load_checked_encoder, settle
from specrag.retrieval.changes import Changes, find_changes
from specrag.retrieval.chunking import Chunker
from specrag.retrieval.disk import sync, write_errors
from specrag.retrieval.flat import VECTORS_FILE
from specrag.retrieval.generation import Generation, remove_others
from specrag.retrieval.manifest import (
    BUILDING,
    GENERATIONS,
    MANIFEST,
    EncoderRecord,
    FileRecord,
    Manifest,
)
from specrag.retrieval.passage_store import PASSAGES, PassageStore, PassageWriter
from specrag.retrieval.progress import BuildReport, Counts, Progress, Reporter
from specrag.retrieval.reading import Reader
from specrag.retrieval.reading_limits import UNLIMITED, ReadingLimits
from specrag.retrieval.vector_shards import VectorShards
from specrag.retrieval.writer_lock import LOCK, writer_lock

if TYPE_CHECKING:
    from specrag.retrieval.encoder import Encoder


def build(
    paths: Sequence[Path],
    folder: Path,
    settings: BuildSettings | None = None,
    progress: Reporter | None = None,
    *,
    encoder: Encoder | None = None,
    limits: ReadingLimits = UNLIMITED,
) -> BuildReport:
    """Index documents into a folder: make it, or bring it up to date with what is below these paths.

    New documents are added, changed ones read again, those gone from below the paths removed; documents that
    were indexed from elsewhere stay. A document that can no longer be read keeps the passages that it had.
    If nothing has changed nothing is written.

    Args:
        paths: files and folders.
        folder: the knowledge base: a new or empty folder, or one made by this function.
        settings: what is not left open must agree with what the knowledge base was made with.
        progress: told now and then how far the build is.
        encoder: used in place of loading the one of the settings.
        limits: of each document; one beyond them counts as unreadable.

    Raises:
        InputError: a path or a setting cannot be used, or there is nothing to index.
        KnowledgeBaseError: another process writes there, the folder is damaged, or the disk refuses.
    """
    started = time.perf_counter()
    folder = Path(folder).expanduser()
    paths = [Path(path).expanduser() for path in paths]
    _check_folder(folder)
    if not folder.exists():
        find_changes(paths, folder, (), ())  # so that a wrong path leaves no folder behind
    with contextlib.ExitStack() as stack:
        with write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(writer_lock(folder))
        run = _Build(folder, settings or BuildSettings(), progress or _silent, encoder, stack)
        run.update(paths, limits)
        run.clean()
    counts = run.counts
    return BuildReport(
        added=counts.added,
        updated=counts.updated,
        removed=counts.removed,
        unchanged=counts.unchanged,
        skipped=tuple(counts.skipped),
        passages=Manifest.read(folder).passages,
        encoded=run.encoded,
        seconds=time.perf_counter() - started,
    )


def _silent(progress: Progress) -> None:
    """Show nothing."""


def _check_folder(folder: Path) -> None:
    """Write into no folder that holds somebody's files."""
    if folder.is_dir() and not Manifest.exists(folder):
        ours = {BUILDING, GENERATIONS, LOCK, f".{MANIFEST}.new"}
        others = sorted(path.name for path in folder.iterdir() if path.name not in ours)
        if others:
            remedy = f"it holds other files such as {others[0]!r}; give a new or empty folder"
            raise InputError("kb", str(folder), remedy)
    elif folder.exists() and not folder.is_dir():
        raise InputError("kb", str(folder), "it is a file; give a folder")


class _Build:
    """One call of :func:`build`, with the right to write.

    Args:
        stack: closes the current generation at the end.
    """

    def __init__(
        self,
        folder: Path,
        settings: BuildSettings,
        report: Reporter,
        encoder: Encoder | None,
        stack: contextlib.ExitStack,
    ) -> None:
        self.folder = folder
        self.report = report
        self.counts = Counts()
        self.encoded = 0
        self.new = folder / BUILDING / "generation"
        self._given_encoder = encoder
        self._generation = Generation.open(folder) if Manifest.exists(folder) else None
        self._old: Manifest | None = None
        self._store: PassageStore | None = None
        if self._generation is not None:
            stack.callback(self._generation.close)
            self._old = self._generation.manifest
            self._store = PassageStore(self._generation.folder / PASSAGES)
            stack.callback(self._store.close)
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

    def update(self, paths: Sequence[Path], limits: ReadingLimits) -> None:
        """Publish a new generation, if anything is different."""
        known = [] if self._store is None else self._store.files()
        roots = () if self._old is None else self._old.roots
        changes = find_changes(paths, self.folder, known, roots)
        self.counts.skipped += changes.skipped
        self.counts.removed = len(changes.removed)
        shutil.rmtree(self.new, ignore_errors=True)
        if self._old is not None:
            if changes.none:
                self.counts.unchanged = len(changes.entries)
                return
            self._old.verify(self.folder, (PASSAGES, VECTORS_FILE))
        try:
            reader = Reader(self.folder, self.new, self._store, lambda: self.chunker, self.counts, limits)
            written = reader.write(changes, self.report)
            if written is not None:
                self._publish(changes, written, self._index())
        finally:
            shutil.rmtree(self.new, ignore_errors=True)

    def _index(self) -> EncoderRecord:
        """Write vectors and indexes of the new passages; what made the vectors."""
        if self._old is None:
            made = EncoderRecord(
                self.encoder.name, self.encoder.dtype, self.encoder.fingerprint, self.encoder.dimension
            )
        else:
            made = self._old.encoder
        old = None
        if self._store is not None and self._generation is not None:
            old = OldVectors(self._store, self._generation.folder)
        shards = VectorShards(self.folder / BUILDING, made.fingerprint, made.dimension)
        with write_errors(self.folder):
            shards.open()
        store = PassageStore(self.new / PASSAGES)
        try:
            self.encoded = encode_missing(self.folder, store, old, shards, lambda: self.encoder, self.report)
        finally:
            store.close()
        write_indexes(self.folder, self.new, old, shards, made.dimension, self.report)
        return made

    def _publish(self, changes: Changes, written: PassageWriter, made: EncoderRecord) -> None:
        with write_errors(self.folder):
            for name in GENERATION_FILES:
                sync(self.new / name)
            sync(self.new)
            manifest = Manifest(
                generation=1 if self._old is None else self._old.generation + 1,
                encoder=made,
                chunking=self.settings.chunking,
                documents=written.files,
                passages=written.passages,
                roots=changes.roots,
                files={name: FileRecord.of(self.new / name) for name in GENERATION_FILES},
            )
            target = manifest.generation_folder(self.folder)
            target.parent.mkdir(exist_ok=True)
            shutil.rmtree(target, ignore_errors=True)  # of a build that was killed one step later
            self.new.rename(target)
            sync(target.parent)
            manifest.write(self.folder)

    def clean(self) -> None:
        """Remove what is of no use any more."""
        if self._generation is not None:
            self._generation.close()
        remove_others(self.folder, Manifest.read(self.folder).generation)
        shutil.rmtree(self.folder / BUILDING, ignore_errors=True)
