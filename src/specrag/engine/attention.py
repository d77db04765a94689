"""Attention over the rows of a packed pass: trees, many sessions, shared prefixes.

All rows of a pass lie side by side. Each segment attends to its own chain of extents and, under a mask that
follows the tree, to its own rows. The query heads of a group are folded into rows, so that keys and values are
never repeated: queries are ``[kv_heads, rows * group, head_dim]``, row ``r`` of head ``g`` at ``r * group + g``.

The number of keys read is rounded up to :data:`~specrag.engine.kv.ROW_UNIT` and the surplus masked. On the CPU
in bf16 the kernels underneath then sum in an order that depends on a key's position alone, so that a chain's
rows have the same bits however many rows are in the pass (``tests/core/test_batch_invariance.py`` checks it).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from specrag.engine.bundle import Bundle
from specrag.engine.compiled_rows import CompiledRows, Writer, available, serves
from specrag.engine.kv import ROW_UNIT
from specrag.engine.passes import Segment
from specrag.engine.segment_plan import SMALL_KEYS, SegmentPlan, readable
from specrag.engine.shared_extents import find_shared
from specrag.errors import SpecragError

#: Rows of one attention product; bounds the score matrix to ROWS * keys * heads numbers.
BLOCK_ROWS = 128

#: Up to so many rows, and up to SMALL_KEYS keys, torch's fused attention is faster than separate products (two
#: Zen 4 cores: 21 against 43 microseconds for one row and 128 keys, even at 512 keys or 16 rows).
SMALL_ROWS = 8

#: oneDNN's bf16 product sums up to so many keys in one order, and more of them in another (as it does with the
#: inputs of a linear layer, ``models/linear.py``).
INVARIANT_KEYS = 1024


class AttentionPlan:
    """Everything about a pass's attention that is the same in every layer.

    Args:
        segments: the pass's segments, in row order; their caches are :class:`KeyValueCache`.
        group: query heads for each key/value head.
        invariant: compute tree rows path by path, each with its ancestors at their absolute positions, so that
            a row's bits equal those that plain decoding gives it.
        compiled: let compiled loops serve the segments that they are faster for (:meth:`attend_rows`); for models
            without windows and caps.
    """

    def __init__(
        self, segments: Sequence[Segment], group: int, *, invariant: bool = False, compiled: bool = False
    ) -> None:
        self.group = group
        self.invariant = invariant
        self.segments: list[SegmentPlan] = []
        self._bundles: dict[int, Bundle] = {}
        self._memory: dict[int, torch.Tensor] = {}
        first = 0
        for segment in segments:
            self.segments.append(SegmentPlan.of(segment, first))
            first += len(segment.tokens)
            if invariant and segment.written:
                raise SpecragError(
                    "segment: rows written before stay only without batch_invariant; feed the tree"
                )
        self.positions = [position for plan in self.segments for position in plan.positions]
        self._writer: Writer | None = None
        self._compiled: CompiledRows | None = None
        #: The segments that torch's products serve.
        self._others = self.segments
        if available(self.segments[0].own.shape):
            self._writer = Writer(self.segments)
            served = [plan for plan in self.segments if serves(plan)] if compiled and not invariant else []
            if served:
                self._compiled = CompiledRows(served, first, group)
                self._others = [plan for plan in self.segments if not serves(plan)]
        self.shared, self._reads = find_shared(self._others, group)
        self._find_bundles()

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the pass's keys and values, ``[rows, kv_heads, head_dim]`` each, behind their sessions."""
        if self._writer is not None:
            self._writer.write(layer, keys, values)
            return
        fresh = torch.stack([keys, values]).transpose(1, 2)  # [2, kv_heads, rows, head_dim]
        for plan in self.segments:
            end = plan.offset + plan.count
            plan.own.layers[layer][:, :, plan.offset : end] = fresh[:, :, plan.rows]

    def attend_rows(self, layer: int, queries: torch.Tensor, *, window: int | None = None) -> torch.Tensor:
        """Attention of all rows, after :meth:`write`, by whichever way is the faster for each segment.

        Args:
            layer: index of the layer.
            queries: ``[rows, heads, head_dim]``, already scaled, the heads side by side.
            window: a row sees this many positions, itself included; ``None`` for all.

        Returns:
            ``[rows, heads * head_dim]``.
        """
        rows, heads, size = queries.shape
        out: torch.Tensor | None = None
        if self._compiled is not None:
            out = torch.empty((rows, heads * size), dtype=queries.dtype, device=queries.device)
            self._compiled.attend(layer, queries, out)
            if not self._others:
                return out
        folded = queries.unflatten(1, (-1, self.group)).transpose(0, 1).flatten(1, 2)
        mixed: torch.Tensor = self.attend(layer, folded, window=window)
        mixed = mixed.unflatten(1, (rows, self.group)).transpose(0, 1)
        if out is None:
            return mixed.reshape(rows, -1)
        for plan in self._others:
            out[plan.rows] = mixed[plan.rows].flatten(1)
        return out

    def attend(
        self, layer: int, queries: torch.Tensor, *, window: int | None = None, softcap: float | None = None
    ) -> torch.Tensor:
        """Attention by torch's products, after :meth:`write`.

        Args:
            layer: index of the layer.
            queries: ``[kv_heads, rows * group, head_dim]``, already scaled.
            window: a row sees this many positions, itself included; ``None`` for all.
            softcap: scores pass ``softcap * tanh(score / softcap)``; ``None`` for no cap.

        Returns:
            ``[kv_heads, rows * group, head_dim]``; rows that compiled loops serve hold nothing.
        """
        shared_scores = [
            _cap(
                torch.bmm(
                    self._gather(queries, item.members),
                    item.extent.layers[layer][0, :, : item.rows].transpose(1, 2),
                ),
                softcap,
            )
            for item in self.shared
        ]
        shared_weights: list[list[torch.Tensor]] = [[] for _ in self.shared]
        bundled = window is None and softcap is None
        out = []
        for plan in self._others:
            bundle = self._bundles.get(id(plan)) if bundled else None
            if bundle is not None:
                out.append(bundle.attend(plan, layer, queries))
                continue
            own = self._fold(queries, plan.rows)
            if plan.ancestors is not None and self.invariant:
                out.append(self._attend_paths(plan, layer, own, window, softcap))
            elif not plan.runs:
                out.append(self._attend_own(plan, layer, own, window, softcap))
            else:
                out.append(
                    self._attend_chain(plan, layer, own, shared_scores, shared_weights, window, softcap)
                )
        result = self._together(out, queries)
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

    def _together(self, parts: list[torch.Tensor], queries: torch.Tensor) -> torch.Tensor:
        """The segments' rows at their places in the pass."""
        if len(parts) == len(self.segments):
            return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        result = torch.empty_like(queries)
        for plan, part in zip(self._others, parts, strict=True):
            result[:, plan.rows.start * self.group : plan.rows.stop * self.group] = part
        return result

    # -- planning -------------------------------------------------------------------------------------------

    def _find_bundles(self) -> None:
        """Group the sessions of one row and few keys by the number of keys."""
        alike: dict[int, list[SegmentPlan]] = {}
        for plan in self._others:
            if self._is_small(plan) and plan.count == 1 and not plan.runs and not plan.written:
                alike.setdefault(plan.keys, []).append(plan)
        for plans in alike.values():
            if len(plans) > 1:
                self._bundles.update(dict.fromkeys(map(id, plans), Bundle(plans, self.group)))

    # -- one segment ----------------------------------------------------------------------------------------

    def _attend_own(
        self, plan: SegmentPlan, layer: int, queries: torch.Tensor, window: int | None, softcap: float | None
    ) -> torch.Tensor:
        """A session whose keys all lie in its own extent."""
        keys, values = plan.own.layers[layer][:, :, : plan.keys].unbind(0)
        count = plan.count
        if self._is_small(plan) and window is None and softcap is None:
            mask = plan.folded_mask(self.group, queries.dtype, queries.device)
            return F.scaled_dot_product_attention(
                queries[None], keys[None], values[None], attn_mask=mask, scale=1.0
            )[0]
        blocks = []
        for start in range(0, count, BLOCK_ROWS):
            rows = slice(start, min(start + BLOCK_ROWS, count))
            # A chain's earlier rows see nothing of the later ones: leave those keys out.
            seen = plan.keys
            if plan.ancestors is None:
                seen = readable(-(-(plan.offset + rows.stop) // ROW_UNIT) * ROW_UNIT, plan.keys)
            block = queries[:, rows.start * self.group : rows.stop * self.group]
            scores = self._scores(block, keys[:, :seen], softcap)
            plan.hide(scores, self.group, window, rows)
            blocks.append(self._mix(self._softmax(scores), values[:, :seen]))
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)

    def _attend_chain(
        self,
        plan: SegmentPlan,
        layer: int,
        queries: torch.Tensor,
        shared_scores: list[torch.Tensor],
        shared_weights: list[list[torch.Tensor]],
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """A session that reads shared extents before its own: one softmax over all of them."""
        keys, values = plan.own.layers[layer][:, :, : plan.keys].unbind(0)
        own = _cap(torch.bmm(queries, keys.transpose(1, 2)), softcap)
        rows = slice(0, plan.count)
        plan.hide(own, self.group, window, rows)
        parts = [shared_scores[number][:, rows] for number, rows in self._reads[id(plan)]]
        if window is not None:
            masks = plan.windows(window)
            parts = [
                (part.unflatten(1, (-1, self.group)) + mask[:, None]).flatten(1, 2)
                for part, mask in zip(parts, masks, strict=False)
            ]
        weights = torch.softmax(torch.cat([*parts, own], dim=-1), dim=-1)
        start = 0
        for (number, _), part in zip(self._reads[id(plan)], parts, strict=True):
            shared_weights[number].append(weights[..., start : start + part.shape[-1]])
            start += part.shape[-1]
        return torch.bmm(weights[..., start:], values)

    def _attend_paths(
        self, plan: SegmentPlan, layer: int, queries: torch.Tensor, window: int | None, softcap: float | None
    ) -> torch.Tensor:
        """Tree rows with the bits of plain decoding: each path in turn, as if it were the committed chain.

        Every path's rows are copied to the positions that they would have if they were committed, and the rows
        are put back where they were afterwards.
        """
        assert plan.ancestors is not None
        count = plan.count
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
            total = readable(-(-(plan.offset + depth) // ROW_UNIT) * ROW_UNIT, plan.keys)
            scores = self._scores(block, buffer[0, :, :total], softcap)
            positions = torch.arange(plan.offset + start, plan.offset + depth, device=queries.device)
            columns = torch.arange(total, device=queries.device)
            hidden = columns[None] > positions[:, None]
            if window is not None:
                hidden |= columns[None] <= positions[:, None] - window
            scores.unflatten(1, (-1, self.group)).masked_fill_(hidden[:, None], float("-inf"))
            mixed = self._mix(self._softmax(scores), buffer[1, :, :total])
            out.index_copy_(1, index[start:], mixed.unflatten(1, (-1, self.group)))
        buffer[:, :, plan.offset : plan.offset + count] = original
        return out.flatten(1, 2)

    def _paths(self, plan: SegmentPlan) -> list[int]:
        """The leaves, those of the longest path first, so that few rows are computed twice."""
        assert plan.ancestors is not None
        leaves = np.flatnonzero(plan.ancestors.sum(axis=0) == 1)
        return sorted((int(leaf) for leaf in leaves), key=lambda leaf: -plan.depths[leaf])

    def _scores(self, queries: torch.Tensor, keys: torch.Tensor, softcap: float | None) -> torch.Tensor:
        """``[kv_heads, rows * group, keys]``, in memory that the next call overwrites."""
        out = self._workspace(0, queries, keys.shape[1])
        return _cap(torch.bmm(queries, keys.transpose(1, 2), out=out), softcap)

    def _softmax(self, scores: torch.Tensor) -> torch.Tensor:
        """The weights, in memory that the next call overwrites."""
        weights: torch.Tensor = torch.softmax(scores, dim=-1, out=self._workspace(1, scores, scores.shape[2]))
        return weights

    def _workspace(self, number: int, like: torch.Tensor, keys: int) -> torch.Tensor:
        """``[kv_heads, rows * group, keys]`` that lives as long as the pass.

        Matrices of megabytes made anew in every layer go back to the system each time, and the page faults then
        take as long as the products (measured: 64 rows behind 1,024 keys 1.45 against 0.62 ms a layer).
        """
        size = (like.shape[0], like.shape[1], keys)
        needed = math.prod(size)
        if number not in self._memory or self._memory[number].numel() < needed:
            self._memory[number] = torch.empty(needed, dtype=like.dtype, device=like.device)
        return self._memory[number][:needed].view(size)

    def _mix(self, weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """``[kv_heads, rows * group, keys]`` times ``[kv_heads, keys, head_dim]``."""
        if not self.invariant or values.shape[1] <= INVARIANT_KEYS:
            return torch.bmm(weights, values)
        # Blocks at absolute positions: a block that a row does not see adds an exact zero.
        parts = zip(weights.split(INVARIANT_KEYS, dim=-1), values.split(INVARIANT_KEYS, dim=1), strict=True)
        first_weights, first_values = next(parts)
        out = torch.bmm(first_weights, first_values)
        for part_weights, part_values in parts:
            out += torch.bmm(part_weights, part_values)
        return out

    def _is_small(self, plan: SegmentPlan) -> bool:
        """Whether torch's fused kernel is faster: where the operations' overhead outweighs their work.

        Its sums depend on the number of rows, so it is not used where that must not be.
        """
        return not self.invariant and plan.keys <= SMALL_KEYS and plan.count <= SMALL_ROWS

    # -- rows -----------------------------------------------------------------------------------------------

    def _fold(self, queries: torch.Tensor, rows: slice) -> torch.Tensor:
        if len(self.segments) == 1:
            return queries
        return queries[:, rows.start * self.group : rows.stop * self.group]

    def _gather(self, queries: torch.Tensor, members: list[slice]) -> torch.Tensor:
        parts = [self._fold(queries, member) for member in members]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _cap(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap
