"""Build and update a knowledge base; a kill at any moment leaves the old one or the new one.

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
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from specrag.artifacts import (
    BUILDING,
    FileRecord,
    check_target,
    make_folder,
    publish_generation,
    remove_generations,
)
from specrag.checks import check_whole
from specrag.errors import InputError
from specrag.retrieval.assembly import (
    GENERATION_FILES,
    OldVectors,
    VectorShards,
    encode_missing,
    write_indexes,
)
from specrag.retrieval.documents.chunking import Chunker
from specrag.retrieval.documents.converters import UNLIMITED, ReadingLimits
from specrag.retrieval.documents.files import Skipped
from specrag.retrieval.index.flat import VECTORS_FILE
from specrag.retrieval.manifest import (
    ChunkingRecord,
    EncoderRecord,
    KnowledgeBaseError,
    Manifest,
    write_errors,
    writer_lock,
)
from specrag.retrieval.passage_store import PASSAGES, PassageStore, PassageWriter
from specrag.retrieval.progress import BuildReport, Counts, Progress, Reporter
from specrag.retrieval.reading import Changes, Reader, find_changes

if TYPE_CHECKING:
    from specrag.retrieval.encoder.encoder import Encoder


def build(
    paths: str | Path | Sequence[str | Path],
    folder: str | Path,
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
        paths: files and folders, one or several.
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
    given = [paths] if isinstance(paths, str | Path) else paths
    sources = [Path(path).expanduser() for path in given]
    check_target(folder, "kb")
    if not folder.exists():
        find_changes(sources, folder, (), ())  # so that a wrong path leaves no folder behind
    with contextlib.ExitStack() as stack:
        with write_errors(folder):
            make_folder(folder)
            stack.enter_context(writer_lock(folder))
        run = _Build(folder, settings or BuildSettings(), progress or _silent, encoder, stack)
        run.update(sources, limits)
        run.clean()
    counts = run.counts
    return BuildReport(
        added=counts.added,
        updated=counts.updated,
        removed=counts.removed,
        unchanged=counts.unchanged,
        skipped=(*counts.skipped, *run.left_out),  # what could not be read first
        passages=Manifest.read(folder).passages,
        encoded=run.encoded,
        seconds=time.perf_counter() - started,
    )


def _silent(progress: Progress) -> None:
    """No-op progress callback."""


class _Build:
    """One run of :func:`build`, under the writer lock.

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
        self.left_out: tuple[Skipped, ...] = ()
        self.encoded = 0
        self.new = folder / BUILDING / "generation"
        self._given_encoder = encoder
        self._generation = Manifest.open(folder) if Manifest.exists(folder) else None
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
        """Publish a new generation if any document differs."""
        known = [] if self._store is None else self._store.files()
        roots = () if self._old is None else self._old.roots
        changes = find_changes(paths, self.folder, known, roots)
        self.left_out = changes.skipped
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
        """Write the vectors and indexes of the new passages; returns the encoder's record."""
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
            manifest = Manifest(
                generation=1 if self._old is None else self._old.generation + 1,
                encoder=made,
                chunking=self.settings.chunking,
                documents=written.files,
                passages=written.passages,
                roots=changes.roots,
                files={name: FileRecord.of(self.new / name) for name in GENERATION_FILES},
            )
            publish_generation(self.folder, self.new, manifest)

    def clean(self) -> None:
        """Remove older generations and leftovers of the build."""
        if self._generation is not None:
            self._generation.close()
        remove_generations(self.folder, keep=Manifest.read(self.folder).generation)
        shutil.rmtree(self.folder / BUILDING, ignore_errors=True)


DEFAULT_ENCODER = "minilm-l6-v2"
DEFAULT_CHUNKING = ChunkingRecord(tokens=200, overlap=32)

_SMALLEST_CHUNK = 16
_SPECIAL_TOKENS = 2  # that an encoder puts around a text


@dataclass(frozen=True, slots=True)
class BuildSettings:
    """Build options; ``None`` keeps the knowledge base's own value, or the default for a new one.

    Args:
        encoder: name of a sentence encoder (default ``minilm-l6-v2``).
        encoder_dtype: its numbers while it encodes (default ``bf16``).
        chunk_tokens: most tokens of a passage (default 200).
        chunk_overlap: tokens that a passage repeats of the one before (default 32).
    """

    encoder: str | None = None
    encoder_dtype: str | None = None
    chunk_tokens: int | None = None
    chunk_overlap: int | None = None


@dataclass(frozen=True, slots=True)
class SettledSettings:
    """:class:`BuildSettings` with nothing left open."""

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
        InputError: a value cannot be used, or is not that of the knowledge base.
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
        given: an encoder that is loaded already, if there is one.

    Raises:
        InputError: there is no such encoder, or it cannot read passages as long as these.
        KnowledgeBaseError: it makes other vectors than those that are there.
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
        KnowledgeBaseError: it makes other vectors than those that are there.
    """
    made = manifest.encoder
    if encoder.fingerprint != made.fingerprint:
        raise KnowledgeBaseError(
            f"encoder: {encoder.name!r} ({encoder.fingerprint}) does not fit the knowledge base {str(folder)!r}, "
            f"made with {made.name!r} ({made.fingerprint}): use that one, or index into another folder"
        )
