"""Attention over the rows of a packed pass: trees, many sessions, shared prefixes.

All rows of a pass lie side by side. Each segment attends to its own chain of extents and, under a mask that
follows the tree, to its own rows. torch's products can serve any segment on any device; on the CPU in bf16, compiled
loops serve the segments for which they are faster, and everything that must be batch invariant.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from specrag.engine.attention import compiled as compiled_rows
from specrag.engine.attention import products, tiles
from specrag.engine.attention.segments import SegmentPlan
from specrag.engine.cpu.amx import empty_rows
from specrag.engine.passes import Segment


class AttentionPlan:
    """The attention of one pass: what is the same in every layer, and which backend serves which segment.

    Args:
        segments: the pass's segments, in row order; their caches are :class:`KeyValueCache`.
        group: query heads for each key/value head.
        invariant: give a row the same bits whatever else is in the pass.
        compiled: let compiled loops serve the segments for which they are faster (:meth:`attend_rows`); for models
            without windows and caps, where the loops are available.

    Attributes:
        positions: of each row in its sequence.
        products: serves the segments that no compiled loop serves.
    """

    def __init__(
        self, segments: Sequence[Segment], group: int, *, invariant: bool = False, compiled: bool = False
    ) -> None:
        self.group = group
        self.segments: list[SegmentPlan] = []
        first = 0
        for segment in segments:
            self.segments.append(SegmentPlan.of(segment, first))
            first += len(segment.tokens)
        self.positions = [position for plan in self.segments for position in plan.positions]
        shape = self.segments[0].own.shape
        self._writer = compiled_rows.Writer(self.segments) if compiled_rows.has_loops(shape) else None
        self._compiled: compiled_rows.CompiledRows | None = None
        self._tiles: tiles.TileAttention | None = None
        self._invariant: compiled_rows.InvariantRows | None = None
        #: The segments that torch's products serve.
        self._others = self.segments
        if invariant:
            self._invariant, self._others = compiled_rows.InvariantRows(self.segments, group), []
        elif compiled:
            self._choose(first)
        self.products = products.TorchAttention(self._others, first, group)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the pass's keys and values, ``[rows, kv_heads, head_dim]`` each, behind their sessions."""
        if self._writer is not None:
            self._writer.write(layer, keys, values)
            return
        fresh = torch.stack([keys, values]).transpose(1, 2)  # [2, kv_heads, rows, head_dim]
        for plan in self.segments:
            plan.own.write(layer, plan.offset, fresh[:, :, plan.rows])

    def attend_rows(self, layer: int, queries: torch.Tensor, *, window: int | None = None) -> torch.Tensor:
        """Attention of all rows, after :meth:`write`, by the fastest backend for each segment.

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
        """Attention by torch's products, after :meth:`write`; see ``products.py``."""
        return self.products.attend(layer, queries, window=window, softcap=softcap)

    def _choose(self, rows: int) -> None:
        """Choose which loops serve which segments of a pass of ``rows`` rows."""
        readers = Counter(id(extent) for plan in self.segments for extent, _ in plan.runs)
        has_tiles = tiles.available(self.segments[0].own.shape)
        tiled: list[SegmentPlan] = []
        served: list[SegmentPlan] = []
        self._others = []
        for plan in self.segments:
            shared = any(readers[id(extent)] > 1 for extent, _ in plan.runs)
            if has_tiles and tiles.serves(plan):
                tiled.append(plan)
            elif compiled_rows.serves(plan, shared, products.has_tiles()):
                served.append(plan)
            else:
                self._others.append(plan)
        self._tiles = tiles.TileAttention(tiled, self.group) if tiled else None
        self._compiled = compiled_rows.CompiledRows(served, rows, self.group) if served else None
