"""A compiled attention loop with its arguments, and how its work is shared out over torch's threads."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import numpy as np
import torch

from specrag.engine.team import Team, team

#: From so much work in a layer on, rows times keys times heads, threads share it (two Xeon cores: a pass of one row
#: behind 7,000 tokens takes 38 against 45 ms, of 32 requests behind 300 53 against 73; nothing is lost at 300).
SHARED_WORK = 500


class Shared(IntEnum):
    """The places of the arguments that every such loop has, 64-bit whole numbers; those of arrays are addresses.

    ``QUERIES`` and ``OUT``: ``[rows, kv_heads * group, head_dim]``, each with the numbers from row to row behind it.
    ``SCORES``: room for ``[threads, SCORE_ROWS, SCORE_KEYS]``, rows times group and keys of the largest unit. What is
    computed are units, and of each every head: ``unit * KV_HEADS + head``, shared out in ``PARTS`` from one of
    ``BORDERS`` to the next. ``NUMBER`` and ``COUNT`` are functions that tell a thread its number and how many there
    are, 0 if it is alone. Places 5 to 12 are the loop's own.
    """

    QUERIES = 0
    QUERY_STRIDE = 1
    OUT = 2
    OUT_STRIDE = 3
    KV_HEADS = 4
    SCORES = 13
    SCORE_ROWS = 14
    SCORE_KEYS = 15
    PARTS = 16
    BORDERS = 17
    NUMBER = 18
    COUNT = 19


class SharedLoop:
    """A loop and all its arguments but those that each layer has others of.

    Args:
        loop: compiled by :func:`~specrag.engine.compiling.shared_out`.
        kv_heads: of the model.
        work: rows times keys of each unit.
        room: rows times group and keys of the largest unit.
        arrays: the loop's own arguments, by their places.
        buffers: the place of the addresses of keys and values, and these, ``[layers, ...]``.
    """

    def __init__(
        self,
        loop: Any,
        kv_heads: int,
        work: np.ndarray,
        room: tuple[int, int],
        arrays: Mapping[int, np.ndarray],
        buffers: tuple[int, np.ndarray],
    ) -> None:
        self._loop = loop
        self._team, self.parts = _threads(int(work.sum()) * kv_heads)
        # Kept, since the loop has only their addresses.
        self._arrays = {
            **arrays,
            Shared.SCORES: np.empty((self.parts, *room), dtype=np.float32),
            Shared.BORDERS: borders(np.repeat(work, kv_heads), self.parts),
        }
        self._given = np.zeros(len(Shared) + 8, dtype=np.int64)
        for place, array in self._arrays.items():
            self._given[place] = array.ctypes.data
        self._given[Shared.KV_HEADS], self._given[Shared.PARTS] = kv_heads, self.parts
        self._given[Shared.SCORE_ROWS], self._given[Shared.SCORE_KEYS] = room
        if self._team is not None:
            self._given[Shared.NUMBER], self._given[Shared.COUNT] = self._team.number, self._team.count
        self._address = self._given.ctypes.data
        self._place, self._buffers = buffers
        self._first_layer, self._layer_bytes = self._buffers.ctypes.data, self._buffers.strides[0]

    def __setitem__(self, place: int, value: int) -> None:
        """Set an argument that is a number."""
        self._given[place] = value

    def run(self, layer: int, queries: torch.Tensor, out: torch.Tensor) -> None:
        """Compute a layer.

        Args:
            layer: its index.
            queries: ``[rows, heads, head_dim]`` of the whole pass, the heads side by side, already scaled.
            out: ``[rows, heads * head_dim]``, to be written.
        """
        given = self._given
        given[Shared.QUERIES], given[Shared.QUERY_STRIDE] = queries.data_ptr(), queries.stride(0)
        given[Shared.OUT], given[Shared.OUT_STRIDE] = out.data_ptr(), out.stride(0)
        given[self._place] = self._first_layer + layer * self._layer_bytes
        if self._team is None:
            self._loop.ctypes(self._address)
        else:
            self._team.run(self._loop.address, self._address, self.parts, 0)


def borders(work: np.ndarray, parts: int) -> np.ndarray:
    """Where parts of about the same work begin and end, ``[parts + 1]``, int64."""
    done = np.cumsum(work)
    inner = np.searchsorted(done, done[-1] * np.arange(1, parts) / parts, side="left") + 1
    return np.array([0, *np.minimum(inner, len(work)), len(work)], dtype=np.int64)


def _threads(work: int) -> tuple[Team | None, int]:
    """The threads for so much work, and their number; None for the calling one alone."""
    threads = torch.get_num_threads()
    found = team() if work >= SHARED_WORK and threads > 1 else None
    return found, threads if found is not None else 1
