"""Token recycling: the shape of its tree, what it learns, what it guesses."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrag.engine.executor import run
from specrag.engine.outputs import Row
from specrag.engine.session import Session
from specrag.models.toy import ToyModel
from specrag.speculation.drafters.recycling import CANDIDATES, NODES, RECYCLING, Recycling, best_shape
from specrag.speculation.tree import EMPTY, ROOT, DraftTree, Round, Verdict

MODEL = ToyModel()


def row(tokens: Sequence[int], probs: Sequence[float] = ()) -> Row:
    """The answer of a target that finds these tokens likeliest."""
    log_probs = [math.log(prob) for prob in probs] or [-1.0 - rank for rank in range(len(tokens))]
    return Row(top_tokens=np.array(tokens), top_log_probs=np.array(log_probs, dtype=np.float32))


def session_of(*tokens: int) -> Session:
    return Session(MODEL, tokens=tokens)


def paths(tree: DraftTree) -> list[tuple[int, ...]]:
    """From the root to each node."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        found.append((*(() if parent == ROOT else found[parent]), token))
    return found


def taught(answers: dict[int, Sequence[int]], newest: int) -> Recycling:
    """A drafter that has seen these answers, as rows of one prompt."""
    drafter = Recycling(read_prompt=False)
    run(drafter.start(session_of(*answers, newest), [row(tokens) for tokens in answers.values()]))
    return drafter


# -- the shape ------------------------------------------------------------------------------------------------


@given(
    st.lists(st.floats(0.01, 0.9), min_size=1, max_size=4).map(lambda rates: sorted(rates, reverse=True)),
    st.integers(1, 40),
    st.integers(1, 4),
)
def test_the_shape_holds_the_likeliest_paths(rates: list[float], nodes: int, depth: int) -> None:
    shape = best_shape(nodes, depth, rates)
    every = [
        math.prod(rates[rank] for rank in ranks)
        for level in range(1, depth + 1)
        for ranks in itertools.product(range(len(rates)), repeat=level)
    ]
    chances: list[float] = []
    for parent, rank, level in zip(shape.parents, shape.ranks, shape.depths, strict=True):
        assert level == (0 if parent == ROOT else shape.depths[parent] + 1)
        chances.append(rates[rank] * (1.0 if parent == ROOT else chances[parent]))
    assert len(set(zip(shape.parents, shape.ranks, strict=True))) == len(chances)
    # The best first, so that every prefix is the best tree of its size too.
    assert chances == pytest.approx(sorted(every, reverse=True)[:nodes])


# -- what it guesses ------------------------------------------------------------------------------------------


def test_it_fills_the_shape_with_what_was_likely() -> None:
    answers: dict[int, Sequence[int]] = {
        token: [(token * 8 + rank) % 50 for rank in range(8)] for token in range(50)
    }
    tree = run(taught(answers, 7).propose(session_of(7), NODES))
    assert len(tree) == NODES
    assert set(tree.sources) == {RECYCLING}
    for path in paths(tree):
        for before, token in itertools.pairwise((7, *path)):
            assert token in answers[before]
    first = [token for token, parent in zip(tree.tokens, tree.parents, strict=True) if parent == ROOT]
    assert first == list(answers[7])
    assert len(max(paths(tree), key=len)) >= 5


def test_a_smaller_budget_cuts_the_same_tree() -> None:
    answers: dict[int, Sequence[int]] = {
        token: [(token * 3 + rank) % 20 for rank in range(8)] for token in range(20)
    }
    whole = run(taught(answers, 4).propose(session_of(4), NODES))
    for budget in (1, 2, 17, 60):
        assert run(taught(answers, 4).propose(session_of(4), budget)) == whole.kept(range(budget))


def test_where_little_is_known_little_is_proposed() -> None:
    assert run(taught({1: [2, 3]}, 9).propose(session_of(9), 60)) == EMPTY
    assert set(paths(run(taught({1: [2, 3]}, 1).propose(session_of(1), 60)))) == {(2,), (3,)}
    deeper = run(taught({1: [2, 3], 3: [1]}, 1).propose(session_of(1), 60))
    assert {(2,), (3,), (3, 1), (3, 1, 2)} <= set(paths(deeper))
    assert run(Recycling().propose(session_of(1), 60)) == EMPTY


