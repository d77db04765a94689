"""Attention with matrix tiles against a softmax in float64, and the independence of its rows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from specrag.engine.attention import tiles as tile_attention
from specrag.engine.attention.segments import SegmentPlan
from specrag.engine.attention.tiles import TileAttention
from specrag.engine.cpu.tile_attention import STRETCH
from specrag.engine.executor import run
from specrag.engine.kv import KeyValueCache, KeyValueShape
from specrag.engine.outputs import LOGITS, NOTHING
from specrag.engine.passes import Segment, gather
from specrag.engine.session import Session

from .test_kv import text, tiny_model

CPU = torch.device("cpu")


def shape_of(head_dim: int, kv_heads: int = 2) -> KeyValueShape:
    return KeyValueShape(2, kv_heads, head_dim, torch.bfloat16, CPU)


pytestmark = pytest.mark.skipif(
    not tile_attention.available(shape_of(64)), reason="this processor has no matrix tiles"
)


class Request:
    """A session of random keys and values.

    Args:
        pieces: sizes of the extents in front of its own one, then the rows that its own one holds.
        rows: of the pass.
    """

    def __init__(self, shape: KeyValueShape, pieces: Sequence[int], rows: int, seed: int) -> None:
        made = torch.Generator().manual_seed(seed)
        cache = KeyValueCache(shape)
        for size in pieces:
            if size:
                plan = self._plan(cache, size, 0)
                for layer in plan.own.layers:
                    layer.normal_(generator=made)
                cache.accept(range(size))
            cache = cache.fork(cache.length)
        self.cache, self.rows, self.shape, self.seed = cache, rows, shape, seed

    @staticmethod
    def _plan(cache: KeyValueCache, rows: int, first: int) -> SegmentPlan:
        return SegmentPlan.of(Segment(cache, [0] * rows, None, [NOTHING] * rows), first)

    def plan(self, first: int) -> SegmentPlan:
        plan = self._plan(self.cache, self.rows, first)
        made = torch.Generator().manual_seed(self.seed + 1000)
        for layer in plan.own.layers:  # what was never written is no number
            layer[:, :, plan.used :] = float("nan")
            layer[:, :, plan.offset : plan.used] = torch.randn(
                layer[:, :, plan.offset : plan.used].shape, generator=made
            ).bfloat16()
        return plan


def expected(plan: SegmentPlan, layer: int, queries: torch.Tensor, group: int) -> torch.Tensor:
    """``[rows, heads * head_dim]`` in float64."""
    pieces = [extent.layers[layer][:, :, :size] for extent, size in plan.runs]
    keys, values = torch.cat([*pieces, plan.own.layers[layer][:, :, : plan.used]], dim=2).double().unbind(0)
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    scores = queries.double().transpose(0, 1) @ keys.transpose(1, 2)
    hidden = torch.ones_like(scores, dtype=torch.bool).triu(keys.shape[1] - plan.count + 1)
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
    return (weights @ values).transpose(0, 1).flatten(1)


def attended(plans: Sequence[SegmentPlan], layer: int, queries: torch.Tensor, group: int) -> torch.Tensor:
    out = torch.full((queries.shape[0], queries[0].numel()), float("nan"), dtype=torch.bfloat16)
    TileAttention(plans, group).attend(layer, queries, out)
    return out


@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(
    ("pieces", "rows"),
    [
        ((), 16),
        ((), 77),
        ((5,), 32),
        ((70, 33), 49),
        ((STRETCH + 90, 1), 20),
        ((STRETCH - 16,), 16),
        ((1500,), 600),
    ],
)
def test_it_is_the_softmax_of_all_earlier_keys(
    head_dim: int, group: int, pieces: tuple[int, ...], rows: int
) -> None:
    shape = shape_of(head_dim)
    plan = Request(shape, pieces, rows, seed=rows).plan(3)
    made = torch.Generator().manual_seed(1)
    scale = 3 * head_dim**-0.5  # some rows see almost one key alone
    queries = (torch.randn(rows + 5, 2 * group, head_dim, generator=made) * scale).bfloat16()
    out = attended([plan], 1, queries, group)
    wanted = expected(plan, 1, queries[plan.rows], group)
    assert (out[plan.rows].double() - wanted).abs().max() < 0.03
    assert (out[plan.rows].double() - wanted).norm() / wanted.norm() < 2**-7
    assert torch.isnan(out[:3]).all()  # rows of other segments are left alone
    assert torch.isnan(out[rows + 3 :]).all()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_has_the_same_bits_whatever_else_is_in_the_pass(threads: int) -> None:
    """Several sessions of other lengths, any number of threads, and in parts: later rows change nothing."""
    shape, group = shape_of(64), 3
    requests = [Request(shape, (40 * number,), 20 + 31 * number, seed=number) for number in range(4)]
    plans, first = [], 0
    for request in requests:
        plans.append(request.plan(first))
        first += request.rows
    queries = (torch.randn(first, 6, 64, generator=torch.Generator().manual_seed(2)) / 8).bfloat16()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        together = attended(plans, 0, queries, group)
        for request, plan in zip(requests, plans, strict=True):
            alone = attended([request.plan(0)], 0, queries[plan.rows], group)
            assert torch.equal(together[plan.rows], alone)
    finally:
        torch.set_num_threads(before)


def test_huge_scores_overflow_nowhere() -> None:
    shape = shape_of(64)
    plan = Request(shape, (STRETCH,), 40, seed=5).plan(0)
    queries = (torch.randn(40, 2, 64, generator=torch.Generator().manual_seed(3)) * 1e4).bfloat16()
    out = attended([plan], 0, queries, 1)
    assert torch.isfinite(out).all()
    wanted = expected(plan, 0, queries, 1)
    assert (out.double() - wanted).abs().max() < 0.05


def test_a_model_reads_prompts_behind_shared_prefixes_with_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt in chunks, forks of it with tails of their own, and a single row, against the other ways to attend."""
    model = tiny_model(dtype=torch.bfloat16, head_dim=32)
    served: list[int] = []
    make = TileAttention.__init__

    def counted(self: TileAttention, plans: Sequence[SegmentPlan], group: int) -> None:
        served.extend(plan.count for plan in plans)
        make(self, plans, group)

    monkeypatch.setattr(TileAttention, "__init__", counted)

    def answers() -> list[torch.Tensor]:
        parent = Session(model)
        rows = run(parent.extend(text(1, 150), LOGITS, chunk=64))
        children = [parent.fork() for _ in range(2)]
        tails = [text(2, 90), text(3, 20)]
        found = run(gather([child.extend(tail, LOGITS) for child, tail in zip(children, tails, strict=True)]))
        return [torch.as_tensor(row.logits).float() for each in (rows, *found) for row in each]

    with_tiles = answers()
    assert served == [64, 64, 21, 20, 90]  # the shorter tail is read first
    monkeypatch.setattr(tile_attention, "available", lambda _shape: False)
    for mine, other in zip(with_tiles, answers(), strict=True):
        assert (mine - other).norm() / other.norm() < 0.03
    assert len(served) == 5
