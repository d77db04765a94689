"""Attention by the compiled CPU loops: which segments they serve, and the arguments that they take.

:class:`CompiledRows` serves segments of few rows; :class:`InvariantRows` serves a whole pass in batch-invariant mode,
where a row has the same bits whatever else is in its pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from specrag.engine.attention.segments import SegmentPlan
from specrag.engine.cpu import bf16_attention, row_attention
from specrag.engine.cpu.row_attention import BLOCK_KEYS, CHAIN_ROWS, AttendArguments, PathArguments
from specrag.engine.cpu.row_attention import LoopArguments as At
from specrag.engine.cpu.threads import LoopThreads
from specrag.engine.kv import KeyValueShape

#: From this much work in a layer on (rows times keys times heads), threads share it (two Xeon cores: a pass of one row
#: behind 7,000 tokens takes 38 against 45 ms, of 32 requests behind 300 53 against 73; nothing is lost at 300).
SHARED_WORK = 500


class ThreadedLoop:
    """A compiled attention loop with its arguments, run on torch's OpenMP threads; each layer resets a few of them.

    Args:
        loop: compiled by :func:`~specrag.engine.compiling.threaded`.
        kv_heads: of the model.
        work: rows times keys of each unit.
        room: float32 numbers that a thread needs for scores, ``[rows times group, keys]`` of the largest unit or more.
        arrays: the loop's own arguments, by argument place.
        buffers: the argument place for the addresses of keys and values, and these addresses, ``[layers, ...]``.
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
        self._threads = LoopThreads(shared=int(work.sum()) * kv_heads >= SHARED_WORK)
        self.parts = self._threads.size
        # Kept alive, since the loop has only their addresses.
        self._arrays = {
            **arrays,
            At.SCORES: np.empty((self.parts, *room), dtype=np.float32),
            At.BORDERS: borders(np.repeat(work, kv_heads), self.parts),
        }
        self._given = np.zeros(len(At) + 8, dtype=np.int64)
        for place, array in self._arrays.items():
            self._given[place] = array.ctypes.data
        self._given[At.KV_HEADS], self._given[At.PARTS] = kv_heads, self.parts
        self._given[At.SCORE_ROWS], self._given[At.SCORE_KEYS] = room
        self._given[At.NUMBER], self._given[At.COUNT] = self._threads.number, self._threads.count
        self._address = self._given.ctypes.data
        self._place, self._buffers = buffers
        self._first_layer, self._layer_bytes = self._buffers.ctypes.data, self._buffers.strides[0]

    def __setitem__(self, place: int, value: int) -> None:
        """Set an argument that is a number."""
        self._given[place] = value

    def run(self, layer: int, queries: torch.Tensor, out: torch.Tensor) -> None:
        """Compute one layer.

        Args:
            layer: its index.
            queries: ``[rows, heads, head_dim]`` of the whole pass, the heads side by side, already scaled.
            out: ``[rows, heads * head_dim]``, to be written.
        """
        given = self._given
        given[At.QUERIES], given[At.QUERY_STRIDE] = (
            queries.data_ptr(),
            queries.stride(0),
        )
        given[At.OUT], given[At.OUT_STRIDE] = out.data_ptr(), out.stride(0)
        given[self._place] = self._first_layer + layer * self._layer_bytes
        self._threads.run(self._loop, self._address)


def borders(work: np.ndarray, parts: int) -> np.ndarray:
    """Split units into parts of about equal work: where the parts begin and end, ``[parts + 1]``, int64."""
    done = np.cumsum(work)
    inner = np.searchsorted(done, done[-1] * np.arange(1, parts) / parts, side="left") + 1
    return np.array([0, *np.minimum(inner, len(work)), len(work)], dtype=np.int64)


#: A segment with more rows times keys is left to torch, whose products use all cores (two Zen 4 cores: 5 rows behind
#: 2,000 keys take 0.45 ms either way).
MOST_WORK = 4096

#: With 8-bit keys, segments of up to this many rows are served whatever the context, since torch's products need a
#: copy of all keys (4 rows behind 7,000 keys: a pass of SmolLM2 takes 37 against 58 ms; 16 rows behind 1,000: 28
#: against 23).
FEW_ROWS = 6

