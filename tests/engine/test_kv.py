"""Keys and values: their size, what a fork shares, and that nobody writes where another reads."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from specrag.engine.attention.plan import AttentionPlan
from specrag.engine.executor import run
from specrag.engine.kv import COPIED_ROWS, GROWTH, ROW_UNIT, KeyValueCache, KeyValueShape
from specrag.engine.outputs import LOGITS, NOTHING, Row
from specrag.engine.passes import Segment, gather
from specrag.engine.session import Session
from specrag.models.decoder import LeanDecoder

SHAPE = KeyValueShape(layers=3, kv_heads=2, head_dim=8, dtype=torch.bfloat16, device=torch.device("cpu"))


@dataclass
class Tree:
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)


def tiny_model(seed: int = 0, *, head_dim: int = 8, dtype: torch.dtype = torch.float32) -> LeanDecoder:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=4 * head_dim,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    module = AutoModelForCausalLM.from_config(config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3 * (head_dim / 8) ** -0.5)
    return LeanDecoder(config, module.state_dict(), dtype=dtype, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def model() -> LeanDecoder:
    return tiny_model()


def text(seed: int, length: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, 61, length).tolist()
    return tokens


def prefilled(model: LeanDecoder, tokens: list[int]) -> Session:
    session = Session(model)
    run(session.extend(tokens))
    return session


def next_logits(session: Session) -> np.ndarray:
    rows = run(session.score(Tree(), LOGITS))
    assert rows[0].logits is not None
    return rows[0].logits


def close(row: Row, expected: np.ndarray) -> None:
    assert row.logits is not None
    np.testing.assert_allclose(row.logits, expected, atol=1e-4)


def fresh(model: LeanDecoder, tokens: list[int]) -> np.ndarray:
    return next_logits(prefilled(model, tokens))


def pointers(cache: KeyValueCache) -> set[int]:
    return {layer.data_ptr() for extent in cache.extents() for layer in extent.layers}


# --- size ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1_000, 7_500])
@pytest.mark.parametrize("prefill", [0, 900])
def test_the_size_is_near_the_exact_one(length: int, prefill: int) -> None:
    """After a reserved prefill, and growing token by token, at every length from 1,000 upwards."""
    exact = SHAPE.bytes_per_token
    assert exact == 2 * 3 * 2 * 8 * 2
    cache = KeyValueCache(SHAPE)
    if prefill:
        cache.reserve(prefill)
        cache.prepare(prefill)
        cache.accept(range(prefill))
        assert cache.nbytes <= exact * max(prefill + ROW_UNIT - 1, prefill * (1 + GROWTH))
    for now in range(prefill + 1, length + 1):
        cache.prepare(1)
        cache.accept([0])
        if now >= 1_000:
            assert exact * now <= cache.nbytes <= 1.1 * exact * now, now
    assert cache.nbytes == sum(layer.nbytes for extent in cache.extents() for layer in extent.layers)


@pytest.mark.parametrize("length", [1_000, 7_500])
def test_a_reserved_context_is_allocated_once_with_its_answer(length: int) -> None:
    cache = KeyValueCache(SHAPE)
    cache.reserve(length)
    places = set()
    for start in range(0, length, 512):
        rows = min(512, length - start)
        cache.prepare(rows)
        cache.accept(range(rows))
        places |= pointers(cache)
    for _ in range(length // 15):  # the answer
        cache.prepare(1)
        cache.accept([0])
        places |= pointers(cache)
    assert len(places) == SHAPE.layers
    assert cache.nbytes <= 1.1 * length * SHAPE.bytes_per_token


def test_growing_is_rare() -> None:
    """Each growth copies, so their number must grow with the logarithm."""
    cache = KeyValueCache(SHAPE)
    sizes = set()
    for _ in range(7_500):
        cache.prepare(1)
        cache.accept([0])
        sizes.add(cache.nbytes)
    assert len(sizes) < 80  # 469 if it grew by the unit each time


# --- forks ---------------------------------------------------------------------------------------------------


def test_a_fork_copies_nothing(model: LeanDecoder) -> None:
    parent = prefilled(model, text(1, 150))
    held, places = parent.cache.nbytes, pointers(parent.cache)
    children = [parent.fork(), parent.fork(100), parent.fork(60).fork(30)]
    for child in children:
        assert child.cache.nbytes == 0
        assert pointers(child.cache) == places
    assert parent.cache.nbytes == held
    # A child's own tokens go into an extent of its own; the shared one stays shared.
    run(children[0].extend(text(2, 5)))
    assert 0 < children[0].cache.nbytes <= 2 * ROW_UNIT * parent.cache.shape.bytes_per_token
    assert places < pointers(children[0].cache)
    assert pointers(parent.cache) == places


def test_shared_extents_are_read_once_a_pass(model: LeanDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = text(1, 130)
    parent = prefilled(model, prefix)
    children = [parent.fork() for _ in range(5)]
    tails = [text(10 + i, 3 + i) for i in range(5)]
    run(gather([child.extend(tail) for child, tail in zip(children, tails, strict=True)]))
    plans: list[AttentionPlan] = []
    original = AttentionPlan.__init__

    def noting(plan: AttentionPlan, *args: Any, **options: Any) -> None:
        original(plan, *args, **options)
        plans.append(plan)

    monkeypatch.setattr(AttentionPlan, "__init__", noting)
    products: list[int] = []
    bmm = torch.bmm

    def counting(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        shared = children[0].cache.runs[0].extent.layers
        if any(right.untyped_storage().data_ptr() == layer.untyped_storage().data_ptr() for layer in shared):
            products.append(left.shape[1])
        return bmm(left, right)

    monkeypatch.setattr(torch, "bmm", counting)
    rows = run(gather([child.score(Tree([1, 2], [-1, -1]), LOGITS) for child in children]))
    assert len(plans) == 1
    assert [len(shared.members) for shared in plans[0].products.shared] == [5]
    # One product for the scores and one for the values in each of two layers, with all rows of all children.
    assert products == [5 * 3 * 2] * 4
    monkeypatch.undo()
    for tail, row in zip(tails, rows, strict=True):
        close(row[0], fresh(model, prefix + tail))
        close(row[2], fresh(model, [*prefix, *tail, 2]))


def test_writing_below_a_fork_does_not_disturb_it(model: LeanDecoder) -> None:
    tokens, other = text(1, 120), text(2, 90)
    parent = prefilled(model, tokens)
    child = parent.fork()
    grandchild = child.fork(80)
    parent.truncate(40)
    run(parent.extend(other))
    np.testing.assert_allclose(next_logits(parent), fresh(model, tokens[:40] + other), atol=1e-4)
    np.testing.assert_allclose(next_logits(child), fresh(model, tokens), atol=1e-4)
    np.testing.assert_allclose(next_logits(grandchild), fresh(model, tokens[:80]), atol=1e-4)
    # The child cuts into the shared extent and writes there; parent and grandchild must not notice.
    child.truncate(10)
    run(child.extend(other[:30]))
    np.testing.assert_allclose(next_logits(child), fresh(model, tokens[:10] + other[:30]), atol=1e-4)
    np.testing.assert_allclose(next_logits(grandchild), fresh(model, tokens[:80]), atol=1e-4)
    np.testing.assert_allclose(next_logits(parent), fresh(model, tokens[:40] + other), atol=1e-4)


def test_a_fork_behind_a_fork_reads_both_extents(model: LeanDecoder) -> None:
    first, second, third = text(1, 100), text(2, 70), text(3, 40)
    session = prefilled(model, first)
    for more in (second, third):
        session = session.fork()
        run(session.extend(more))
    assert len(session.cache.runs) == 2
    np.testing.assert_allclose(next_logits(session), fresh(model, first + second + third), atol=1e-4)
    # A cut before the last two extents drops them.
    session.truncate(50)
    assert len(session.cache.runs) == 1
    np.testing.assert_allclose(next_logits(session), fresh(model, first[:50]), atol=1e-4)


def test_few_shared_rows_are_copied_by_the_first_pass(model: LeanDecoder) -> None:
    beginning, rest = text(1, COPIED_ROWS + 1), text(2, 20)
    parent = prefilled(model, text(1, 150))
    short, long = parent.fork(COPIED_ROWS + 1), parent.fork(COPIED_ROWS + 2)
    run(gather([short.extend(rest), long.extend(rest)]))
    assert short.cache.runs == []
    assert [run.rows for run in long.cache.runs] == [COPIED_ROWS + 1]
    np.testing.assert_allclose(next_logits(short), fresh(model, beginning + rest), atol=1e-4)
    # What was copied is the fork's own: a cut and another text disturb nobody.
    short.truncate(10)
    run(short.extend(text(3, 30)))
    np.testing.assert_allclose(next_logits(short), fresh(model, beginning[:10] + text(3, 30)), atol=1e-4)
    np.testing.assert_allclose(next_logits(parent), fresh(model, text(1, 150)), atol=1e-4)


def test_a_contiguous_cache_stays_in_one_extent() -> None:
    """Also when it must leave rows to a fork: the order of its sums must not depend on its history."""
    parent = KeyValueCache(SHAPE, contiguous=True)
    parent.prepare(100)
    for layer in parent.extents()[0].layers:
        layer[:, :, :100] = torch.arange(100)[:, None]
    parent.accept(range(100))
    child = parent.fork(80)
    assert child.nbytes == 0
    parent.truncate(50)
    parent.prepare(1)
    child.prepare(1)
    for cache, rows in ((parent, 50), (child, 80)):
        assert cache.runs == []
        assert len(cache.extents()) == 1
        for layer in cache.extents()[0].layers:
            assert torch.equal(layer[0, 0, :rows, 0], torch.arange(rows).to(layer.dtype))


# --- memory --------------------------------------------------------------------------------------------------


def test_closed_sessions_free_their_memory(model: LeanDecoder) -> None:
    parent = prefilled(model, text(1, 100))
    child = parent.fork()
    run(child.extend(text(2, 10)))
    shared, own = (weakref.ref(extent) for extent in child.cache.extents())
    parent.close()
    gc.collect()
    assert shared() is not None, "the child still reads it"
    child.close()
    gc.collect()
    assert (shared(), own()) == (None, None)
    assert parent.cache.nbytes == child.cache.nbytes == 0


def test_a_closed_session_can_be_used_again(model: LeanDecoder) -> None:
    session = prefilled(model, text(1, 100))
    session.close()
    assert session.tokens == []
    run(session.extend(text(2, 20)))
    np.testing.assert_allclose(next_logits(session), fresh(model, text(2, 20)), atol=1e-4)


def test_a_dropped_fork_gives_the_rows_back(model: LeanDecoder) -> None:
    """Once nobody else reads an extent, its owner writes into it again."""
    session = prefilled(model, text(1, 100))
    places = pointers(session.cache)
    fork = session.fork()
    fork.close()
    session.truncate(50)
    run(session.extend(text(2, 20)))
    assert pointers(session.cache) == places


def test_kept_rows_move_together(model: LeanDecoder) -> None:
    """``accept`` with rows that lie apart, directly on the cache."""
    tokens = text(1, 30)
    cache = model.new_cache()
    model.forward([Segment(cache, tokens, None, [NOTHING] * 30)])
    cache.accept(range(30))
    # A tree of two chains, interleaved: rows 0, 2, 4 follow each other, and so do 1, 3.
    tree = [7, 8, 9, 10, 11]
    model.forward([Segment(cache, tree, [-1, -1, 0, 1, 2], [NOTHING] * 5)])
    cache.accept([0, 2, 4])
    assert cache.length == 33
    rows = model.forward([Segment(cache, [5], None, [LOGITS])])
    close(rows[0][0], fresh(model, [*tokens, 7, 9, 11, 5]))
