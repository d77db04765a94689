"""The compiled attention against torch's products, and against a plain softmax in float64."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from specrag.engine.attention import compiled as compiled_rows
from specrag.engine.attention import compiled as shared_loop
from specrag.engine.attention import products as attention
from specrag.engine.attention import tiles as tile_attention
from specrag.engine.attention.plan import AttentionPlan
from specrag.engine.cpu import row_attention as attention_kernel
from specrag.engine.cpu.threads import openmp
from specrag.engine.kv import KeyValueCache, KeyValueShape
from specrag.engine.outputs import NOTHING
from specrag.engine.passes import Segment

ROOT = Path(__file__).resolve().parents[2]

#: Heads that share keys, and their size: the embedded models', and one that fits no block of the loops.
SHAPES = [(3, 3, 64), (2, 6, 128), (1, 4, 6)]
TREE = [-1, -1, 0, 0, 2, 1, 4]


def numbers(generator: torch.Generator, *size: int) -> torch.Tensor:
    return torch.randn(size, generator=generator).bfloat16()


class Pass:
    """Sessions whose keys and values are drawn at random, and one pass over them."""

    def __init__(
        self, kv_heads: int, group: int, head_dim: int, seed: int = 0, *, int8: bool = False
    ) -> None:
        self.shape = KeyValueShape(1, kv_heads, head_dim, torch.bfloat16, torch.device("cpu"), int8)
        self.group = group
        self.random = torch.Generator().manual_seed(seed)
        self.segments: list[Segment] = []

    def cache(self, length: int) -> KeyValueCache:
        cache = KeyValueCache(self.shape)
        if length:
            self.fill(cache, length)
            cache.accept(range(length))
        return cache

    def fill(self, cache: KeyValueCache, rows: int) -> None:
        """Keys and values of rows behind the cache's length, not yet accepted."""
        plan = AttentionPlan([Segment(cache, [0] * rows, None, [NOTHING] * rows)], self.group)
        size = (rows, self.shape.kv_heads, self.shape.head_dim)
        plan.write(0, numbers(self.random, *size), numbers(self.random, *size))

    def add(self, cache: KeyValueCache, count: int, parents: list[int] | None, written: int = 0) -> None:
        self.segments.append(Segment(cache, [0] * count, parents, [NOTHING] * count, written=written))

    def attend(self) -> tuple[torch.Tensor, torch.Tensor, AttentionPlan]:
        """The compiled answer, torch's, and the compiled plan."""
        rows, shape = sum(len(segment.tokens) for segment in self.segments), self.shape
        heads = shape.kv_heads * self.group
        # As in a model, keys lie behind the queries in one matrix: rows are further apart than heads say.
        packed = numbers(self.random, rows, heads + shape.kv_heads, shape.head_dim)
        values = numbers(self.random, rows, 2 * shape.kv_heads, shape.head_dim)[:, : shape.kv_heads]
        queries = packed[:, :heads] * shape.head_dim**-0.5
        answers = []
        for compiled in (True, False):
            plan = AttentionPlan(self.segments, self.group, compiled=compiled)
            plan.write(0, packed[:, heads:], values)
            answers.append((plan.attend_rows(0, queries), plan))
        assert answers[1][1]._compiled is None
        return answers[0][0], answers[1][0], answers[0][1]


def close(left: torch.Tensor, right: torch.Tensor) -> None:
    torch.testing.assert_close(left.float(), right.float(), atol=0.02, rtol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "int8"),
    [(*shape, False) for shape in SHAPES] + [(*shape, True) for shape in [*SHAPES[:2], (1, 4, 8)]],
)
def test_many_sessions_of_all_kinds_in_one_pass(kv_heads: int, group: int, head_dim: int, int8: bool) -> None:
    made = Pass(kv_heads, group, head_dim, int8=int8)
    for length in (0, 1, 3, 17, 250):
        made.add(made.cache(length), 1, None)
        made.add(made.cache(length), 4, None)
        made.add(made.cache(length), len(TREE), TREE)
    parent = made.cache(33)
    for length in (33, 20):
        child = parent.fork(length)
        made.add(child, 2, [-1, -1])
        grown = parent.fork(length)
        made.fill(grown, 5)
        grown.accept(range(5))
        made.add(grown, 1, None)
    half = made.cache(40)
    made.fill(half, 3)  # a tree of which an earlier pass wrote the first rows
    made.add(half, len(TREE) - 3, TREE, written=3)
    found, right, plan = made.attend()
    assert plan._compiled is not None
    assert not plan._others
    close(found, right)


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_threads_share_the_work_and_change_no_bit(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    if openmp() is None:
        pytest.skip("torch has no GNU OpenMP here")
    monkeypatch.setattr(shared_loop, "SHARED_WORK", 0)
    made = Pass(3, 3, 64)
    for length in (0, 3, 250, 31, 90):
        made.add(made.cache(length), 1, None)
        made.add(made.cache(length), len(TREE), TREE)
    before = torch.get_num_threads()
    answers = []
    try:
        for number in (1, threads):
            torch.set_num_threads(number)
            made.random.manual_seed(0)
            answer, _, plan = made.attend()
            assert plan._compiled is not None
            assert plan._compiled.loop.parts == number
            answers.append(answer)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*answers)


