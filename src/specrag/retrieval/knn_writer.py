"""Files of entries that outlive a kill: grown window by window, cut back to the last one that is known to be whole."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import BinaryIO

import numpy as np

from specrag.retrieval.disk import replace_file, sync
from specrag.retrieval.knn_manifest import KEYS, NORMS, VALUES, WINDOWS, ModelRecord, WindowSettings
from specrag.retrieval.knn_scoring import squared_norms
from specrag.retrieval.knn_windows import WINDOW_TYPE, Window, value_type
from specrag.retrieval.scoring import Floats

_STATE = "made-with.json"


class EntryWriter:
    """Writes the entries of a datastore in a folder of its own.

    The ``windows`` file comes last: a window that it names is on the disk with all of its entries. What a killed build
    has left is kept as long as the windows are the same ones in the same order.

    Args:
        building: holds :attr:`folder`; made if need be. What another model or another way of cutting has left there
            is removed.
        model: that makes the keys.
        settings: how the text is cut.

    Attributes:
        folder: of the files.
        entries: so far.

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
            replace_file(made_with, state)
        self.folder.mkdir(exist_ok=True)
        self._known = _whole_windows(self.folder / WINDOWS)
        self._place = 0
        self._waiting: list[tuple[bytes, int]] = []
        self.entries = 0
        self._stack = contextlib.ExitStack()
        self._files: dict[str, BinaryIO] = {}

    def skip(self, window: Window) -> bool:
        """Whether an earlier build has written this window in this place already; then it is kept."""
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
        """Wait until everything written is on the disk, and note that it is."""
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
        """Everything is written: cut off what belongs to no window of this build; the largest norm of a key."""
        if not self._files:
            self._cut()
        self.checkpoint()
        self.close()
        norms = np.fromfile(self.folder / NORMS, dtype=np.float32)
        return float(np.sqrt(norms.max(), dtype=np.float64)) if len(norms) else 0.0

    def close(self) -> None:
        """Let the files go; what a checkpoint has noted stays."""
        self._stack.close()

    def _holds(self, entries: int) -> bool:
        """Whether the files are long enough for this many entries."""
        with contextlib.suppress(OSError):
            return all(
                (self.folder / name).stat().st_size >= entries * width for name, width in self._widths.items()
            )
        return False

    def _cut(self) -> None:
        """Open the files behind the windows that were kept, and cut off the rest."""
        sizes = {name: self.entries * width for name, width in self._widths.items()}
        # The list first: it must never name a window that the others have lost.
        for name, size in ((WINDOWS, self._place * WINDOW_TYPE.itemsize), *sizes.items()):
            file = self._stack.enter_context((self.folder / name).open("ab"))
            file.truncate(size)
            os.fsync(file.fileno())
            self._files[name] = file
        sync(self.folder)


def _whole_windows(path: Path) -> np.ndarray:
    """The windows that a file names; the last one may have been torn by a power failure."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        data = b""
    whole = len(data) - len(data) % WINDOW_TYPE.itemsize
    return np.frombuffer(data[:whole], dtype=WINDOW_TYPE)
