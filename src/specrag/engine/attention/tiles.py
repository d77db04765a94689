"""Attention by the AMX loops: which segments they serve, and the arguments that they take."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from specrag.engine.attention.segments import SegmentPlan
from specrag.engine.cpu import amx
from specrag.engine.cpu.threads import LoopThreads
from specrag.engine.cpu.tile_attention import TileArguments as At
from specrag.engine.cpu.tile_attention import attend, pack, packed_bytes, room_bytes
from specrag.engine.kv import KeyValueShape

#: Fewer rows are not worth repacking all keys.
LEAST_ROWS = 16


def available(shape: KeyValueShape) -> bool:
    """Whether the AMX loops serve this kind of keys and values on this machine."""
    kind = shape.device.type == "cpu" and shape.dtype == torch.bfloat16 and not shape.int8
    return kind and shape.head_dim % amx.BLOCK == 0 and amx.available()


def serves(plan: SegmentPlan) -> bool:
    """Whether tiles are faster than torch for this segment."""
    return plan.ancestors is None and not plan.written and plan.count >= LEAST_ROWS


class TileAttention:
    """Attention of the segments of a pass that the AMX loops serve.

    Args:
        plans: the segments; :func:`serves` holds for each.
        group: query heads for each key/value head.
    """

    def __init__(self, plans: Sequence[SegmentPlan], group: int) -> None:
        shape = plans[0].own.shape
        pieces = [[*plan.runs, (plan.own, plan.used)] for plan in plans]
        flat = [piece for each in pieces for piece in each]
        self._buffers = np.array([extent.addresses for extent, _ in flat]).T.copy()  # [layers, pieces]
        keys = [sum(size for _, size in each) for each in pieces]
        steps = [-(-count // amx.BLOCK) for count in keys]
        sizes = [2 * shape.kv_heads * packed_bytes(count, shape.head_dim) for count in steps]
        self._packed = np.empty(sum(sizes) + 64, dtype=np.uint8)
        start = _aligned(self._packed)
        # The rows that see the most keys come first, so that no thread is left with one of them at the end.
        units = [
            (-(count - plan.count + row), segment, head, row)
            for segment, (plan, count) in enumerate(zip(plans, keys, strict=True))
            for row in range(0, plan.count, amx.BLOCK)
            for head in range(shape.kv_heads * group)
        ]
        self._threads = LoopThreads()
        each_room = -(-room_bytes(shape.head_dim) // 64) * 64
        self._room = np.empty(self._threads.size * each_room + 64, dtype=np.uint8)
        # Kept alive, since the loops have only their addresses.
        self._arrays = {
            At.FIRSTS: np.cumsum([0, *map(len, pieces)]),
            At.PACKED: start + np.cumsum([0, *sizes[:-1]]),
            At.STEPS: np.array(steps),
            At.PAST: np.array([count - plan.count for plan, count in zip(plans, keys, strict=True)]),
            At.ROWS: np.array([plan.rows.start for plan in plans]),
            At.COUNTS: np.array([plan.count for plan in plans]),
            At.HEAD_BYTES: np.array([extent.capacity * shape.row_bytes for extent, _ in flat]),
            At.SIZES: np.array([size for _, size in flat]),
            At.UNITS: np.array([unit[1:] for unit in sorted(units)]),
            At.WHOLE: amx.setting(),
            At.RESTS: np.stack([amx.setting(plan.count % amx.BLOCK or amx.BLOCK) for plan in plans]),
        }
        given = np.zeros(len(At), dtype=np.int64)
        for place, array in self._arrays.items():
            given[place] = array.ctypes.data
        given[At.KV_HEADS], given[At.GROUP], given[At.SEGMENTS] = shape.kv_heads, group, len(plans)
        given[At.UNIT_COUNT] = len(units)
        given[At.ROOM], given[At.ROOM_BYTES] = _aligned(self._room), each_room
        given[At.NUMBER], given[At.COUNT] = self._threads.number, self._threads.count
        self._given = given
        self._loops = pack(shape.head_dim), attend(shape.head_dim)

    def attend(self, layer: int, queries: torch.Tensor, out: torch.Tensor) -> None:
        """Write these segments' rows of ``out``.

        Args:
            queries: ``[rows, heads, head_dim]`` of the whole pass, the heads side by side, already scaled.
            out: ``[rows, heads * head_dim]``.
        """
        given = self._given
        given[At.QUERIES], given[At.QUERY_STRIDE] = queries.data_ptr(), queries.stride(0) * queries.itemsize
        given[At.OUT], given[At.OUT_STRIDE] = out.data_ptr(), out.stride(0) * out.itemsize
        given[At.BUFFERS] = self._buffers[layer].ctypes.data
        for loop in self._loops:
            self._threads.run(loop, given.ctypes.data)


def _aligned(memory: np.ndarray) -> int:
    """The address of the first cache line that begins in it."""
    return -(-memory.ctypes.data // 64) * 64
