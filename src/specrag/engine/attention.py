"""Attention over the rows of a packed pass: trees, many sessions, shared prefixes.

All rows of a pass lie side by side. Each segment attends to its own chain of extents and, under a mask that
follows the tree, to its own rows. The query heads of a group are folded into rows, so that keys and values are
never repeated: queries are ``[kv_heads, rows * group, head_dim]``, row ``r`` of head ``g`` at ``r * group + g``.

The number of keys read is rounded up to :data:`~specrag.engine.kv.ROW_UNIT` and the surplus masked. On the CPU
in bf16 the kernels underneath then sum in an order that depends on a key's position alone, so that a chain's
rows have the same bits however many rows are in the pass (``tests/core/test_batch_invariance.py`` checks it).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from specrag.engine.kv import ROW_UNIT, Extent, KeyValueCache
from specrag.engine.passes import Segment

#: Rows of one attention product; bounds the score matrix to ROWS * keys * heads numbers.
BLOCK_ROWS = 128

#: Up to so many keys and rows torch's fused attention is faster than separate products (two Zen 4 cores: 21
#: against 43 microseconds for one row and 128 keys, even at 512 keys or 16 rows).
SMALL_KEYS = 256
SMALL_ROWS = 8


@dataclass(slots=True)
class _SharedExtent:
    """An extent read by several segments of this pass: one product serves the rows of all of them."""

    extent: Extent
    rows: int
    members: list[slice] = field(default_factory=list)


@dataclass(slots=True)
class _SegmentPlan:
    rows: slice
    own: Extent
    offset: int  # row of the own extent where this segment's first row is written
    base: int  # position of the own extent's first row
    keys: int  # rows of the own extent that are read: a multiple of ROW_UNIT
    runs: list[tuple[Extent, int]]
    shared: list[tuple[int, slice]]  # (index into AttentionPlan.shared, rows within it) for each run
    ancestors: np.ndarray | None  # bool [rows, rows]; None for a chain
    depths: list[int]
    mask: torch.Tensor | None = None
    folded_mask: torch.Tensor | None = None
    windowed: dict[int, list[torch.Tensor]] = field(default_factory=dict)


def ancestor_matrix(parents: Sequence[int]) -> np.ndarray:
    """Which rows a row sees: bool ``[rows, rows]``, itself and its ancestors."""
    count = len(parents)
    sees = np.zeros((count, count), dtype=bool)
    for row, parent in enumerate(parents):
        if parent >= 0:
            sees[row] = sees[parent]
        sees[row, row] = True
    return sees




class AttentionPlan:
    """Everything about a pass's attention that is the same in every layer.

    Args:
        segments: the pass's segments, in row order; their caches are :class:`KeyValueCache`.
        group: query heads for each key/value head.
        invariant: compute tree rows path by path, each with its ancestors at their absolute positions, so that
            a row's bits equal those that plain decoding gives it.
    """

    def __init__(self, segments: Sequence[Segment], group: int, *, invariant: bool = False) -> None:
        self.group = group
        self.invariant = invariant
        self.shared: list[_SharedExtent] = []
        self.segments: list[_SegmentPlan] = []
        first = 0
        for segment in segments:
            self.segments.append(self._plan(segment, first))
            first += len(segment.tokens)
        self.rows = first
        self._find_shared()
        self.positions = [
            plan.base + plan.offset + depth for plan in self.segments for depth in plan.depths
        ]

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the pass's keys and values, ``[rows, kv_heads, head_dim]`` each, behind their sessions."""
        for plan in self.segments:
            count = plan.rows.stop - plan.rows.start
            target = plan.own.layers[layer][:, :, plan.offset : plan.offset + count]
            target[0] = keys[plan.rows].transpose(0, 1)
            target[1] = values[plan.rows].transpose(0, 1)

    def attend(
        self, layer: int, queries: torch.Tensor, *, window: int | None = None, softcap: float | None = None
    ) -> torch.Tensor:
        """Attention of all rows, after :meth:`write`.

        Args:
            layer: index of the layer.
            queries: ``[kv_heads, rows * group, head_dim]``, already scaled.
            window: a row sees this many positions, itself included; ``None`` for all.
            softcap: scores pass ``softcap * tanh(score / softcap)``; ``None`` for no cap.

        Returns:
            ``[kv_heads, rows * group, head_dim]``.
        """
        shared_scores = [
            _scores(self._gather(queries, item.members), item.extent.layers[layer][0, :, : item.rows], softcap)
            for item in self.shared
        ]
        shared_weights: list[list[torch.Tensor]] = [[] for _ in self.shared]
        out = []
        for plan in self.segments:
            own = self._fold(queries, plan.rows)
            if plan.ancestors is not None and self.invariant:
                out.append(self._attend_paths(plan, layer, own, window, softcap))
            elif not plan.runs:
                out.append(self._attend_own(plan, layer, own, window, softcap))
            else:
                out.append(self._attend_chain(plan, layer, own, shared_scores, shared_weights, window, softcap))
        result = out[0] if len(out) == 1 else torch.cat(out, dim=1)
        for item, weights in zip(self.shared, shared_weights, strict=True):
            values = item.extent.layers[layer][1, :, : item.rows]
            added = torch.bmm(torch.cat(weights, dim=1), values)
            start = 0
            for member in item.members:
                rows = slice(member.start * self.group, member.stop * self.group)
                count = rows.stop - rows.start
                result[:, rows] += added[:, start : start + count]
                start += count
        return result

    # -- planning -------------------------------------------------------------------------------------------

    def _plan(self, segment: Segment, first: int) -> _SegmentPlan:
        cache: KeyValueCache = segment.cache
        count = len(segment.tokens)
        own = cache.prepare(count)
        base = cache.base
        offset = cache.length - base
        keys = -(-(offset + count) // ROW_UNIT) * ROW_UNIT
        return _SegmentPlan(
            rows=slice(first, first + count),
            own=own,
            offset=offset,
            base=base,
            keys=keys,
            runs=[(run.extent, run.rows) for run in cache.runs],
            shared=[],
            ancestors=None if segment.parents is None else ancestor_matrix(segment.parents),
            depths=segment.depths(),
        )

    def _find_shared(self) -> None:
        """Join the reads of extents that several segments read to the same row."""
        readers: dict[tuple[int, int], list[_SegmentPlan]] = {}
        for plan in self.segments:
            for extent, rows in plan.runs:
                readers.setdefault((id(extent), rows), []).append(plan)
        index = {}
        for key, plans in readers.items():
            extent = next(extent for extent, _ in plans[0].runs if id(extent) == key[0])
            index[key] = len(self.shared)
            self.shared.append(_SharedExtent(extent, key[1], [plan.rows for plan in plans]))
        for plan in self.segments:
            for extent, rows in plan.runs:
                number = index[id(extent), rows]
                start = 0
                for member in self.shared[number].members:
                    if member is plan.rows:
                        break
                    start += member.stop - member.start
                count = plan.rows.stop - plan.rows.start
                plan.shared.append((number, slice(start * self.group, (start + count) * self.group)))

    # -- one segment ----------------------------------------------------------------------------------------

    def _attend_own(
        self, plan: _SegmentPlan, layer: int, queries: torch.Tensor, window: int | None, softcap: float | None
    ) -> torch.Tensor:
        """A session whose keys all lie in its own extent."""
        keys, values = plan.own.layers[layer][:, :, : plan.keys].unbind(0)
        count = plan.rows.stop - plan.rows.start
        if self._is_small(plan) and window is None and softcap is None:
            if plan.folded_mask is None:
                plan.folded_mask = self._folded_mask(plan, queries)
            return F.scaled_dot_product_attention(
                queries[None], keys[None], values[None], attn_mask=plan.folded_mask, scale=1.0
            )[0]
        if count <= BLOCK_ROWS:
            scores = _scores(queries, keys, softcap)
            self._mask(scores, plan, window, slice(0, count))
            return torch.bmm(torch.softmax(scores, dim=-1), values)
        blocks = []
        for start in range(0, count, BLOCK_ROWS):
            rows = slice(start, min(start + BLOCK_ROWS, count))
            # A chain's earlier rows see nothing of the later ones: leave those keys out.
            seen = plan.keys
            if plan.ancestors is None:
                seen = -(-(plan.offset + rows.stop) // ROW_UNIT) * ROW_UNIT
            block = queries[:, rows.start * self.group : rows.stop * self.group]
            scores = _scores(block, keys[:, :seen], softcap)
            self._mask(scores, plan, window, rows)
            blocks.append(torch.bmm(torch.softmax(scores, dim=-1), values[:, :seen]))
        return torch.cat(blocks, dim=1)

    def _attend_chain(
        self,
        plan: _SegmentPlan,
        layer: int,
        queries: torch.Tensor,
        shared_scores: list[torch.Tensor],
        shared_weights: list[list[torch.Tensor]],
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """A session that reads shared extents before its own: one softmax over all of them."""
        keys, values = plan.own.layers[layer][:, :, : plan.keys].unbind(0)
        own = _scores(queries, keys, softcap)
        rows = slice(0, plan.rows.stop - plan.rows.start)
        self._mask(own, plan, window, rows)
        parts = [shared_scores[number][:, rows] for number, rows in plan.shared]
        if window is not None:
            masks = self._windows(plan, window)
            parts = [
                (part.unflatten(1, (-1, self.group)) + mask[:, None]).flatten(1, 2)
                for part, mask in zip(parts, masks, strict=False)
            ]
        weights = torch.softmax(torch.cat([*parts, own], dim=-1), dim=-1)
        start = 0
        for (number, _), part in zip(plan.shared, parts, strict=True):
            shared_weights[number].append(weights[..., start : start + part.shape[-1]])
            start += part.shape[-1]
        return torch.bmm(weights[..., start:], values)

    def _attend_paths(
        self, plan: _SegmentPlan, layer: int, queries: torch.Tensor, window: int | None, softcap: float | None
    ) -> torch.Tensor:
        """Tree rows with the bits of plain decoding: each path in turn, as if it were the committed chain.

        Every path's rows are copied to the positions that they would have if they were committed, and the rows
        are put back where they were afterwards.
        """
        assert plan.ancestors is not None
        count = plan.rows.stop - plan.rows.start
        buffer = plan.own.layers[layer]
        window_rows = buffer[:, :, plan.offset : plan.offset + count]
        original = window_rows.clone()
        folded = queries.unflatten(1, (count, self.group))
        out = torch.empty_like(folded)
        done: set[int] = set()
        for leaf in self._paths(plan):
            path = np.flatnonzero(plan.ancestors[leaf])
            depth = len(path)
            index = torch.from_numpy(path).to(queries.device)
            buffer[:, :, plan.offset : plan.offset + depth] = original.index_select(2, index)
            fresh = [step for step, row in enumerate(path) if int(row) not in done]
            done.update(int(row) for row in path)
            # The rows of a path that another path has computed already are not computed again.
            start = fresh[0]
            block = folded.index_select(1, index[start:]).flatten(1, 2)
            total = -(-(plan.offset + depth) // ROW_UNIT) * ROW_UNIT
            scores = _scores(block, buffer[0, :, :total], softcap)
            positions = torch.arange(plan.offset + start, plan.offset + depth, device=queries.device)
            columns = torch.arange(total, device=queries.device)
            hidden = columns[None] > positions[:, None]
            if window is not None:
                hidden |= columns[None] <= positions[:, None] - window
            scores.unflatten(1, (-1, self.group)).masked_fill_(hidden[:, None], float("-inf"))
            mixed = torch.bmm(torch.softmax(scores, dim=-1), buffer[1, :, :total])
            out.index_copy_(1, index[start:], mixed.unflatten(1, (-1, self.group)))
        buffer[:, :, plan.offset : plan.offset + count] = original
        return out.flatten(1, 2)

    def _paths(self, plan: _SegmentPlan) -> list[int]:
        """The leaves, those of the longest path first, so that few rows are computed twice."""
        assert plan.ancestors is not None
        leaves = np.flatnonzero(plan.ancestors.sum(axis=0) == 1)
        return sorted((int(leaf) for leaf in leaves), key=lambda leaf: -plan.depths[leaf])

    def _is_small(self, plan: _SegmentPlan) -> bool:
        """Whether torch's fused kernel is faster: where the operations' overhead outweighs their work.

        Its sums depend on the number of rows, so it is not used where that must not be.
        """
        return not self.invariant and plan.keys <= SMALL_KEYS and len(plan.depths) <= SMALL_ROWS

    # -- masks ----------------------------------------------------------------------------------------------

    def _mask(self, scores: torch.Tensor, plan: _SegmentPlan, window: int | None, rows: slice) -> None:
        """Hide, in place, what these rows may not see of the own extent."""
        view = scores.unflatten(1, (-1, self.group))
        keys = scores.shape[-1]
        if window is not None:
            view += self._windows(plan, window)[-1][rows, None, :keys]
            return
        if plan.mask is None:
            plan.mask = self._tree_mask(plan, scores.dtype, scores.device)
        if plan.mask.shape[-1]:
            view[..., plan.offset :] += plan.mask[rows, None, : keys - plan.offset]

    def _tree_mask(self, plan: _SegmentPlan, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """``[rows, keys - offset]``: 0 where a row sees a row of the pass, -inf elsewhere."""
        count = plan.rows.stop - plan.rows.start
        width = plan.keys - plan.offset
        mask = torch.full((count, width), float("-inf"), dtype=dtype)
        if plan.ancestors is None:
            mask = torch.triu(mask, diagonal=1)
        else:
            mask[:, :count].masked_fill_(torch.from_numpy(plan.ancestors), 0.0)
        return mask.to(device)

    def _folded_mask(self, plan: _SegmentPlan, queries: torch.Tensor) -> torch.Tensor:
        """``[rows * group, keys]`` for the fused kernel, which takes no broadcast over the group."""
        seen = torch.zeros(len(plan.depths), plan.keys, dtype=queries.dtype, device=queries.device)
        seen[:, plan.offset :] = self._tree_mask(plan, queries.dtype, queries.device)
        return seen.repeat_interleave(self.group, dim=0)

    def _windows(self, plan: _SegmentPlan, window: int) -> list[torch.Tensor]:
        """Masks of a sliding window over each shared extent, then over the own one: ``[rows, keys]`` each."""
        if window not in plan.windowed:
            device = plan.own.layers[0].device
            dtype = plan.own.layers[0].dtype
            rows = torch.tensor(plan.depths) + plan.base + plan.offset
            masks = []
            start = 0
            for _, length in plan.runs:
                columns = torch.arange(start, start + length)
                masks.append(torch.zeros(len(rows), length, dtype=dtype))
                masks[-1].masked_fill_(columns[None] <= rows[:, None] - window, float("-inf"))
                start += length
            columns = torch.arange(start, start + plan.keys)
            # A tree row's position is its depth, not its place in the buffer.
            count = len(plan.depths)
            columns[plan.offset : plan.offset + count] = rows
            own = torch.zeros(count, plan.keys, dtype=dtype)
            own[:, plan.offset :] = self._tree_mask(plan, dtype, torch.device("cpu"))
            own.masked_fill_(columns[None] <= rows[:, None] - window, float("-inf"))
            plan.windowed[window] = [mask.to(device) for mask in (*masks, own)]
        return plan.windowed[window]

    # -- rows -----------------------------------------------------------------------------------------------

    def _fold(self, queries: torch.Tensor, rows: slice) -> torch.Tensor:
        if len(self.segments) == 1:
            return queries
        return queries[:, rows.start * self.group : rows.stop * self.group]

    def _gather(self, queries: torch.Tensor, members: list[slice]) -> torch.Tensor:
        parts = [self._fold(queries, member) for member in members]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _scores(queries: torch.Tensor, keys: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """``[kv_heads, rows * group, keys]``."""
    scores = torch.bmm(queries, keys.transpose(1, 2))
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    return scores
