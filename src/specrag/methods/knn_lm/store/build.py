"""Build a kNN-LM datastore (Khandelwal et al., 2020): a model reads text, each token gives a key.

A kill at any moment leaves the datastore either as before or as after, and a rerun resumes where it stopped: entries
are written window by window beside the current generation, which is then replaced as a whole by replacing the manifest.
Windows that the current generation holds are copied from it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from specrag.artifacts import (
    BUILDING,
    GENERATIONS,
    FileRecord,
    atomic_write,
    check_target,
    fsync,
    make_folder,
    publish_generation,
    remove_generations,
)
from specrag.engine import NOTHING, Coroutine, Executor, Outputs, Session, SessionModel
from specrag.errors import InputError
from specrag.methods.knn_lm.store.datastore import Datastore, build_index, index_file
from specrag.methods.knn_lm.store.index import IndexSettings, check_size
from specrag.methods.knn_lm.store.manifest import (
    HIDDEN,
    KEYS,
    NORMS,
    VALUES,
    WINDOWS,
    DatastoreManifest,
    ModelRecord,
    WindowSettings,
)
from specrag.methods.knn_lm.store.scoring import squared_norms
from specrag.methods.knn_lm.store.windows import WINDOW_TYPE, Tokens, Window, entries_of, value_type, windows
from specrag.retrieval import Progress, Reporter, write_errors, writer_lock
from specrag.retrieval.index import Floats

#: Entries between two checkpoints: the most that a kill can cost, some seconds of reading.
CHECKPOINT = 16_384

_ENTRY_FILES = (KEYS, NORMS, VALUES, WINDOWS)
_LARGEST_HALF = float(np.finfo(np.float16).max)


@dataclass(frozen=True, slots=True)
class DatastoreReport:
    """Summary of a build.

    Attributes:
        documents: texts in the datastore.
        entries: tokens with a key.
        encoded: entries that the model had to make; the others already existed.
        bytes: size on disk.
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
        record: describes the model.
        settings: how the texts are cut; by default as in the existing datastore, or else :class:`WindowSettings`.
        indexes: approximate indexes to build too.
        progress: receives the build's progress from time to time.

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
            make_folder(folder)
            stack.enter_context(writer_lock(folder))
        build = _Build(documents, folder, record, settings, indexes, progress or _silent, stack)
        encoded = build.run(model)
    manifest = DatastoreManifest.read(folder)
    seconds = time.perf_counter() - started
    return DatastoreReport(manifest.documents, manifest.entries, encoded, manifest.bytes, seconds)


def check_folder(folder: Path) -> None:
    """Refuse a folder that holds other files.

    Raises:
        InputError: it holds other files.
        DatastoreError: it holds something else of ours, or a damaged datastore.
    """
    if DatastoreManifest.exists(folder):
        DatastoreManifest.read(folder)
    check_target(folder, "datastore")


def read_keys(model: SessionModel, tokens: Tokens, skipped: int) -> Coroutine[np.ndarray]:
    """The keys of a window's tokens after the first ``skipped``, float32 [tokens, dimension]."""
    session = Session(model)
    wanted = [NOTHING] * skipped + [Outputs(hidden=(HIDDEN,))] * (len(tokens) - skipped)
    try:
        # A session holds its newest token back, so one more is given, which is never read.
        rows = yield from session.extend([*tokens.tolist(), 0], wanted)
    finally:
        session.close()
    return np.stack([vector(row.hidden[HIDDEN]) for row in rows[skipped:]])


def vector(hidden: Any) -> np.ndarray:
    """A hidden state, in whichever type the model gives it, as float32 [dimension]."""
    if isinstance(hidden, np.ndarray):
        return hidden.astype(np.float32)
    found: np.ndarray = hidden.float().cpu().numpy()
    return found


def _silent(progress: Progress) -> None:
    """No-op progress callback."""


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
        """Publish a new generation if anything is different; returns how many entries the model has made."""
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
        """Write all windows; returns how many entries the model has made."""
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
            manifest = DatastoreManifest(
                generation=number,
                model=self.record,
                windows=self.settings,
                documents=len(self.documents),
                entries=sum(len(window.values) for window in self.windows),
                largest_norm=largest,
                indexes={name: index.values() for name, index in self.indexes.items()},
                files={name: FileRecord.of(new / name) for name in names},
            )
            publish_generation(self.folder, new, manifest)

    def _clean(self, number: int) -> None:
        """Remove older generations and leftovers of the build."""
        if self.old is not None:
            self.old.close()
        remove_generations(self.folder, keep=number)
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
        InputError: a value is too large for it, or is not a number.
    """
    if not (np.abs(keys) <= _LARGEST_HALF).all():
        worst = float(np.abs(keys).max())
        raise InputError("model", worst, "its hidden states do not fit half precision; take another model")
    return keys.astype(np.float16)


def _take_back(unpublished: Path, building: Path) -> None:
    """Resume from the files of a build that was killed between their last move and the manifest."""
    if not unpublished.is_dir():
        return
    target = building / "generation"
    # Files with a second name belong to the current generation, which must not change.
    if target.exists() or not building.is_dir() or any(p.stat().st_nlink > 1 for p in unpublished.iterdir()):
        shutil.rmtree(unpublished)
    else:
        unpublished.rename(target)


def _share(source: Path, target: Path) -> None:
    """Give the file a second name; copy it if the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


_STATE = "made-with.json"


class EntryWriter:
    """Writes the entries of a datastore in a folder of its own.

    The ``windows`` file is written last: a window that it names is on disk with all of its entries. What a killed build
    left behind is kept as long as the windows are the same ones in the same order.

    Args:
        building: holds :attr:`folder`; created if necessary. What another model or another way of cutting has left
            there is removed.
        model: makes the keys.
        settings: how the text is cut.

    Attributes:
        folder: of the files.
        entries: number so far.

    Raises:
        OSError: the disk refuses.
    """

    def __init__(self, building: Path, model: ModelRecord, settings: WindowSettings) -> None:
        self.folder = building / "generation"
        self._model = model
        self._values = value_type(model.vocab_size)
        self._widths = {KEYS: 2 * model.dimension, NORMS: 4, VALUES: self._values.itemsize}
        state = json.dumps(
            [model.fingerprint, model.dtype, model.dimension, settings.tokens, settings.context]
        ).encode()
        made_with = building / _STATE
        if not (made_with.is_file() and made_with.read_bytes() == state):
            shutil.rmtree(building, ignore_errors=True)
            building.mkdir()
            atomic_write(made_with, state)
        self.folder.mkdir(exist_ok=True)
        self._known = _whole_windows(self.folder / WINDOWS)
        self._place = 0
        self._waiting: list[tuple[bytes, int]] = []
        self.entries = 0
        self._stack = contextlib.ExitStack()
        self._files: dict[str, BinaryIO] = {}

    def skip(self, window: Window) -> bool:
        """Whether an earlier build has already written this window in this place; if so, it is kept."""
        if self._files or self._place >= len(self._known):
            return False
        known = self._known[self._place]
        if known["text"].tobytes() != window.key or not self._holds(self.entries + len(window.values)):
            return False
        self._place += 1
        self.entries += len(window.values)
        return True

    def add(self, window: Window, keys: np.ndarray) -> None:
        """Write a window's entries.

        Args:
            keys: float16 [entries, dimension].
        """
        if not self._files:
            self._cut()
        bits = np.ascontiguousarray(keys).view(np.uint16)
        norms: Floats = np.empty(len(keys), dtype=np.float32)
        squared_norms(bits, norms)
        self._files[KEYS].write(bits.tobytes())
        self._files[NORMS].write(norms.tobytes())
        self._files[VALUES].write(window.values.astype(self._values).tobytes())
        self._waiting.append((window.key, len(window.values)))
        self.entries += len(window.values)

    def checkpoint(self) -> None:
        """Wait until everything written is on disk, and record that it is."""
        if not self._files:
            return
        for name in (KEYS, NORMS, VALUES):
            self._files[name].flush()
            os.fsync(self._files[name].fileno())
        self._files[WINDOWS].write(np.array(self._waiting, dtype=WINDOW_TYPE).tobytes())
        self._files[WINDOWS].flush()
        os.fsync(self._files[WINDOWS].fileno())
        self._waiting.clear()

    def finish(self) -> float:
        """Truncate entries that belong to no window of this build; returns the largest norm of a key."""
        if not self._files:
            self._cut()
        self.checkpoint()
        self.close()
        norms = np.fromfile(self.folder / NORMS, dtype=np.float32)
        return float(np.sqrt(norms.max(), dtype=np.float64)) if len(norms) else 0.0

    def close(self) -> None:
        """Close the files; everything up to the last checkpoint stays."""
        self._stack.close()

    def _holds(self, entries: int) -> bool:
        """Whether the files are long enough for this many entries."""
        with contextlib.suppress(OSError):
            return all(
                (self.folder / name).stat().st_size >= entries * width for name, width in self._widths.items()
            )
        return False

    def _cut(self) -> None:
        """Open the files after the windows that were kept, and cut off the rest."""
        sizes = {name: self.entries * width for name, width in self._widths.items()}
        # The list first: it must never name a window that the others have lost.
        for name, size in ((WINDOWS, self._place * WINDOW_TYPE.itemsize), *sizes.items()):
            file = self._stack.enter_context((self.folder / name).open("ab"))
            file.truncate(size)
            os.fsync(file.fileno())
            self._files[name] = file
        fsync(self.folder)


def _whole_windows(path: Path) -> np.ndarray:
    """The windows that a file names; the last one may have been torn by a power failure."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        data = b""
    whole = len(data) - len(data) % WINDOW_TYPE.itemsize
    return np.frombuffer(data[:whole], dtype=WINDOW_TYPE)
