"""One segment of a pass: where it reads and writes, and what its rows may see. The same in every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from specrag.engine.kv import ROW_UNIT, Extent, KeyValueCache
from specrag.engine.passes import Segment

#: Up to this many keys, torch's fused attention is used, which reads any layout.
SMALL_KEYS = 256

#: Largest share of surplus rows that are read to avoid a copy.
WASTE = 0.15


def ancestor_matrix(parents: Sequence[int]) -> np.ndarray:
    """The tree mask, bool ``[rows, rows]``: each row sees itself and its ancestors."""
    count = len(parents)
    sees = np.zeros((count, count), dtype=bool)
    for row, parent in enumerate(parents):
        if parent >= 0:
            sees[row] = sees[parent]
        sees[row, row] = True
    return sees


def readable(needed: int, capacity: int) -> int:
    """How many rows of a buffer to read, if ``needed`` of them matter.

    torch's batched product copies keys that are not contiguous, and only a whole buffer is contiguous, not the first
    rows of every head. If few rows are surplus, reading all of them is cheaper than the copy (16 rows behind 4,000
    keys: 12 of 62 ms).
    """
    return capacity if needed > SMALL_KEYS and capacity <= needed * (1 + WASTE) else needed


@dataclass(slots=True)
class SegmentPlan:
    """Where one segment reads and writes, and its masks.

    Attributes:
        rows: its rows in the pass.
        own: the extent that it writes.
        offset: row of the own extent where its first row is written.
        written: rows of its tree already written in front of that row.
        base: position of the own extent's first row.
        keys: rows of the own extent that are read, a multiple of ``ROW_UNIT`` (:func:`readable`).
        runs: shared extents before the own one, with the number of rows read of each.
        depths: distance of each tree row from the cache's last token, minus one; rows already written come first.
        ancestors: bool ``[rows, written + rows]``; ``None`` for a chain.
    """

    rows: slice
    own: Extent
    offset: int
    written: int
    base: int
    keys: int
    runs: list[tuple[Extent, int]]
    depths: list[int]
    ancestors: np.ndarray | None
    _mask: torch.Tensor | None = None
    _folded: torch.Tensor | None = None
    _windows: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, segment: Segment, first: int) -> SegmentPlan:
        """Plan a segment whose first row is row ``first`` of the pass; makes room for its rows."""
        cache: KeyValueCache = segment.cache
        count = len(segment.tokens)
        own = cache.prepare(segment.written + count)
        base = cache.base
        offset = cache.length - base + segment.written
        return cls(
            rows=slice(first, first + count),
            own=own,
            offset=offset,
            written=segment.written,
            base=base,
            keys=readable(-(-(offset + count) // ROW_UNIT) * ROW_UNIT, own.capacity),
            runs=[(run.extent, run.rows) for run in cache.runs],
            depths=segment.depths(),
            ancestors=None
            if segment.parents is None
            else ancestor_matrix(segment.parents)[segment.written :],
        )

    @property
    def count(self) -> int:
        """Number of rows."""
        return int(self.rows.stop - self.rows.start)

    @property
    def used(self) -> int:
        """Rows of the own extent in use once the segment's rows are written."""
        return self.offset + self.count

    @property
    def tree_start(self) -> int:
        """Row of the own extent where its tree begins: the rows in front of it are committed and always seen."""
        return self.offset - self.written

    @property
    def positions(self) -> list[int]:
        """Position of each row in its sequence."""
        start = self.base + self.tree_start
        return [start + depth for depth in self.depths[self.written :]]

    def hide(self, scores: torch.Tensor, group: int, window: int | None, rows: slice) -> None:
        """Set the scores of own-extent keys that these rows may not see to -inf, in place.

        Args:
            scores: ``[kv_heads, rows * group, keys]``, for the extent's first ``keys`` rows.
        """
        view = scores.unflatten(1, (-1, group))
        keys = scores.shape[-1]
        if window is not None:
            view += self.windows(window)[-1][rows, None, :keys]
            return
        if self._mask is None:
            self._mask = self.tree_mask(scores.dtype, scores.device)
        if self._mask.shape[-1]:
            view[..., self.tree_start :] += self._mask[rows, None, : keys - self.tree_start]

    def tree_mask(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """``[rows, keys - tree_start]``: 0 where a row sees a tree row, -inf elsewhere."""
        mask = torch.full((self.count, self.keys - self.tree_start), float("-inf"), dtype=dtype)
        if self.ancestors is None:
            mask = torch.triu(mask, diagonal=1)
        else:
            mask[:, : self.ancestors.shape[1]].masked_fill_(torch.from_numpy(self.ancestors), 0.0)
        return mask.to(device)

    def folded_mask(self, group: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """``[rows * group, keys]``, for the fused kernel, which cannot broadcast over the group."""
        if self._folded is None:
            seen = torch.zeros(self.count, self.keys, dtype=dtype, device=device)
            seen[:, self.tree_start :] = self.tree_mask(dtype, device)
            self._folded = seen.repeat_interleave(group, dim=0)
        return self._folded

    def windows(self, window: int) -> list[torch.Tensor]:
        """Masks of a sliding window over each shared extent, then over the own one: ``[rows, keys]`` each."""
        if window not in self._windows:
            shape = self.own.shape
            rows = torch.tensor(self.positions)
            masks = []
            start = 0
            for _, length in self.runs:
                columns = torch.arange(start, start + length)
                masks.append(torch.zeros(self.count, length, dtype=shape.dtype))
                masks[-1].masked_fill_(columns[None] <= rows[:, None] - window, float("-inf"))
                start += length
            columns = torch.arange(start, start + self.keys)
            # A tree row's position is its depth, not its place in the buffer.
            tree = torch.tensor(self.depths) + self.base + self.tree_start
            columns[self.tree_start : self.tree_start + len(tree)] = tree
            own = torch.zeros(self.count, self.keys, dtype=shape.dtype)
            own[:, self.tree_start :] = self.tree_mask(shape.dtype, torch.device("cpu"))
            own.masked_fill_(columns[None] <= rows[:, None] - window, float("-inf"))
            self._windows[window] = [mask.to(shape.device) for mask in (*masks, own)]
        return self._windows[window]


@dataclass(frozen=True, slots=True)
class SharedExtent:
    """An extent, the number of its rows that are read, and the rows of the pass that read it."""

    extent: Extent
    rows: int
    members: list[slice]


def find_shared(
    plans: Sequence[SegmentPlan], group: int
) -> tuple[list[SharedExtent], dict[int, list[tuple[int, slice]]]]:
    """The shared extents that segments read, grouped by extent and number of rows read.

    Returns:
        The extents; and, by the ``id`` of each plan that reads any, their indices with the plan's rows in their
        products.
    """
    readers: dict[tuple[int, int], list[SegmentPlan]] = {}
    for plan in plans:
        for extent, rows in plan.runs:
            readers.setdefault((id(extent), rows), []).append(plan)
    shared: list[SharedExtent] = []
    reads: dict[int, list[tuple[int, slice]]] = {}
    index = {}
    for key, members in readers.items():
        extent = next(extent for extent, _ in members[0].runs if id(extent) == key[0])
        index[key] = len(shared)
        shared.append(SharedExtent(extent, key[1], [plan.rows for plan in members]))
    for plan in plans:
        for extent, rows in plan.runs:
            number = index[id(extent), rows]
            start = 0
            for member in shared[number].members:
                if member is plan.rows:
                    break
                start += member.stop - member.start
            within = slice(start * group, (start + plan.count) * group)
            reads.setdefault(id(plan), []).append((number, within))
    return shared, reads
