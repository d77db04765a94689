"""Makes a kNN-LM datastore (Khandelwal et al., 2020): reads text with a model, keeps a key for each token.

A kill at any moment leaves the datastore as before or as after, and a rerun goes on where it was: entries are written
window by window beside the current generation, then the whole is put in its place by replacing the manifest. Windows
that the current generation holds are copied from it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specrag.engine.executor import Executor
from specrag.engine.outputs import NOTHING, Outputs
from specrag.engine.passes import Coroutine, SessionModel
from specrag.engine.session import Session
from specrag.errors import InputError
from specrag.retrieval.disk import checksum, sync, write_errors
from specrag.retrieval.generation import remove_others
from specrag.retrieval.knn_datastore import Datastore, build_index, index_file
from specrag.retrieval.knn_index import IndexSettings, check_size
from specrag.retrieval.knn_manifest import (
    HIDDEN,
    KEYS,
    NORMS,
    VALUES,
    WINDOWS,
    DatastoreManifest,
    ModelRecord,
    WindowSettings,
)
from specrag.retrieval.knn_windows import WINDOW_TYPE, Tokens, entries_of, windows
from specrag.retrieval.knn_writer import EntryWriter
from specrag.retrieval.manifest import BUILDING, GENERATIONS, MANIFEST, FileRecord
from specrag.retrieval.progress import Progress, Reporter
from specrag.retrieval.writer_lock import LOCK, writer_lock

#: Entries between two checkpoints: what a kill can cost, some seconds of reading.
CHECKPOINT = 16_384

_ENTRY_FILES = (KEYS, NORMS, VALUES, WINDOWS)
_LARGEST_HALF = float(np.finfo(np.float16).max)


@dataclass(frozen=True, slots=True)
class DatastoreReport:
    """What a build has done.

    Attributes:
        documents: texts in the datastore.
        entries: tokens with a key.
        encoded: entries that the model had to make; the others were there.
        bytes: size on the disk.
        seconds: wall-clock time.
    """

    documents: int
    entries: int
    encoded: int
    bytes: int
    seconds: float


def build_datastore(
    documents: Sequence[Tokens],
    folder: Path,
    model: SessionModel,
    record: ModelRecord,
    settings: WindowSettings | None = None,
    indexes: Sequence[IndexSettings] = (),
    progress: Reporter | None = None,
) -> DatastoreReport:
    """Make the datastore of some texts, or bring one up to date.

    Args:
        documents: the tokens of each text, int32, in a fixed order.
        folder: a new or empty folder, or one made by this function.
        model: reads the texts.
        record: what the model is.
        settings: how the texts are cut; by default as the datastore is, or :class:`WindowSettings`.
        indexes: approximate indexes to build too.
        progress: told now and then how far the build is.

    Raises:
        InputError: there is no text of two tokens, a setting cannot be used or is not that of the datastore.
        DatastoreError: the datastore is damaged, or was made with another model.
        KnowledgeBaseError: another process writes there, or the disk refuses.
    """
    started = time.perf_counter()
    folder = Path(folder).expanduser()
    if not entries_of(documents):
        raise InputError("path", f"{len(documents)} documents", "give a text of at least two tokens")
    check_folder(folder)
    with contextlib.ExitStack() as stack:
        with write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(writer_lock(folder))
        build = _Build(documents, folder, record, settings, indexes, progress or _silent, stack)
        encoded = build.run(model)
    manifest = DatastoreManifest.read(folder)
    seconds = time.perf_counter() - started
    return DatastoreReport(manifest.documents, manifest.entries, encoded, manifest.bytes, seconds)


def check_folder(folder: Path) -> None:
    """Write into no folder that holds somebody's files.

    Raises:
        InputError: it does.
        DatastoreError: it holds something else of ours, or a damaged datastore.
    """
    if DatastoreManifest.exists(folder):
        DatastoreManifest.read(folder)
    elif folder.is_dir():
        ours = {BUILDING, GENERATIONS, LOCK, f".{MANIFEST}.new"}
        others = sorted(path.name for path in folder.iterdir() if path.name not in ours)
        if others:
            remedy = f"it holds other files such as {others[0]!r}; give a new or empty folder"
            raise InputError("datastore", str(folder), remedy)
    elif folder.exists():
        raise InputError("datastore", str(folder), "it is a file; give a folder")


def read_keys(model: SessionModel, tokens: Tokens, skipped: int) -> Coroutine[np.ndarray]:
    """The keys of a window's tokens behind the first ``skipped``, float32 [tokens, dimension]."""
    session = Session(model)
    wanted = [NOTHING] * skipped + [Outputs(hidden=(HIDDEN,))] * (len(tokens) - skipped)
    try:
        # A session holds its newest token back, so that one more is given; it is never read.
        rows = yield from session.extend([*tokens.tolist(), 0], wanted)
    finally:
        session.close()
    return np.stack([vector(row.hidden[HIDDEN]) for row in rows[skipped:]])