def test_parts_of_the_work_are_about_equal_and_complete() -> None:
    for work in ([5, 5, 5, 5], [1, 1, 1, 97], [97, 1, 1, 1], [3], [2, 2]):
        for parts in (1, 2, 3):
            borders = list(shared_loop.borders(np.array(work), parts))
            assert (borders[0], borders[-1], len(borders)) == (0, len(work), parts + 1)
            assert borders == sorted(borders)
            heaviest = max(sum(work[start:end]) for start, end in pairwise(borders))
            assert heaviest <= sum(work) / parts + max(work)


def test_hidden_scores_weigh_nothing_and_no_weight_is_subnormal() -> None:
    """Some processors compute with subnormal numbers a hundred times slower."""
    scores = np.array([0.5, attention_kernel._HIDDEN, 0.0, -60.0, -75.0, -90.0, -1000.0], dtype=np.float32)
    exact = np.exp(scores.astype(np.float64))
    exact /= exact.sum()
    attention_kernel.softmax(scores)
    assert list(scores[[1, 4, 5, 6]]) == [0.0] * 4
    np.testing.assert_allclose(scores[[0, 2, 3]], exact[[0, 2, 3]], rtol=1e-5)


def test_what_torch_is_faster_for_is_left_to_it_in_the_same_pass() -> None:
    made = Pass(3, 3, 64)
    made.add(made.cache(500), 300, None)  # a prompt
    made.add(made.cache(40), 1, None)
    shared = made.cache(3_000)
    made.add(shared.fork(3_000), 3, [-1, -1, 0])
    made.add(shared.fork(3_000), 1, None)
    made.add(made.cache(5_000), 1, None)  # long, but one row
    made.add(made.cache(5_000).fork(5_000), 1, None)  # a fork that nobody else reads
    made.add(made.cache(10), 65, [-1] * 65)  # more rows than a mask tells
    both = made.cache(5_000)
    made.add(both.fork(5_000), 1, None)  # one product serves two forks
    made.add(both.fork(5_000), 1, None)
    found, right, plan = made.attend()
    prompts = [] if tile_attention.available(made.shape) else [300]
    assert [each.count for each in plan._others] == [*prompts, 3, 65, 1, 1]
    close(found, right)


@pytest.mark.parametrize(("tiles", "left"), [(False, [5, 9]), (True, [2, 4, 5, 2, 8, 9])])
def test_few_rows_behind_much_are_left_to_torch_only_if_it_has_tiles(
    monkeypatch: pytest.MonkeyPatch, tiles: bool, left: list[int]
) -> None:
    monkeypatch.setattr(attention, "has_tiles", lambda: tiles)
    monkeypatch.setattr(tile_attention, "available", lambda _: False)
    made = Pass(3, 3, 64)
    for count in (2, 4, 5):
        made.add(made.cache(5_000), count, None)
    for count in (2, 8, 9):
        made.add(made.cache(5_000).fork(5_000), count, [-1] * count)
    found, right, plan = made.attend()
    assert [each.count for each in plan._others] == left
    close(found, right)


