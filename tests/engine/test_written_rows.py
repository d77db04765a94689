"""A tree fed level by level, its earlier rows staying where they were written, equals the tree in one pass."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specrag.engine.executor import run
from specrag.engine.outputs import LOGITS
from specrag.engine.passes import Segment
from specrag.engine.session import Session
from specrag.models.linear import PackedLinear
from tests.contracts.test_session_models import VOCAB, Case, build
from tests.models.tiny_eagle import tiny_target

PARENTS = [-1, -1, 0, 0, 1, 2, 2, 4, 7, -1]
LEVELS = ((0, 2), (2, 5), (5, 6), (6, 10))


@pytest.fixture(scope="module", params=["llama", "mistral-windowed", "gemma3"])
def case(request: pytest.FixtureRequest) -> Case:
    return build(request.param)


def session_of(case: Case, length: int, *, forked: bool) -> Session:
    tokens = np.random.default_rng(length).integers(0, VOCAB, length).tolist()
    session = Session(case.model)
    run(session.extend(tokens, LOGITS))
    return session.fork() if forked else session


@pytest.mark.parametrize("forked", [False, True])
@pytest.mark.parametrize("length", [2, 40, 130])
def test_level_by_level(case: Case, length: int, forked: bool) -> None:
    tree = np.random.default_rng(0).integers(0, VOCAB, len(PARENTS)).tolist()
    cache = session_of(case, length, forked=forked).cache
    together = case.model.forward([Segment(cache, tree, PARENTS, [LOGITS] * len(tree))])[0]
    other = session_of(case, length + 1, forked=False).cache  # packed beside it
    for start, end in LEVELS:
        part = tree[start:end]
        segment = Segment(cache, part, PARENTS[:end], [LOGITS] * len(part), written=start)
        beside = Segment(other, [1], None, [LOGITS])
        for found, right in zip(case.model.forward([segment, beside])[0], together[start:end], strict=True):
            assert found.logits is not None
            assert right.logits is not None
            np.testing.assert_allclose(found.logits, right.logits, atol=case.tolerance, rtol=0)
    assert cache.length == length - 1
    # The path that is kept moves into place as if it had come in one pass.
    cache.accept([1, 4, 7])
    row = case.model.forward([Segment(cache, [5], None, [LOGITS])])[0][0]
    fresh = session_of(case, length, forked=False).cache
    path = [tree[1], tree[4], tree[7], 5]
    expected = case.model.forward([Segment(fresh, path, None, [LOGITS] * 4)])[0][-1]
    assert row.logits is not None
    assert expected.logits is not None
    np.testing.assert_allclose(row.logits, expected.logits, atol=case.tolerance, rtol=0)


def test_rows_have_the_bits_that_one_pass_gives_them() -> None:
    if not PackedLinear.available():
        pytest.skip("this processor has no packed bf16 product, on which batch_invariant rests")
    model = tiny_target("llama", dtype=torch.bfloat16, batch_invariant=True)
    tree = np.random.default_rng(0).integers(0, VOCAB, len(PARENTS)).tolist()
    session = Session(model)
    run(session.extend(np.random.default_rng(1).integers(0, VOCAB, 40).tolist()))
    cache = session.cache
    together = model.forward([Segment(cache, tree, PARENTS, [LOGITS] * len(tree))])[0]
    for start, end in LEVELS:
        part = Segment(cache, tree[start:end], PARENTS[:end], [LOGITS] * (end - start), written=start)
        for found, right in zip(model.forward([part])[0], together[start:end], strict=True):
            assert found.logits is not None
            np.testing.assert_array_equal(found.logits, right.logits)
