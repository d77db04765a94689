"""LRU cache of passages and vectors fetched from a remote store."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from specrag.checks import check_whole
from specrag.retrieval.index.scoring import Bools, Floats, Longs
from specrag.retrieval.passage import Passage
from specrag.retrieval.stores.base import Fetched


class SeenPassages:
    """A bounded number of passages and vectors; the least recently used are dropped. Thread-safe.

    Memory: at most ``capacity`` passages, and ``4 * dimension * capacity`` bytes of vectors, used as they fill up.

    Args:
        capacity: the most passages kept, at least 1.
        dimension: number of elements of a vector.
    """

    def __init__(self, capacity: int, dimension: int) -> None:
        check_whole("remembered", capacity)
        self.capacity = capacity
        self._vectors = np.empty((capacity, dimension), dtype=np.float32)
        self._passages: list[Passage | None] = []
        self._rows: OrderedDict[int, int] = OrderedDict()  # from id to row, most recently used last
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, several: Sequence[Fetched]) -> None:
        """Add passages; the last one becomes the most recently used."""
        with self._lock:
            for fetched in several:
                row = self._row(fetched.passage.id)
                self._vectors[row] = fetched.vector
                self._passages[row] = fetched.passage

    def _row(self, id: int) -> int:
        if id in self._rows:
            self._rows.move_to_end(id)
        elif len(self._rows) < self.capacity:
            self._rows[id] = len(self._passages)
            self._passages.append(None)
        else:
            _, row = self._rows.popitem(last=False)
            self._rows[id] = row
        return self._rows[id]

    def vectors(self, ids: Longs, out: Floats) -> Bools:
        """Copy the vectors of these passages into the same rows of ``out``; returns which are known, bool [ids]."""
        with self._lock:
            rows = np.array([self._rows.get(id, -1) for id in ids.tolist()], dtype=np.int64)
            known: Bools = rows >= 0
            out[known] = self._vectors[rows[known]]
            for id in ids[known].tolist():
                self._rows.move_to_end(id)
        return known

    def passages(self, ids: Sequence[int]) -> list[Passage | None]:
        """These passages, with None for each that is not known."""
        with self._lock:
            found: list[Passage | None] = []
            for id in ids:
                row = self._rows.get(id)
                found.append(None if row is None else self._passages[row])
                if row is not None:
                    self._rows.move_to_end(id)
        return found
