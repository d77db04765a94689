"""Attention with the same bits for a row whatever else is in its pass: what the compiled loop needs to know."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from specrag.engine.path_kernel import BLOCK_KEYS, CHAIN_ROWS, attend_paths
from specrag.engine.segment_plan import SegmentPlan


class InvariantRows:
    """Attention of all segments of a pass.

    Args:
        plans: the segments; each session's keys and values lie in one extent of its own.
        group: query heads for each key/value head.
    """

    def __init__(self, plans: Sequence[SegmentPlan], group: int) -> None:
        self._shape = shape = plans[0].own.shape
        self._run = attend_paths(shape.head_dim, group, shape.int8)
        units = [unit for plan in plans for unit in _units(plan)]
        firsts, counts, seen, paths = zip(*units, strict=True)
        owners = [plan for plan in plans for _ in _units(plan)]
        self._firsts, self._counts, self._seen = np.array(firsts), np.array(counts), np.array(seen)
        self._buffers = np.array([plan.own.addresses for plan in owners]).T.copy()  # [layers, units]
        self._strides = np.array([plan.own.capacity * shape.row_bytes for plan in owners])
        self._borders = np.cumsum([0, *map(len, paths)])
        self._path = np.concatenate(paths)
        keys = max(plan.used for plan in plans)
        self._scores = np.empty((max(counts) * group, keys + BLOCK_KEYS - 1), dtype=np.float32)

    def attend(self, layer: int, queries: torch.Tensor, out: torch.Tensor, window: int | None) -> None:
        """Write ``out``.

        Args:
            queries: ``[rows, heads, head_dim]`` of the whole pass, the heads side by side, already scaled.
            out: ``[rows, heads * head_dim]``.
            window: a row sees this many positions, itself included; ``None`` for all.
        """
        self._run(
            queries.data_ptr(), queries.stride(0), out.data_ptr(), out.stride(0), self._shape.kv_heads,
            self._scores.shape[1] if window is None else window,
            self._firsts, self._counts, self._buffers[layer], self._strides, self._seen,
            self._borders, self._path, self._scores,
        )  # fmt: skip


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
