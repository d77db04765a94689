"""Many sessions of one new row each, served by one call."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from specrag.engine.segment_plan import SegmentPlan


class Bundle:
    """Sessions with one new row each and few keys: one call of torch's fused kernel serves them all.

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
        """This session's ``[kv_heads, group, head_dim]``; the first one asked computes all."""
        if self._layer != layer or self._out is None:
            both = torch.stack([other.own.read(layer, self._keys) for other in self._plans], dim=1)
            own = queries.unflatten(1, (-1, self._group)).index_select(1, self._rows).transpose(0, 1)
            self._out = F.scaled_dot_product_attention(own, both[0], both[1], attn_mask=self._mask, scale=1.0)
            self._layer = layer
        return self._out[self._places[id(plan)]]