def vector(hidden: Any) -> np.ndarray:
    """A hidden state, in whatever type the model gives it, as float32 [dimension]."""
    if isinstance(hidden, np.ndarray):
        return hidden.astype(np.float32)
    found: np.ndarray = hidden.float().cpu().numpy()
    return found


def _silent(progress: Progress) -> None:
    """Show nothing."""


class _Build:
    """One run of :func:`build_datastore`."""

    def __init__(
        self,
        documents: Sequence[Tokens],
        folder: Path,
        record: ModelRecord,
        settings: WindowSettings | None,
        indexes: Sequence[IndexSettings],
        report: Reporter,
        stack: contextlib.ExitStack,
    ) -> None:
        self.documents = documents
        self.folder = folder
        self.record = record
        self.report = report
        self.stack = stack
        self.old: Datastore | None = None
        if DatastoreManifest.exists(folder):
            self.old = stack.enter_context(Datastore.open(folder))
            self.old.check_model(record)
            made = self.old.manifest.windows
            if settings is not None and settings != made:
                remedy = (
                    f"the datastore was made with {asdict(made)}; leave it out, or build into another folder"
                )
                raise InputError("windows", asdict(settings), remedy)
            settings = made
        self.settings = settings or WindowSettings()
        asked = {index.name: index for index in indexes}
        for index in asked.values():
            check_size(index, entries_of(documents))
        kept = {} if self.old is None else self.old.index_settings()
        self.indexes = {**kept, **asked}
        self.windows = list(windows(documents, self.settings))

    def run(self, model: SessionModel) -> int:
        """Publish a new generation, if anything is different; how many entries the model has made."""
        old = self.old
        number = 1 if old is None else old.manifest.generation + 1
        building = self.folder / BUILDING
        same = old is not None and self._is_current(old)
        if old is not None and same and self.indexes == old.index_settings():
            self._clean(old.manifest.generation)
            return 0
        with write_errors(self.folder):
            _take_back(self.folder / GENERATIONS / f"{number:06d}", building)
        if old is not None:
            old.manifest.verify(self.folder)
        if old is not None and same:
            encoded, new, largest = 0, building / "links", old.manifest.largest_norm
            with write_errors(self.folder):
                shutil.rmtree(new, ignore_errors=True)
                new.mkdir(parents=True)
                for name in _ENTRY_FILES:
                    _share(old.folder / name, new / name)
        else:
            with write_errors(self.folder):
                writer = EntryWriter(building, self.record, self.settings)
            new, encoded = writer.folder, self._write(writer, model)
            with write_errors(self.folder):
                largest = writer.finish()
        self._publish(number, new, largest)
        self._clean(number)
        return encoded

    def _is_current(self, old: Datastore) -> bool:
        """Whether the current generation holds exactly these windows."""
        known = np.fromfile(old.folder / WINDOWS, dtype=WINDOW_TYPE)["text"]
        return [key.tobytes() for key in known] == [window.key for window in self.windows]

    def _write(self, writer: EntryWriter, model: SessionModel) -> int:
        """Write all windows; how many entries the model has made."""
        known: Mapping[bytes, tuple[int, int]] = {} if self.old is None else _places(self.old)
        total, encoded, since = entries_of(self.documents), 0, 0
        executor = Executor()
        self.stack.callback(executor.close)
        self.stack.callback(writer.close)
        for window in self.windows:
            self.report(Progress("reading text", writer.entries, total))
            if writer.skip(window):
                continue
            place = known.get(window.key)
            if place is not None and self.old is not None:
                keys = self.old.halves[place[0] : place[0] + place[1]].view(np.float16)
            else:
                reading = read_keys(model, window.tokens, window.skipped)
                keys = _halves(executor.run(executor.submit(reading)))
                encoded += len(keys)
            with write_errors(self.folder):
                writer.add(window, keys)
                since += len(keys)
                if since >= CHECKPOINT:
                    writer.checkpoint()
                    since = 0
        self.report(Progress("reading text", total, total))
        return encoded

    def _publish(self, number: int, new: Path, largest: float) -> None:
        for place, index in enumerate(self.indexes.values()):
            self.report(Progress("indexing", place, len(self.indexes)))
            with write_errors(self.folder):
                build_index(new, self.record.dimension, largest, index)
        if self.indexes:
            self.report(Progress("indexing", len(self.indexes), len(self.indexes)))
        names = [*_ENTRY_FILES, *(index_file(name) for name in self.indexes)]
        with write_errors(self.folder):
            for stale in set(os.listdir(new)) - set(names):
                (new / stale).unlink()
            for name in names:
                sync(new / name)
            sync(new)
            manifest = DatastoreManifest(
                generation=number,
                model=self.record,
                windows=self.settings,
                documents=len(self.documents),
                entries=sum(len(window.values) for window in self.windows),
                largest_norm=largest,
                indexes={name: index.values() for name, index in self.indexes.items()},
                files={name: FileRecord((new / name).stat().st_size, checksum(new / name)) for name in names},
            )
            target = manifest.generation_folder(self.folder)
            target.parent.mkdir(exist_ok=True)
            shutil.rmtree(target, ignore_errors=True)
            new.rename(target)
            sync(target.parent)
            manifest.write(self.folder)

    def _clean(self, number: int) -> None:
        """Remove what is of no use any more."""
        if self.old is not None:
            self.old.close()
        remove_others(self.folder, number)
        shutil.rmtree(self.folder / BUILDING, ignore_errors=True)


def _places(old: Datastore) -> dict[bytes, tuple[int, int]]:
    """First entry and number of entries of each window of a datastore."""
    known = np.fromfile(old.folder / WINDOWS, dtype=WINDOW_TYPE)
    firsts = np.concatenate([[0], np.cumsum(known["entries"])])
    return {
        row["text"].tobytes(): (int(first), int(row["entries"]))
        for row, first in zip(known, firsts[:-1], strict=True)
    }


def _halves(keys: np.ndarray) -> np.ndarray:
    """Half precision, float16 of the same shape.

    Raises:
        InputError: a number is too large for it, or is none.
    """
    if not (np.abs(keys) <= _LARGEST_HALF).all():
        worst = float(np.abs(keys).max())
        raise InputError("model", worst, "its hidden states do not fit half precision; take another model")
    return keys.astype(np.float16)


def _take_back(unpublished: Path, building: Path) -> None:
    """Go on with the files of a build that was killed between their last move and the manifest."""
    if not unpublished.is_dir():
        return
    target = building / "generation"
    # Files with a second name are those of the current generation, which nothing may change.
    if target.exists() or not building.is_dir() or any(p.stat().st_nlink > 1 for p in unpublished.iterdir()):
        shutil.rmtree(unpublished)
    else:
        unpublished.rename(target)


def _share(source: Path, target: Path) -> None:
    """The same file under another name; a copy where the disk knows no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
