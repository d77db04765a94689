"""Draft trees keep their rules, and masks follow them."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrag.engine.passes import Segment
from specrag.engine.segment_plan import ancestor_matrix
from specrag.errors import InputError
from specrag.speculation.acceptance import matching
from specrag.speculation.tree import EMPTY, ROOT, DraftTree
from tests.core.guessing import random_tree

trees = st.builds(
    lambda seed, nodes: random_tree(random.Random(seed), nodes, 4), st.integers(0, 10**6), st.integers(0, 24)
)


@pytest.mark.parametrize(
    ("tokens", "parents", "sources", "field"),
    [
        ((1,), (), ("a",), "tree"),
        ((1,), (-1,), (), "tree"),
        ((1, 2), (-1, 1), ("a", "a"), "parents"),
        ((1, 2), (1, -1), ("a", "a"), "parents"),
        ((1,), (-2,), ("a",), "parents"),
        ((1, 1), (-1, -1), ("a", "b"), "tree"),
    ],
)
def test_a_broken_tree_is_refused(
    tokens: tuple[int, ...], parents: tuple[int, ...], sources: tuple[str, ...], field: str
) -> None:
    with pytest.raises(InputError) as caught:
        DraftTree(tokens, parents, sources)
    assert caught.value.field == field


def test_a_chain_follows_itself() -> None:
    tree = DraftTree.chain([4, 4, 2], "lookup")
    assert tree.parents == (-1, 0, 1)
    assert tree.sources == ("lookup",) * 3
    assert (tree.child(ROOT, 4), tree.child(0, 4), tree.child(1, 4), tree.child(1, 2)) == (0, 1, None, 2)
    assert len(EMPTY) == 0
    assert EMPTY.child(ROOT, 4) is None


@given(trees)
def test_children_are_found_by_their_token(tree: DraftTree) -> None:
    for parent in range(ROOT, len(tree)):
        for token in range(5):
            found = [n for n in range(len(tree)) if (tree.parents[n], tree.tokens[n]) == (parent, token)]
            assert tree.child(parent, token) == (found[0] if found else None)
            assert len(found) <= 1


@given(trees)
def test_masks_are_ancestor_sets_and_depths_their_sizes(tree: DraftTree) -> None:
    sees = ancestor_matrix(tree.parents)
    for node in range(len(tree)):
        ancestors = {node}
        while tree.parents[min(ancestors)] != ROOT:
            ancestors.add(tree.parents[min(ancestors)])
        assert set(np.flatnonzero(sees[node])) == ancestors
    segment = Segment(None, tree.tokens, tree.parents, [])
    assert [depth + 1 for depth in segment.depths()] == sees.sum(axis=1).tolist()


@given(trees, st.lists(st.integers(0, 3), min_size=30, max_size=30))
def test_matching_follows_the_draws_as_far_as_the_tree_does(tree: DraftTree, draws: list[int]) -> None:
    asked: list[int] = []

    def draw(node: int) -> int:
        asked.append(node)
        return draws[len(asked) - 1]

    verdict = matching(tree, draw)
    accepted = [tree.tokens[node] for node in verdict.path]
    assert [*accepted, verdict.bonus] == draws[: len(accepted) + 1]
    assert asked == [ROOT, *verdict.path]  # each once, from the root downwards
    assert verdict.bonus is not None
    assert tree.child(asked[-1], verdict.bonus) is None
