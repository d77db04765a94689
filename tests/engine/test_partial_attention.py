"""Attention in parts: joined it is the attention over all keys, and forks read shared extents by it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specrag.engine.attention import products as attention
from specrag.engine.attention.products import attend_part, join
from specrag.engine.executor import run
from specrag.engine.outputs import LOGITS
from specrag.engine.passes import gather
from specrag.engine.session import Session
from specrag.models.decoder import LeanDecoder

from .test_kv import Tree, fresh, text, tiny_model


@given(st.lists(st.integers(1, 90), min_size=1, max_size=4), st.integers(1, 9), st.integers(0, 99))
def test_parts_join_to_the_attention_over_all_keys(sizes: list[int], rows: int, seed: int) -> None:
    """Scores up to 30, so that a part may weigh next to nothing beside another."""
    made = torch.Generator().manual_seed(seed)
    queries = torch.randn(2, rows, 16, generator=made)
    keys, values = torch.randn(2, 2, sum(sizes), 16, generator=made).mul(2.0).unbind(0)
    seen = torch.rand(rows, sizes[-1], generator=made) < 0.6
    seen[:, 0] = True
    mask = torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))
    cuts = list(zip(keys.split(sizes, 1), values.split(sizes, 1), strict=True))
    parts = [attend_part(queries, *cut) for cut in cuts[:-1]]
    joined = join([*parts, attend_part(queries, *cuts[-1], mask)])

    whole = torch.cat([torch.zeros(rows, sum(sizes[:-1])), mask], dim=1)
    wanted = torch.softmax(queries.double() @ keys.double().transpose(1, 2) + whole, -1) @ values.double()
    torch.testing.assert_close(joined.double(), wanted, atol=2e-5, rtol=0)


@pytest.fixture(scope="module")
def model() -> LeanDecoder:
    return tiny_model()


def test_forks_read_shared_extents_in_parts(model: LeanDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains, trees, single rows, a fork of a fork and a session of its own in one pass."""
    prefix = text(1, 150)
    parent = Session(model)
    run(parent.extend(prefix))
    tails = [text(10 + number, 70 + number) for number in range(3)]
    children = [parent.fork() for _ in tails]
    run(gather([child.extend(tail) for child, tail in zip(children, tails, strict=True)]))
    grandchild, alone = children[0].fork(), Session(model)
    run(gather([grandchild.extend([7, 8]), alone.extend(prefix[:20])]))

    monkeypatch.setattr(attention, "_fuses", lambda _shape: True)
    asked: list[int] = []

    def counted(queries: torch.Tensor, *rest: torch.Tensor) -> object:
        asked.append(queries.shape[1])
        return attend_part(queries, *rest)

    monkeypatch.setattr(attention, "attend_part", counted)
    scored = [*children, grandchild, alone]
    trees = [Tree([1, 2], [-1, -1]), Tree([3, 4, 5], [-1, 0, 1]), Tree(), Tree([6], [-1]), Tree([6], [-1])]
    rows = run(gather([session.score(tree, LOGITS) for session, tree in zip(scored, trees, strict=True)]))

    # The parent's extent once for all its readers' rows, of two heads to a head of keys.
    assert max(asked) == 2 * (3 + 4 + 1 + 2)
    texts = [
        [*prefix, *tails[0], 2],
        [*prefix, *tails[1], 3, 4, 5],
        [*prefix, *tails[2]],
        [*prefix, *tails[0], 7, 8, 6],
        [*prefix[:20], 6],
    ]
    for row, tokens in zip([row[-1] for row in rows], texts, strict=True):
        assert row.logits is not None
        np.testing.assert_allclose(row.logits, fresh(model, tokens), atol=1e-4)
