"""How often guesses are accepted, by source and grade."""

from __future__ import annotations

import pytest

from specrag.speculation.schedule.tokens import AcceptanceTable, children_of
from specrag.speculation.tree import ROOT, DraftTree


def test_the_table_counts_by_source_and_grade() -> None:
    table = AcceptanceTable()
    tree = DraftTree((1, 2, 3), (ROOT, 0, 1), ("a", "a", "b"), (0, 1, 0))
    for _ in range(100):
        table.observe(tree, children_of(tree), (1, 2, 9))
    assert table.rate("a", 0) > 0.95
    assert table.rate("a", 1) > 0.95
    assert table.rate("b", 0) < 0.05
    assert table.rate("c", 0) == pytest.approx(0.4)  # never seen


def test_what_lies_behind_the_known_tokens_is_not_counted() -> None:
    table = AcceptanceTable()
    tree = DraftTree.chain([1, 2, 3], "a", [0, 1, 2])
    table.observe(tree, children_of(tree), (1,))
    assert table.rate("a", 0) > 0.4
    assert table.rate("a", 1) == pytest.approx(0.4)


def test_a_new_request_starts_with_what_others_saw_and_leaves_it_soon() -> None:
    shared = AcceptanceTable()
    tree = DraftTree.chain([1], "a")
    for _ in range(200):
        shared.observe(tree, children_of(tree), (1,))
    own = AcceptanceTable(shared)
    assert own.rate("a", 0) > 0.9
    for _ in range(30):
        own.observe(tree, children_of(tree), (2,))
    assert own.rate("a", 0) < 0.3