#: Without matrix tiles, segments of up to this many rows are served whatever the context: of one extent, and of several
#: extents, whose scores torch would have to join (two Zen 4 cores, SmolLM2 behind 7,200 keys: a pass of 2 rows takes
#: 38 ms instead of 46, with extents shared by a fork 38 instead of 69 to 83; from 6 rows, or 14 with several extents,
#: torch is as fast).
FEW_OWN, FEW_JOINED = 4, 8


def has_loops(shape: KeyValueShape) -> bool:
    """Whether compiled loops exist for this kind of keys and values (CPU, bf16)."""
    return shape.device.type == "cpu" and shape.dtype == torch.bfloat16


def compile_loops(shape: KeyValueShape, group: int) -> None:
    """Compile the loops, or load them from the disk cache, so that no pass waits for them."""
    numbers = np.zeros((2, shape.head_dim), dtype=np.uint16)
    places, none = np.array([numbers.ctypes.data]), np.zeros(0, dtype=np.int64)
    row_attention.write(shape.head_dim, shape.int8)(places[0], places[0], 0, 1, none, none, none, none)
    row_attention.attend(shape.head_dim, group, shape.int8)


def serves(plan: SegmentPlan, shared: bool, matrix_tiles: bool) -> bool:
    """Whether the loops are faster than torch for this segment.

    Args:
        shared: whether another segment of the pass also reads one of its extents, which torch then reads only once.
        matrix_tiles: whether torch multiplies in matrix tiles.
    """
    keys = plan.used + sum(rows for _, rows in plan.runs)
    alone = 1 if matrix_tiles else FEW_JOINED if plan.runs else FEW_OWN
    small = plan.count * keys <= MOST_WORK or (plan.count <= alone and not shared)
    few = plan.own.shape.int8 and plan.count <= FEW_ROWS
    return (small or few) and plan.written + plan.count <= row_attention.TREE_ROWS


