"""Attention by torch's products, for the segments of a pass that no compiled loop serves, on any device.

The query heads of a group are folded into rows, so that keys and values are never repeated: queries are
``[kv_heads, rows * group, head_dim]``, with row ``r`` of head ``g`` at ``r * group + g``. The number of keys read is
rounded up to :data:`~specrag.engine.kv.ROW_UNIT`, and the surplus is masked.

An extent that several segments read is read once, for the rows of all of them. Where torch's fused kernel is faster,
attention over shared extents and over a segment's own extent is computed in parts and joined: from each part's weighted
mean of values and the logarithm of its sum of exponentials follows the attention over all keys (Dao et al. 2022,
FlashAttention, section 3.1). Every part is then read in place, and no score matrix is built.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

from specrag.engine.attention.segments import SMALL_KEYS, SegmentPlan, find_shared, readable
from specrag.engine.kv import ROW_UNIT, KeyValueShape

#: Rows of one attention product; bounds the score matrix to BLOCK_ROWS * keys * heads numbers.
BLOCK_ROWS = 128

#: Up to this many rows, and up to SMALL_KEYS keys, torch's fused attention is faster than separate products (two Zen 4
#: cores: 21 against 43 microseconds for one row and 128 keys, break-even at 512 keys or 16 rows). If the processor has
#: matrix tiles, it is always faster (two Xeon cores: 512 rows behind 512 keys 2.1 against 8.3 milliseconds).
SMALL_ROWS = 8


class TorchAttention:
    """Attention by torch's products, for some or all segments of a pass.

    Args:
        plans: the segments, in row order.
        rows: of the whole pass.
        group: query heads for each key/value head.

    Attributes:
        shared: the extents that several of the segments read.
    """

    def __init__(self, plans: Sequence[SegmentPlan], rows: int, group: int) -> None:
        self._plans = plans
        self._rows = rows
        self._whole = sum(plan.count for plan in plans) == rows
        self._group = group
        self._memory: dict[int, torch.Tensor] = {}
        self._bundles: dict[int, Bundle] = {}
        self.shared, self._reads = find_shared(plans, group)
        self._find_bundles()

    def attend(
        self, layer: int, queries: torch.Tensor, *, window: int | None = None, softcap: float | None = None
    ) -> torch.Tensor:
        """Attention over keys and values already written.

        Args:
            layer: index of the layer.
            queries: ``[kv_heads, rows * group, head_dim]``, already scaled.
            window: a row sees this many positions, itself included; ``None`` for all.
            softcap: scores pass ``softcap * tanh(score / softcap)``; ``None`` for no cap.

        Returns:
            ``[kv_heads, rows * group, head_dim]``; rows of other segments are undefined.
        """
        if window is None and softcap is None and self.shared and _fuses(self._plans[0].own.shape):
            return self._attend_parts(layer, queries)
        shared = [item.extent.read(layer, item.rows).unbind(0) for item in self.shared]
        shared_scores = [
            _cap(torch.bmm(self._gather(queries, item.members), keys.transpose(1, 2)), softcap)
            for item, (keys, _) in zip(self.shared, shared, strict=True)
        ]
        shared_weights: list[list[torch.Tensor]] = [[] for _ in self.shared]

        def behind_shared(plan: SegmentPlan, own: torch.Tensor) -> torch.Tensor:
            return self._attend_chain(plan, layer, own, shared_scores, shared_weights, window, softcap)

        result = self._attend_each(layer, queries, window, softcap, behind_shared)
        for item, (_, values), weights in zip(self.shared, shared, shared_weights, strict=True):
            added = torch.bmm(torch.cat(weights, dim=1), values)
            start = 0
            for member in item.members:
                rows = slice(member.start * self._group, member.stop * self._group)
                count = rows.stop - rows.start
                result[:, rows] += added[:, start : start + count]
                start += count
        return result

    def _attend_parts(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """:meth:`attend` with the fused kernel: over every shared extent, then over every segment's own extent."""
        read = []
        for item in self.shared:
            keys, values = item.extent.read(layer, item.rows).unbind(0)
            read.append(attend_part(self._gather(queries, item.members), keys, values))

        def behind_shared(plan: SegmentPlan, own: torch.Tensor) -> torch.Tensor:
            mask = plan.folded_mask(self._group, queries.dtype, queries.device)
            keys, values = plan.own.read(layer, plan.keys).unbind(0)
            parts = [read[number].rows(rows) for number, rows in self._reads[id(plan)]]
            return join([*parts, attend_part(own, keys, values, mask)])

        return self._attend_each(layer, queries, None, None, behind_shared)

    def _attend_each(
        self,
        layer: int,
        queries: torch.Tensor,
        window: int | None,
        softcap: float | None,
        behind_shared: Callable[[SegmentPlan, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """All segments' rows at their places in the pass; ``behind_shared`` serves those that read shared extents."""
        bundled = window is None and softcap is None
        out = []
        for plan in self._plans:
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
        if self._whole:
            return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        result = torch.empty_like(queries)
        for plan, part in zip(self._plans, parts, strict=True):
            result[:, plan.rows.start * self._group : plan.rows.stop * self._group] = part
        return result

    def _find_bundles(self) -> None:
        """Group the sessions with one row and few keys by their number of keys."""
        alike: dict[int, list[SegmentPlan]] = {}
        for plan in self._plans:
            if self._is_small(plan) and plan.count == 1 and not plan.runs and not plan.written:
                alike.setdefault(plan.keys, []).append(plan)
        for plans in alike.values():
            if len(plans) > 1:
                self._bundles.update(dict.fromkeys(map(id, plans), Bundle(plans, self._group)))

    # -- one segment ----------------------------------------------------------------------------------------

    def _attend_own(
        self, plan: SegmentPlan, layer: int, queries: torch.Tensor, window: int | None, softcap: float | None
    ) -> torch.Tensor:
        """A session whose keys all lie in its own extent."""
        keys, values = plan.own.read(layer, plan.keys).unbind(0)
        count = plan.count
        if self._is_fused(plan) and window is None and softcap is None:
            mask = plan.folded_mask(self._group, queries.dtype, queries.device)
            return F.scaled_dot_product_attention(
                queries[None], keys[None], values[None], attn_mask=mask, scale=1.0
            )[0]
        blocks = []
        for start in range(0, count, BLOCK_ROWS):
            rows = slice(start, min(start + BLOCK_ROWS, count))
            # A chain's earlier rows do not see the later ones: leave those keys out.
            seen = plan.keys
            if plan.ancestors is None:
                seen = readable(-(-(plan.offset + rows.stop) // ROW_UNIT) * ROW_UNIT, plan.keys)
            block = queries[:, rows.start * self._group : rows.stop * self._group]
            scores = self._scores(block, keys[:, :seen], softcap)
            plan.hide(scores, self._group, window, rows)
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
        plan.hide(own, self._group, window, rows)
        parts = [shared_scores[number][:, rows] for number, rows in self._reads[id(plan)]]
        if window is not None:
            masks = plan.windows(window)
            parts = [
                (part.unflatten(1, (-1, self._group)) + mask[:, None]).flatten(1, 2)
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

        Matrices of megabytes allocated in every layer go back to the system each time, and the page faults then take
        as long as the products (measured: 64 rows behind 1,024 keys, 1.45 against 0.62 ms a layer).
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
        if rows.stop - rows.start == self._rows:
            return queries
        return queries[:, rows.start * self._group : rows.stop * self._group]

    def _gather(self, queries: torch.Tensor, members: list[slice]) -> torch.Tensor:
        parts = [self._fold(queries, member) for member in members]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


class Bundle:
    """Sessions with one new row each and few keys, served together by one call of torch's fused kernel.

    Their keys and values are copied side by side, which costs less than a call for each.
    """

    def __init__(self, plans: list[SegmentPlan], group: int) -> None:
        self._plans = plans
        self._places = {id(plan): place for place, plan in enumerate(plans)}
        self._group = group
        self._keys = plans[0].keys
        shape = plans[0].own.shape
        rows = torch.tensor([plan.rows.start for plan in plans], device=shape.device)
        last = torch.tensor([plan.offset for plan in plans], device=shape.device)
        self._rows = rows
        hidden = torch.arange(self._keys, device=shape.device)[None] > last[:, None]
        mask = torch.zeros(hidden.shape, dtype=shape.dtype, device=shape.device)
        self._mask = mask.masked_fill_(hidden, float("-inf"))[:, None, None]
        self._layer = -1
        self._out: torch.Tensor | None = None

    def attend(self, plan: SegmentPlan, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """This session's ``[kv_heads, group, head_dim]``; the first call in a layer computes all sessions."""
        if self._layer != layer or self._out is None:
            both = torch.stack([other.own.read(layer, self._keys) for other in self._plans], dim=1)
            own = queries.unflatten(1, (-1, self._group)).index_select(1, self._rows).transpose(0, 1)
            self._out = F.scaled_dot_product_attention(own, both[0], both[1], attn_mask=self._mask, scale=1.0)
            self._layer = layer
        return self._out[self._places[id(plan)]]


class Part(NamedTuple):
    """Attention of some rows over part of their keys.

    Attributes:
        mixed: ``[kv_heads, rows, head_dim]``, the values under a softmax over this part alone.
        log_sum: fp32 ``[kv_heads, rows]``, the logarithm of the sum of the exponentials of the part's scores.
    """

    mixed: torch.Tensor
    log_sum: torch.Tensor

    def rows(self, rows: slice) -> Part:
        """Some of the rows."""
        return Part(self.mixed[:, rows], self.log_sum[:, rows])


def attend_part(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None = None
) -> Part:
    """Attention over one part of the keys, on the CPU.

    Args:
        queries: ``[kv_heads, rows, head_dim]``, already scaled.
        keys: ``[kv_heads, keys, head_dim]``; ``values`` alike.
        mask: added to the scores, ``[rows, keys]``; every row sees at least one key.
    """
    mixed, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        queries[None], keys[None], values[None], 0.0, False, attn_mask=mask, scale=1.0
    )
    return Part(mixed[0], log_sum[0])


def join(parts: Sequence[Part]) -> torch.Tensor:
    """The attention over the keys of all parts: ``[kv_heads, rows, head_dim]``."""
    shares = torch.softmax(torch.stack([part.log_sum for part in parts]), dim=0)
    mixed = torch.stack([part.mixed for part in parts])
    joined: torch.Tensor = (mixed * shares[..., None]).sum(dim=0).to(mixed.dtype)
    return joined


@cache
def has_tiles() -> bool:
    """Whether the processor multiplies matrices of bf16 in tiles (AMX)."""
    # Other versions of torch may have another name.
    known = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return known is not None and bool(known())


def _fuses(shape: KeyValueShape) -> bool:
    """Whether torch's fused kernel is faster than separate products for any number of rows and keys."""
    return has_tiles() and shape.dtype == torch.bfloat16 and shape.device.type == "cpu"


def _cap(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap
