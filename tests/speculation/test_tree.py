"""Draft trees keep their rules, and masks follow them."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrag.engine.attention.segments import ancestor_matrix
from specrag.engine.passes import Segment
from specrag.errors import InputError
from specrag.speculation.tree import EMPTY, ROOT, DraftTree, merge
from tests.speculation.guessing import random_tree

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


def paths(tree: DraftTree) -> list[tuple[int, ...]]:
    """The tokens from the root to each node."""
    found: dict[int, tuple[int, ...]] = {ROOT: ()}
    for node, parent in enumerate(tree.parents):
        found[node] = (*found[parent], tree.tokens[node])
    return [found[node] for node in range(len(tree))]


@given(trees, st.randoms(use_true_random=False))
def test_a_part_of_a_tree_keeps_what_belongs_to_its_nodes(tree: DraftTree, rng: random.Random) -> None:
    grades = tuple(rng.randrange(9) for _ in tree.tokens)
    opinions = tuple(np.full(4, node, dtype=np.float64) for node in (ROOT, *range(len(tree))))
    graded = DraftTree(tree.tokens, tree.parents, tree.sources, grades, opinions)
    nodes: list[int] = []
    for node, parent in enumerate(tree.parents):
        if (parent == ROOT or parent in nodes) and rng.random() < 0.7:
            nodes.append(node)
    part = graded.kept(nodes)
    assert paths(part) == [paths(tree)[node] for node in nodes]
    assert part.sources == tuple(tree.sources[node] for node in nodes)
    assert part.grades == tuple(grades[node] for node in nodes)
    assert [int(found[0]) for found in part.opinions] == [ROOT, *nodes]


@given(st.lists(trees, max_size=4), st.integers(0, 40))
def test_a_merged_tree_holds_the_paths_of_all(several: list[DraftTree], budget: int) -> None:
    merged = merge(several, budget)
    wanted = {path for tree in several for path in paths(tree)}
    assert len(merged) == min(budget, len(wanted))
    assert set(paths(merged)) <= wanted
    place = {path: node for node, path in enumerate(paths(merged))}
    seen: set[tuple[int, ...]] = set()
    for tree in several:
        for node, path in enumerate(paths(tree)):
            # A node is the first tree's that holds it, and no later tree's takes the place of an earlier one's.
            if path not in seen and path in place:
                assert merged.sources[place[path]] == tree.sources[node]
            seen.add(path)
    first = next((tree for tree in several if len(tree)), EMPTY)
    if len(first) <= budget:
        assert paths(merged)[: len(first)] == paths(first)


def test_grades_are_one_a_node_and_opinions_one_more() -> None:
    assert DraftTree.chain([1, 2], "a").grades == (0, 0)
    assert DraftTree.chain([1, 2], "a", [3, 4]).grades == (3, 4)
    with pytest.raises(InputError, match="grade"):
        DraftTree((1, 2), (-1, 0), ("a", "a"), (1,))
    with pytest.raises(InputError, match="opinions"):
        DraftTree((1, 2), (-1, 0), ("a", "a"), opinions=(np.ones(3),))


def test_the_trunk_is_the_chain_of_first_guesses() -> None:
    tree = DraftTree((5, 6, 7, 8, 9), (ROOT, ROOT, 0, 1, 2), ("a", "b", "c", "d", "e"))
    assert tree.trunk() == DraftTree((5, 7, 9), (ROOT, 0, 1), ("a", "c", "e"))
    assert DraftTree().trunk() == DraftTree()