class Writer:
    """Writes a pass's keys and values.

    Args:
        plans: all segments of the pass, in row order.
    """

    def __init__(self, plans: Sequence[SegmentPlan]) -> None:
        self._shape = plans[0].own.shape
        self._run = row_attention.write(self._shape.head_dim, self._shape.int8)
        self._buffers = np.array([plan.own.addresses for plan in plans]).T.copy()  # [layers, segments]
        self._strides = np.array([plan.own.capacity * self._shape.row_bytes for plan in plans])
        self._offsets = np.array([plan.offset for plan in plans])
        self._counts = np.array([plan.count for plan in plans])

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write keys and values, each ``[rows, kv_heads, head_dim]`` with any row stride, behind their sessions."""
        shape = self._shape
        if keys.stride() != values.stride() or keys.stride()[1:] != (shape.head_dim, 1):
            keys, values = keys.contiguous(), values.contiguous()
        self._run(
            keys.data_ptr(), values.data_ptr(), keys.stride(0), shape.kv_heads,
            self._buffers[layer], self._strides, self._offsets, self._counts,
        )  # fmt: skip


class CompiledRows:
    """Attention of the segments of a pass that the loops serve.

    Args:
        plans: the segments; :func:`serves` holds for each.
        rows: of the whole pass.
        group: query heads for each key/value head.
    """

    def __init__(self, plans: Sequence[SegmentPlan], rows: int, group: int) -> None:
        shape = plans[0].own.shape
        pieces = [[*plan.runs, (plan.own, plan.used)] for plan in plans]
        flat = [piece for each in pieces for piece in each]
        buffers = np.array([extent.addresses for extent, _ in flat]).T.copy()  # [layers, pieces]
        masks = np.zeros(rows, dtype=np.uint64)
        for plan in plans:
            masks[plan.rows] = _masks(plan)
        keys = np.array([sum(size for _, size in each) for each in pieces])
        counts = np.array([plan.count for plan in plans])
        arrays: dict[int, np.ndarray] = {
            AttendArguments.STARTS: np.array([plan.rows.start for plan in plans]),
            AttendArguments.COUNTS: counts,
            AttendArguments.FIRSTS: np.cumsum([0, *map(len, pieces)]),
            AttendArguments.SEEN: np.array([plan.tree_start for plan in plans]),
            AttendArguments.HEAD_BYTES: np.array([extent.capacity * shape.row_bytes for extent, _ in flat]),
            AttendArguments.SIZES: np.array([size for _, size in flat]),
            AttendArguments.MASKS: masks,
        }
        loop = row_attention.attend(shape.head_dim, group, shape.int8)
        room = int(counts.max()) * group, int(keys.max())
        self.loop = ThreadedLoop(
            loop, shape.kv_heads, counts * keys, room, arrays, (AttendArguments.BUFFERS, buffers)
        )

    def attend(self, layer: int, queries: torch.Tensor, out: torch.Tensor) -> None:
        """Write these segments' rows of ``out``.

        Args:
            queries: ``[rows, heads, head_dim]`` of the whole pass, the heads side by side, already scaled.
            out: ``[rows, heads * head_dim]``.
        """
        self.loop.run(layer, queries, out)


def _masks(plan: SegmentPlan) -> np.ndarray:
    """For each row, a bit mask of the tree rows that it sees; the lowest bit is the first row."""
    if plan.ancestors is None:
        return np.array([(2 << row) - 1 for row in range(plan.count)], dtype=np.uint64)
    bits = np.left_shift(np.uint64(1), np.arange(plan.ancestors.shape[1], dtype=np.uint64))
    sums: np.ndarray = (plan.ancestors * bits).sum(axis=1, dtype=np.uint64)
    return sums


def has_bf16_products(shape: KeyValueShape) -> bool:
    """Whether batch-invariant attention of such keys and values is computed by bf16 products, else in float32."""
    return not shape.int8 and bf16_attention.available(shape.head_dim)


class InvariantRows:
    """Batch-invariant attention of all segments of a pass.

    Args:
        plans: the segments; each session's keys and values lie in one own extent.
        group: query heads for each key/value head.
    """

    def __init__(self, plans: Sequence[SegmentPlan], group: int) -> None:
        shape = plans[0].own.shape
        units = [unit for plan in plans for unit in _units(plan)]
        firsts, counts, seen, paths = zip(*units, strict=True)
        owners = [plan for plan in plans for _ in _units(plan)]
        buffers = np.array([plan.own.addresses for plan in owners]).T.copy()  # [layers, units]
        rows = np.array(counts)
        keys = np.array([behind + len(path) for behind, path in zip(seen, paths, strict=True)]) + rows - 1
        arrays: dict[int, np.ndarray] = {
            PathArguments.FIRSTS: np.array(firsts),
            PathArguments.COUNTS: rows,
            PathArguments.HEAD_BYTES: np.array([plan.own.capacity * shape.row_bytes for plan in owners]),
            PathArguments.SEEN: np.array(seen),
            PathArguments.PATH_BORDERS: np.cumsum([0, *map(len, paths)]),
            PathArguments.PATH: np.concatenate(paths),
        }
        self._keys = max(plan.used for plan in plans)
        most_rows = int(rows.max()) * group
        if has_bf16_products(shape):
            fused = bf16_attention.is_fused()
            loop = bf16_attention.attend_paths(shape.head_dim, group, fused)
            room = bf16_attention.room(most_rows, self._keys)
        else:
            loop = row_attention.attend_paths(shape.head_dim, group, shape.int8)
            room = most_rows, self._keys + BLOCK_KEYS - 1
        self._loop = ThreadedLoop(
            loop, shape.kv_heads, rows * keys, room, arrays, (PathArguments.BUFFERS, buffers)
        )

    def attend(self, layer: int, queries: torch.Tensor, out: torch.Tensor, window: int | None) -> None:
        """Write ``out``.

        Args:
            queries: ``[rows, heads, head_dim]`` of the whole pass, the heads side by side, already scaled.
            out: ``[rows, heads * head_dim]``.
            window: a row sees this many positions, itself included; ``None`` for all.
        """
        self._loop[PathArguments.WINDOW] = self._keys if window is None else window
        self._loop.run(layer, queries, out)


def _units(plan: SegmentPlan) -> list[tuple[int, int, int, np.ndarray]]:
    """Each unit's first row in the pass, number of rows, keys that the first of them sees, and path behind those."""
    first, none = plan.rows.start, np.zeros(0, dtype=np.int64)
    if plan.ancestors is None:
        starts = range(0, plan.count, CHAIN_ROWS)
        return [
            (first + start, min(CHAIN_ROWS, plan.count - start), plan.offset + start + 1, none)
            for start in starts
        ]
    return [
        (first + row, 1, plan.tree_start, plan.tree_start + np.flatnonzero(plan.ancestors[row]))
        for row in range(plan.count)
    ]