def test_it_is_attention_to_the_last_bit_of_bf16() -> None:
    """Against float64: the loops compute in float32 and round once."""
    made = Pass(2, 3, 64)
    cache = made.cache(100)
    made.add(cache, 1, None)
    queries = numbers(made.random, 1, 6, 64) * 0.2
    plan = AttentionPlan(made.segments, 3, compiled=True)
    new = numbers(made.random, 1, 2, 64)
    plan.write(0, new, new)
    found = plan.attend_rows(0, queries).view(6, 64)
    assert cache.own is not None
    keys, values = (part[:, :101].double().numpy() for part in cache.own.layers[0])
    for head in range(6):
        scores = keys[head // 3] @ queries[0, head].double().numpy()
        weights = np.exp(scores - scores.max())
        exact = torch.from_numpy(weights / weights.sum() @ values[head // 3])
        # Half a unit in the last of 8 bits, and a little for float32.
        assert (
            float(((found[head].double() - exact).abs() / exact.abs().clamp(min=1e-3)).max()) < 2**-8 * 1.02
        )


def test_a_row_is_the_same_whatever_else_is_in_the_pass() -> None:
    alone, beside = Pass(3, 3, 64), Pass(3, 3, 64)
    answers = []
    for made, others in ((alone, 0), (beside, 6)):
        made.add(made.cache(77), 1, None)
        queries = numbers(made.random, 1, 9, 64)
        for number in range(others):
            made.add(made.cache(10 * number), 1 + number % 3, None)
        rows = sum(len(segment.tokens) for segment in made.segments)
        plan = AttentionPlan(made.segments, 3, compiled=True)
        plan.write(0, torch.ones(rows, 3, 64).bfloat16(), torch.ones(rows, 3, 64).bfloat16())
        answers.append(plan.attend_rows(0, torch.cat([queries] * rows))[0])
    assert torch.equal(*answers)


@pytest.mark.slow
def test_scores_of_any_size_give_a_softmax() -> None:
    for scale in (0.0, 1.0, 300.0):
        made = Pass(1, 4, 64)
        cache = made.cache(20)
        made.add(cache, 1, None)
        plan = AttentionPlan(made.segments, 4, compiled=True)
        plan.write(0, torch.zeros(1, 1, 64).bfloat16(), torch.ones(1, 1, 64).bfloat16())
        assert cache.own is not None
        cache.own.layers[0][1] = 1.0  # equal values: any weights that add up to one give them back
        out = plan.attend_rows(0, scale * numbers(made.random, 1, 4, 64)).float()
        assert torch.isfinite(out).all()
        torch.testing.assert_close(out, torch.ones_like(out), atol=0.005, rtol=0)


def test_only_bf16_on_a_processor() -> None:
    cpu = torch.device("cpu")
    assert compiled_rows.has_loops(KeyValueShape(1, 1, 64, torch.bfloat16, cpu))
    assert not compiled_rows.has_loops(KeyValueShape(1, 1, 64, torch.float32, cpu))
    assert not compiled_rows.has_loops(KeyValueShape(1, 1, 64, torch.bfloat16, torch.device("meta")))


def test_rows_are_written_where_their_sessions_end() -> None:
    made = Pass(2, 2, 8)
    lengths = [0, 5, 16, 40]
    caches = [made.cache(length) for length in lengths]
    for cache, count in zip(caches, (3, 1, 2, 7), strict=True):
        made.add(cache, count, None)
    before = [None if cache.own is None else cache.own.layers[0].clone() for cache in caches]
    plan = AttentionPlan(made.segments, 2)
    keys, values = numbers(made.random, 13, 2, 8), numbers(made.random, 13, 2, 8)
    plan.write(0, keys, values)
    borders = np.cumsum([0, 3, 1, 2, 7])
    for cache, length, old, (start, end) in zip(caches, lengths, before, pairwise(borders), strict=True):
        assert cache.own is not None
        held = cache.own.layers[0][:, :, length : length + end - start]
        assert torch.equal(held[0], keys[start:end].transpose(0, 1))
        assert torch.equal(held[1], values[start:end].transpose(0, 1))
        if old is not None:
            assert torch.equal(cache.own.layers[0][:, :, :length], old[:, :, :length])


_SOME_PASSES = """
from itertools import product

import torch

from specrag.engine.attention.plan import AttentionPlan
from tests.engine.test_compiled_rows import TREE, Pass, numbers

for seed, invariant in product(range(30), (False, True)):
    made = Pass(3, 3, 64, seed)
    made.add(made.cache(90), len(TREE), TREE)
    made.add(made.cache(10 * seed), 10, None)
    rows = sum(len(segment.tokens) for segment in made.segments)
    plan = AttentionPlan(made.segments, made.group, invariant=invariant, compiled=True)
    plan.write(0, numbers(made.random, rows, 3, 64), numbers(made.random, rows, 3, 64))
    out = plan.attend_rows(0, numbers(made.random, rows, 9, 64))
    print(out.view(torch.int16).numpy().tobytes().hex())
"""


@pytest.mark.slow
def test_a_loop_from_the_disk_gives_the_bits_of_a_fresh_one(tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", _SOME_PASSES]
    # The first process compiles the loops, the second fetches them.
    said = [
        subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
        for _ in range(2)
    ]
    assert list(tmp_path.rglob("*.nbc"))
    assert said[0] == said[1] != b""