def test_a_surer_answer_is_another_grade() -> None:
    drafter = Recycling()
    rows = [row([5, 6], [0.97, 0.01]), row([5, 6], [0.5, 0.3])]
    run(drafter.start(session_of(1, 2, 2), rows))
    sure = run(drafter.propose(session_of(1), 2))
    unsure = run(drafter.propose(session_of(2), 2))
    assert sure.tokens == unsure.tokens == (5, 6)
    assert len({*sure.grades, *unsure.grades}) == 4


# -- what it learns -------------------------------------------------------------------------------------------


def observed(drafter: Recycling, tree: DraftTree, rows: Sequence[Row], verdict: Verdict) -> None:
    tokens = tuple(tree.tokens[node] for node in verdict.path)
    bonus = () if verdict.bonus is None else (verdict.bonus,)
    drafter.observe(Round(tree, rows, verdict, tokens + bonus, tree))


def test_it_learns_from_every_row_kept_or_not() -> None:
    drafter = Recycling()
    run(drafter.start(session_of(1), ()))
    tree = DraftTree((2, 3), (ROOT, ROOT), ("x", "x"))
    observed(drafter, tree, [row([10, 11]), row([20, 21]), row([30, 31])], Verdict((1,), 4))
    for newest, expected in ((1, (10, 11)), (2, (20, 21)), (3, (30, 31)), (4, ())):
        assert run(drafter.propose(session_of(newest), 60)).tokens == expected
    # The next round's first row is the bonus token's, although nothing was asked of the drafter.
    observed(drafter, EMPTY, [row([40])], Verdict((), 5))
    assert run(drafter.propose(session_of(4), 60)).tokens == (40,)


def test_of_two_answers_for_a_token_the_texts_own_counts() -> None:
    drafter = Recycling()
    run(drafter.start(session_of(1), ()))
    tree = DraftTree((2, 3, 2), (ROOT, ROOT, 1), ("x",) * 3)
    observed(drafter, tree, [row([9]), row([20]), row([30]), row([21])], Verdict((0,), 4))
    assert run(drafter.propose(session_of(2), 60)).tokens == (20,)


def test_it_keeps_eight_of_more_answers() -> None:
    drafter = taught({1: range(10, 30)}, 1)
    assert run(drafter.propose(session_of(1), 60)).tokens == tuple(range(10, 10 + CANDIDATES))


def test_it_reads_the_prompt_where_the_target_said_nothing() -> None:
    drafter = Recycling()
    run(drafter.start(session_of(1, 2, 1, 3, 1, 2, 5, 1), [row([8, 9])]))
    # After 1 stood 2, 3 and 2 again: the latest first. Of 5 the target's answer is known.
    assert run(drafter.propose(session_of(1), 3)).tokens == (2, 5, 3)
    assert run(drafter.propose(session_of(5), 1)).tokens == (8,)
    assert run(Recycling(read_prompt=False).propose(session_of(1), 60)) == EMPTY


def test_a_truncation_keeps_what_was_learned() -> None:
    drafter = taught({1: [5, 6]}, 1)
    drafter.truncate(1)
    assert run(drafter.propose(session_of(1), 60)).tokens == (5, 6)
    # The newest token is not known until the next proposal: an answer for it is not noted under another one.
    observed(taught({}, 3), EMPTY, [row([7])], Verdict((), 2))
    drafter.truncate(0)
    observed(drafter, EMPTY, [row([7])], Verdict((), 2))
    assert run(drafter.propose(session_of(1), 60)).tokens == (5, 6)


def test_a_proposal_is_cheap() -> None:
    answers: dict[int, Sequence[int]] = {
        token: [(token * 8 + rank) % 5000 for rank in range(8)] for token in range(5000)
    }
    drafter = taught(answers, 7)
    session = session_of(7)
    fastest = 1.0
    for _ in range(50):
        began = time.perf_counter()
        with pytest.raises(StopIteration) as found:
            next(drafter.propose(session, 60))
        fastest = min(fastest, time.perf_counter() - began)
    assert len(found.value.value) == 60
    assert fastest < 500e-6  # about 50 microseconds on a quiet machine
