"""The segments of a pass whose attention the compiled loops compute, and what the loops need to know of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from specrag.engine import attention_kernel
from specrag.engine.attention_kernel import AttendArguments as At
from specrag.engine.kv import KeyValueShape
from specrag.engine.segment_plan import SegmentPlan
from specrag.engine.shared_loop import SharedLoop

#: A segment of more rows times keys is left to torch, whose products use all cores (two Zen 4 cores: 5 rows behind
#: 2,000 keys take 0.45 ms either way).
MOST_WORK = 4096

#: Of keys in 8 bits, so many rows are served behind any context, since torch's products need a copy of them all (4 rows
#: behind 7,000 keys: a pass of SmolLM2 takes 37 against 58 ms; 16 rows behind 1,000: 28 against 23).
FEW_ROWS = 6

#: Without matrix tiles so many rows are served behind any context, more of them where torch would have to join the
#: scores of several extents (two Zen 4 cores, SmolLM2 behind 7,200 keys: a pass of 2 rows takes 38 ms in place of 46,
#: of extents that a fork shares 38 in place of 69 to 83; from 6 rows, 14 of several extents, torch is as fast).
FEW_OWN, FEW_JOINED = 4, 8


def available(shape: KeyValueShape) -> bool:
    """Whether the loops serve this kind of keys and values."""
    return shape.device.type == "cpu" and shape.dtype == torch.bfloat16


def prepare(shape: KeyValueShape, group: int) -> None:
    """Compile the loops, or fetch them from the disk, so that no pass waits for it."""
    numbers = np.zeros((2, shape.head_dim), dtype=np.uint16)
    places, none = np.array([numbers.ctypes.data]), np.zeros(0, dtype=np.int64)
    attention_kernel.write(shape.head_dim, shape.int8)(places[0], places[0], 0, 1, none, none, none, none)
    attention_kernel.attend(shape.head_dim, group, shape.int8)


def serves(plan: SegmentPlan, shared: bool, matrix_tiles: bool) -> bool:
    """Whether the loops are the faster way for this segment.

    Args:
        shared: whether another segment of the pass reads one of its extents too: torch's products then read it once.
        matrix_tiles: whether torch multiplies in matrix tiles.
    """
    keys = plan.used + sum(rows for _, rows in plan.runs)
    alone = 1 if matrix_tiles else FEW_JOINED if plan.runs else FEW_OWN
    small = plan.count * keys <= MOST_WORK or (plan.count <= alone and not shared)
    few = plan.own.shape.int8 and plan.count <= FEW_ROWS
    return (small or few) and plan.written + plan.count <= attention_kernel.TREE_ROWS


class Writer:
    """Writes a pass's keys and values.

    Args:
        plans: all segments of the pass, in row order.
    """

    def __init__(self, plans: Sequence[SegmentPlan]) -> None:
        self._shape = plans[0].own.shape
        self._run = attention_kernel.write(self._shape.head_dim, self._shape.int8)
        self._buffers = np.array([plan.own.addresses for plan in plans]).T.copy()  # [layers, segments]
        self._strides = np.array([plan.own.capacity * self._shape.row_bytes for plan in plans])
        self._offsets = np.array([plan.offset for plan in plans])
        self._counts = np.array([plan.count for plan in plans])

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write ``[rows, kv_heads, head_dim]`` each, of whatever distance from row to row, behind their sessions."""
        shape = self._shape
        if keys.stride() != values.stride() or keys.stride()[1:] != (shape.head_dim, 1):
            keys, values = keys.contiguous(), values.contiguous()
        self._run(
            keys.data_ptr(), values.data_ptr(), keys.stride(0), shape.kv_heads,
            self._buffers[layer], self._strides, self._offsets, self._counts,
        )  # fmt: skip


class CompiledRows:
    """Attention of some of a pass's segments.

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
            At.STARTS: np.array([plan.rows.start for plan in plans]),
            At.COUNTS: counts,
            At.FIRSTS: np.cumsum([0, *map(len, pieces)]),
            At.SEEN: np.array([plan.tree_start for plan in plans]),
            At.HEAD_BYTES: np.array([extent.capacity * shape.row_bytes for extent, _ in flat]),
            At.SIZES: np.array([size for _, size in flat]),
            At.MASKS: masks,
        }
        loop = attention_kernel.attend(shape.head_dim, group, shape.int8)
        room = int(counts.max()) * group, int(keys.max())
        self.loop = SharedLoop(loop, shape.kv_heads, counts * keys, room, arrays, (At.BUFFERS, buffers))

    def attend(self, layer: int, queries: torch.Tensor, out: torch.Tensor) -> None:
        """Write these segments' rows of ``out``.

        Args:
            queries: ``[rows, heads, head_dim]`` of the whole pass, the heads side by side, already scaled.
            out: ``[rows, heads * head_dim]``.
        """
        self.loop.run(layer, queries, out)


def _masks(plan: SegmentPlan) -> np.ndarray:
    """For each row which rows of its tree it sees, the first by the lowest bit."""
    if plan.ancestors is None:
        return np.array([(2 << row) - 1 for row in range(plan.count)], dtype=np.uint64)
    bits = np.left_shift(np.uint64(1), np.arange(plan.ancestors.shape[1], dtype=np.uint64))
    sums: np.ndarray = (plan.ancestors * bits).sum(axis=1, dtype=np.uint64)
    return sums
