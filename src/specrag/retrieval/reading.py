"""The first half of a build: documents to the passages of a new generation."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from specrag.errors import InputError
from specrag.retrieval.changes import Changes, Entry, skipped_by_reader
from specrag.retrieval.chunking import Chunker
from specrag.retrieval.disk import write_errors
from specrag.retrieval.documents import Document, read_file
from specrag.retrieval.files import Skipped
from specrag.retrieval.passage_store import (
    PASSAGES,
    PassageStore,
    PassageWriter,
    StoredFile,
    StoredPassage,
    clean_text,
    metadata_json,
)
from specrag.retrieval.progress import Counts, Progress, Reporter
from specrag.retrieval.reading_limits import ReadingLimits

_RECENT_NS = 2 * 10**9


class Reader:
    """Reads what has changed and copies the rest.

    Args:
        folder: the knowledge base.
        target: folder of the new generation; made when the first difference is found.
        old: passages of the current generation; None if there is none.
        chunker: gives the chunker, which takes a while to load; called when the first document needs it.
        counts: is added to.
        limits: of each document.
    """

    def __init__(
        self,
        folder: Path,
        target: Path,
        old: PassageStore | None,
        chunker: Callable[[], Chunker],
        counts: Counts,
        limits: ReadingLimits,
    ) -> None:
        self.folder = folder
        self.target = target
        self.old = old
        self.chunker = chunker
        self.counts = counts
        self.limits = limits
        self._waiting: list[tuple[StoredFile, list[StoredPassage] | None]] = []
        self._writer: PassageWriter | None = None

    def write(self, changes: Changes, report: Reporter) -> PassageWriter | None:
        """Write the passages file; None if nothing has changed after all, and nothing is written.

        Raises:
            InputError: no document could be read.
            KnowledgeBaseError: the disk refuses.
        """
        total = len(changes.entries)
        different = changes.renamed or bool(changes.removed)
        try:
            for number, entry in enumerate(changes.entries):
                report(Progress("reading", number, total))
                different = self._take(entry) or different
                if different:
                    self._flush()
            report(Progress("reading", total, total))
            if self._writer is None and self.old is not None:
                return None
            if self._writer is None or not self._writer.passages:
                raise self._nothing(total)
            with write_errors(self.folder):
                self._writer.close()
        except BaseException:
            if self._writer is not None:
                self._writer.abandon()
            raise
        return self._writer

    def _take(self, entry: Entry) -> bool:
        """Put a document in line to be written; whether it is another one than before."""
        if not entry.changed:
            assert entry.known is not None
            self.counts.unchanged += 1
            file = replace(entry.known, path=entry.path, source=entry.source)
            if entry.found is not None:
                file = replace(file, mtime_ns=_reliable(entry.found.mtime_ns))
            self._waiting.append((file, None))
            return False
        assert entry.found is not None
        read = read_file(entry.found, self.limits)
        passages = [passage for document in read.documents for passage in self._cut(document)]
        same = entry.known is not None and entry.known.sha256 == read.sha256
        if not passages or same:
            skipped = read.skipped
            if not skipped and not passages:
                skipped = (Skipped(entry.source, "it holds no text"),)
            self.counts.skipped += skipped if same else skipped_by_reader(entry, skipped)
            if entry.known is not None:
                self.counts.unchanged += 1
                self._waiting.append((replace(entry.known, source=entry.source), None))
            return False
        self.counts.skipped += read.skipped
        if entry.known is None:
            self.counts.added += 1
        else:
            self.counts.updated += 1
        found = entry.found
        file = StoredFile(entry.path, entry.source, found.size, _reliable(found.mtime_ns), read.sha256)
        self._waiting.append((file, passages))
        return True

    def _cut(self, document: Document) -> list[StoredPassage]:
        metadata = metadata_json(document.metadata)
        return [
            StoredPassage(clean_text(chunk.title), clean_text(chunk.place), clean_text(chunk.text), metadata)
            for chunk in self.chunker().chunk(document)
        ]

    def _flush(self) -> None:
        with write_errors(self.folder):
            if self._writer is None:
                self.target.mkdir(parents=True)
                self._writer = PassageWriter(self.target / PASSAGES)
            for file, passages in self._waiting:
                if passages is None:
                    assert self.old is not None
                    passages = self.old.copies(file)
                self._writer.add(file, passages)
        self._waiting.clear()

    def _nothing(self, documents: int) -> InputError:
        first = self.counts.skipped[0]
        remedy = f"none of the documents can be read, first {first.source}: {first.reason}"
        return InputError("path", f"{documents} documents", remedy)


def _reliable(mtime_ns: int) -> int:
    """A time stamp to compare with later; 0, which makes the next build look into the file, if it is so recent
    that another change might carry the same one.
    """
    return 0 if time.time_ns() - mtime_ns < _RECENT_NS else mtime_ns
