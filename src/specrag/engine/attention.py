"""Attention over the rows of a packed pass: trees, many sessions, shared prefixes.

All rows of a pass lie side by side. Each segment attends to its own chain of extents and, under a mask that
follows the tree, to its own rows. The query heads of a group are folded into rows, so that keys and values are
never repeated: queries are ``[kv_heads, rows * group, head_dim]``, row ``r`` of head ``g`` at ``r * group + g``.

torch's products read a number of keys that is rounded up to :data:`~specrag.engine.kv.ROW_UNIT`, and the surplus is
masked. On the CPU in bf16 compiled loops serve what they are faster for, and whatever must be batch invariant.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache

import torch
import torch.nn.functional as F

from specrag.engine import tile_attention
from specrag.engine.bundle import Bundle
from specrag.engine.compiled_rows import CompiledRows, Writer, available, serves
from specrag.engine.invariant_rows import InvariantRows
from specrag.engine.kv import ROW_UNIT, KeyValueShape
from specrag.engine.partial_attention import attend_part, join
from specrag.engine.passes import Segment
from specrag.engine.segment_plan import SMALL_KEYS, SegmentPlan, readable
from specrag.engine.shared_extents import find_shared
from specrag.engine.tile_attention import TileAttention
from specrag.engine.tiles import empty_rows

#: Rows of one attention product; bounds the score matrix to ROWS * keys * heads numbers.
BLOCK_ROWS = 128

#: Up to so many rows, and up to SMALL_KEYS keys, torch's fused attention is faster than separate products (two
#: Zen 4 cores: 21 against 43 microseconds for one row and 128 keys, even at 512 keys or 16 rows). Where the processor
#: has matrix tiles it is always the faster (two Xeon cores: 512 rows behind 512 keys 2.1 against 8.3 milliseconds).
SMALL_ROWS = 8


class AttentionPlan:
    """Everything about a pass's attention that is the same in every layer.

    Args:
        segments: the pass's segments, in row order; their caches are :class:`KeyValueCache`.
        group: query heads for each key/value head.
        invariant: give a row the same bits whatever else is in the pass (``path_kernel.py``).
        compiled: let compiled loops serve the segments that they are faster for (:meth:`attend_rows`); where they
            are available, for models without windows and caps.
    """

    def __init__(
        self, segments: Sequence[Segment], group: int, *, invariant: bool = False, compiled: bool = False
    ) -> None:
        self.group = group
        self.segments: list[SegmentPlan] = []
        self._bundles: dict[int, Bundle] = {}
        self._memory: dict[int, torch.Tensor] = {}
        first = 0
        for segment in segments:
            self.segments.append(SegmentPlan.of(segment, first))
            first += len(segment.tokens)
        self.positions = [position for plan in self.segments for position in plan.positions]
        self._writer: Writer | None = None
        self._compiled: CompiledRows | None = None
        self._tiles: TileAttention | None = None
        self._invariant: InvariantRows | None = None
        #: The segments that torch's products serve.
        self._others = self.segments
        if available(self.segments[0].own.shape):
            self._writer = Writer(self.segments)
        if invariant:
            self._invariant, self._others = InvariantRows(self.segments, group), []
        elif compiled:
            self._choose(first)
        self.shared, self._reads = find_shared(self._others, group)
        self._find_bundles()

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the pass's keys and values, ``[rows, kv_heads, head_dim]`` each, behind their sessions."""
        if self._writer is not None:
            self._writer.write(layer, keys, values)
            return
        fresh = torch.stack([keys, values]).transpose(1, 2)  # [2, kv_heads, rows, head_dim]
        for plan in self.segments:
            plan.own.write(layer, plan.offset, fresh[:, :, plan.rows])

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
        if self._tiles is not None:
            out = empty_rows(rows, heads * size)
        else:
            out = torch.empty((rows, heads * size), dtype=queries.dtype, device=queries.device)
        if self._invariant is not None:
            self._invariant.attend(layer, queries, out, window)
            return out
        if self._compiled is not None:
            self._compiled.attend(layer, queries, out)
        if self._tiles is not None:
            self._tiles.attend(layer, queries, out)
        if not self._others:
            return out
        folded = queries.unflatten(1, (-1, self.group)).transpose(0, 1).flatten(1, 2)
        mixed: torch.Tensor = self.attend(layer, folded, window=window)
        mixed = mixed.unflatten(1, (rows, self.group)).transpose(0, 1)
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
        if window is None and softcap is None and self.shared and _fuses(self.segments[0].own.shape):
            return self._attend_parts(layer, queries)
        shared = [item.extent.read(layer, item.rows).unbind(0) for item in self.shared]
        shared_scores = [
            _cap(torch.bmm(self._gather(queries, item.members), keys.transpose(1, 2)), softcap)
            for item, (keys, _) in zip(self.shared, shared, strict=True)
        ]
        shared_weights: list[list[torch.Tensor]] = [[] for _ in self.shared]

        def behind_shared(plan: SegmentPlan, own: torch.Tensor) -> torch.Tensor:
            return self._attend_chain(plan, layer, own, shared_scores, shared_weights, window, softcap)

        result = self._every(layer, queries, window, softcap, behind_shared)
        for item, (_, values), weights in zip(self.shared, shared, shared_weights, strict=True):
            added = torch.bmm(torch.cat(weights, dim=1), values)
            start = 0
            for member in item.members:
                rows = slice(member.start * self.group, member.stop * self.group)
                count = rows.stop - rows.start
                result[:, rows] += added[:, start : start + count]
                start += count
        return result

    def _attend_parts(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """:meth:`attend` with the fused kernel over every shared extent, then over every segment's own one."""
        read = []
        for item in self.shared:
            keys, values = item.extent.read(layer, item.rows).unbind(0)
            read.append(attend_part(self._gather(queries, item.members), keys, values))

        def behind_shared(plan: SegmentPlan, own: torch.Tensor) -> torch.Tensor:
            mask = plan.folded_mask(self.group, queries.dtype, queries.device)
            keys, values = plan.own.read(layer, plan.keys).unbind(0)
            parts = [read[number].rows(rows) for number, rows in self._reads[id(plan)]]
            return join([*parts, attend_part(own, keys, values, mask)])

        return self._every(layer, queries, None, None, behind_shared)

    def _every(
        self,
        layer: int,
        queries: torch.Tensor,
        window: int | None,
        softcap: float | None,
        behind_shared: Callable[[SegmentPlan, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """All segments' rows at their places in the pass; ``behind_shared`` computes those that read shared extents."""
        bundled = window is None and softcap is None
        out = []
        for plan in self._others:
            bundle = self._bundles.get(id(plan)) if bundled else None
            if bundle is not None:
                out.append(bundle.attend(plan, layer, queries))
                continue
            own = self._fold(queries, plan.rows)
            if plan.runs:
                out.append(behind_shared(plan, own))
            else:
                out.append(self._attend_own(plan, layer, own, window, softcap))
        return self._together(out, queries)

    def _together(self, parts: list[torch.Tensor], queries: torch.Tensor) -> torch.Tensor:
        """The segments' rows at their places in the pass."""
        if len(parts) == len(self.segments):
            return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        result = torch.empty_like(queries)
        for plan, part in zip(self._others, parts, strict=True):
            result[:, plan.rows.start * self.group : plan.rows.stop * self.group] = part
        return result

    # -- planning -------------------------------------------------------------------------------------------

    def _choose(self, rows: int) -> None:
        """Which loops serve which segments of a pass of so many rows."""
        readers = Counter(id(extent) for plan in self.segments for extent, _ in plan.runs)
        tiles = tile_attention.available(self.segments[0].own.shape)
        tiled: list[SegmentPlan] = []
        served: list[SegmentPlan] = []
        self._others = []
        for plan in self.segments:
            shared = any(readers[id(extent)] > 1 for extent, _ in plan.runs)
            if tiles and tile_attention.serves(plan):
                tiled.append(plan)
            elif serves(plan, shared, has_tiles()):
                served.append(plan)
            else:
                self._others.append(plan)
        self._tiles = TileAttention(tiled, self.group) if tiled else None
        self._compiled = CompiledRows(served, rows, self.group) if served else None

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
        keys, values = plan.own.read(layer, plan.keys).unbind(0)
        count = plan.count
        if self._is_fused(plan) and window is None and softcap is None:
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
            blocks.append(torch.bmm(self._softmax(scores), values[:, :seen]))
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
        keys, values = plan.own.read(layer, plan.keys).unbind(0)
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

    def _is_small(self, plan: SegmentPlan) -> bool:
        """Whether the operations' overhead outweighs their work."""
        return plan.keys <= SMALL_KEYS and plan.count <= SMALL_ROWS

    def _is_fused(self, plan: SegmentPlan) -> bool:
        """Whether torch's fused kernel is faster than separate products."""
        return self._is_small(plan) or _fuses(plan.own.shape)

    # -- rows -----------------------------------------------------------------------------------------------

    def _fold(self, queries: torch.Tensor, rows: slice) -> torch.Tensor:
        if len(self.segments) == 1:
            return queries
        return queries[:, rows.start * self.group : rows.stop * self.group]

    def _gather(self, queries: torch.Tensor, members: list[slice]) -> torch.Tensor:
        parts = [self._fold(queries, member) for member in members]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


@cache
def has_tiles() -> bool:
    """Whether the processor multiplies matrices of bf16 in tiles (AMX)."""
    known = getattr(
        torch.cpu, "_is_amx_tile_supported", None
    )  # other versions of torch may have another name
    return known is not None and bool(known())


def _fuses(shape: KeyValueShape) -> bool:
    """Whether torch's fused kernel is faster than separate products for any number of rows and keys."""
    return has_tiles() and shape.dtype == torch.bfloat16 and shape.device.type == "cpu"


def _cap(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap
