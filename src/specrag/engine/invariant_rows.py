"""Attention with the same bits for a row whatever else is in its pass: what the compiled loop needs to know."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from specrag.engine.path_kernel import BLOCK_KEYS, CHAIN_ROWS, attend_paths
from specrag.engine.path_kernel import PathArguments as At
from specrag.engine.segment_plan import SegmentPlan
from specrag.engine.shared_loop import SharedLoop


class InvariantRows:
    """Attention of all segments of a pass.

    Args:
        plans: the segments; each session's keys and values lie in one extent of its own.
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
            At.FIRSTS: np.array(firsts),
            At.COUNTS: rows,
            At.HEAD_BYTES: np.array([plan.own.capacity * shape.row_bytes for plan in owners]),
            At.SEEN: np.array(seen),
            At.PATH_BORDERS: np.cumsum([0, *map(len, paths)]),
            At.PATH: np.concatenate(paths),
        }
        self._keys = max(plan.used for plan in plans)
        room = int(rows.max()) * group, self._keys + BLOCK_KEYS - 1
        loop = attend_paths(shape.head_dim, group, shape.int8)
        self._loop = SharedLoop(loop, shape.kv_heads, rows * keys, room, arrays, (At.BUFFERS, buffers))

    def attend(self, layer: int, queries: torch.Tensor, out: torch.Tensor, window: int | None) -> None:
        """Write ``out``.

        Args:
            queries: ``[rows, heads, head_dim]`` of the whole pass, the heads side by side, already scaled.
            out: ``[rows, heads * head_dim]``.
            window: a row sees this many positions, itself included; ``None`` for all.
        """
        self._loop[At.WINDOW] = self._keys if window is None else window
        self._loop.run(layer, queries, out)


def _units(plan: SegmentPlan) -> list[tuple[int, int, int, np.ndarray]]:
    """For each unit its first row in the pass, its rows, how many keys the first of them sees, and the path behind."""
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
