"""Batch-invariant attention by both loops: against torch's products, and a token's bits however it is read."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specrag.engine import NOTHING, KeyValueCache, Segment
from specrag.engine.attention import compiled
from specrag.engine.attention.plan import AttentionPlan
from specrag.engine.cpu import bf16_attention
from specrag.engine.cpu.threads import openmp
from tests.engine.test_compiled_rows import TREE, Pass, close, numbers


def need_products() -> None:
    if not bf16_attention.available(64):
        pytest.skip("this processor has no bf16 products in AVX-512")


@pytest.fixture(params=["bf16 products", "multiply-adds for them", "float32"])
def loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which loop serves heads of 64 and 128 numbers."""
    if request.param == "float32":
        monkeypatch.setattr(bf16_attention, "available", lambda _: False)
    else:
        need_products()
        monkeypatch.setattr(bf16_attention, "is_fused", lambda: request.param != "bf16 products")
    return str(request.param)


def attend(made: Pass, window: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The loop's answer and torch's to one pass."""
    rows, shape = sum(len(segment.tokens) for segment in made.segments), made.shape
    queries = numbers(made.random, rows, shape.kv_heads * made.group, shape.head_dim) * shape.head_dim**-0.5
    new = numbers(made.random, 2, rows, shape.kv_heads, shape.head_dim)
    answers = []
    for invariant in (True, False):
        plan = AttentionPlan(made.segments, made.group, invariant=invariant)
        plan.write(0, *new)
        answers.append(plan.attend_rows(0, queries, window=window))
    return answers[0], answers[1]


# Groups whose rows fill the threes and sixes of the bf16 loop, and groups that leave some of them empty.
@pytest.mark.parametrize(("kv_heads", "group", "head_dim"), [(3, 3, 64), (2, 6, 128), (1, 4, 64), (2, 1, 96)])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.usefixtures("loop")
def test_it_is_attention(kv_heads: int, group: int, head_dim: int, window: int | None) -> None:
    made = Pass(kv_heads, group, head_dim)
    for length in (0, 1, 30, 31, 32, 33, 250):
        made.add(made.cache(length), 1, None)
        made.add(made.cache(length), 40, None)
        made.add(made.cache(length), len(TREE), TREE)
    close(*attend(made, window))


@pytest.mark.parametrize(("kv_heads", "group", "head_dim"), [(3, 3, 64), (2, 6, 128)])
def test_multiply_adds_have_the_bits_of_bf16_products(
    monkeypatch: pytest.MonkeyPatch, kv_heads: int, group: int, head_dim: int
) -> None:
    need_products()
    answers = []
    for fused in (False, True):
        monkeypatch.setattr(bf16_attention, "is_fused", lambda fused=fused: fused)
        made = Pass(kv_heads, group, head_dim)
        for length in (1, 33, 700):
            made.add(made.cache(length), 1, None)
            made.add(made.cache(length), 40, None)
            made.add(made.cache(length), len(TREE), TREE)
        answers.append(attend(made)[0])
    assert torch.equal(*answers)


@pytest.mark.usefixtures("loop")
def test_what_the_buffers_held_before_changes_nothing() -> None:
    """Behind the last key lies whatever the memory held, which may be no number at all."""
    made = Pass(2, 3, 64)
    cache = made.cache(37)
    made.add(cache, 1, None)
    clean, _ = attend(made)
    assert cache.own is not None
    cache.own.layers[0][:, :, 38:] = float("nan")
    made = Pass(2, 3, 64)
    made.cache(37)  # draws what the first did
    made.add(cache, 1, None)
    found, _ = attend(made)
    assert torch.equal(found, clean)


@pytest.mark.usefixtures("loop")
def test_threads_share_the_work_and_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    if openmp() is None:
        pytest.skip("torch has no GNU OpenMP here")
    monkeypatch.setattr(compiled, "SHARED_WORK", 0)
    before = torch.get_num_threads()
    answers = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            made = Pass(3, 3, 64)
            for length in (0, 250, 31):
                made.add(made.cache(length), 40, None)
                made.add(made.cache(length), len(TREE), TREE)
            answers.append(attend(made)[0])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*answers)


@pytest.mark.parametrize(("kv_heads", "group", "head_dim"), [(3, 3, 64), (2, 6, 128), (1, 4, 64)])
@pytest.mark.usefixtures("loop")
def test_a_token_has_the_same_bits_in_a_prompt_a_tree_and_alone(
    kv_heads: int, group: int, head_dim: int
) -> None:
    length, count = 317, 40
    random = torch.Generator().manual_seed(3)
    keys = numbers(random, length + count, kv_heads, head_dim)
    values = numbers(random, length + count, kv_heads, head_dim)
    queries = numbers(random, length + count, kv_heads * group, head_dim) * 0.2

    def read(cache: KeyValueCache, first: int, last: int, *, tree: bool = False) -> torch.Tensor:
        """Answers of tokens ``first`` to ``last``; as a tree, each has a sibling before it that it does not see."""
        if not tree:
            places, parents = list(range(first, last)), None
        else:
            places = [place for token in range(first, last) for place in (0, token)]
            parents = [parent for number in range(last - first) for parent in [2 * number - 1] * 2]
        plan = AttentionPlan(
            [Segment(cache, [0] * len(places), parents, [NOTHING] * len(places))], group, invariant=True
        )
        plan.write(0, keys[places], values[places])
        answer = plan.attend_rows(0, queries[places])
        return answer[1::2] if tree else answer

    shape = Pass(kv_heads, group, head_dim).shape
    prompt = KeyValueCache(shape)
    whole = read(prompt, 0, length + count)
    assert np.isfinite(whole.float().numpy()).all()
    pieces = KeyValueCache(shape)
    for first, last in ((0, 7), (7, length)):
        assert torch.equal(read(pieces, first, last), whole[first:last])
        pieces.accept(range(last - first))
    assert torch.equal(read(pieces, length, length + count, tree=True), whole[length:])
    for token in range(length, length + count):
        assert torch.equal(read(pieces, token, token + 1)[0], whole[token])
        pieces.accept([0])
