"""ReSpec's drafter: its trigger, its scores, and the trees that it makes of earlier text."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from specrag.engine.executor import run
from specrag.engine.outputs import NOTHING, Outputs, Row
from specrag.engine.session import Session
from specrag.errors import InputError
from specrag.models.toy import ToyModel
from specrag.speculation.drafters.base import NoDrafter
from specrag.speculation.drafters.recycling import Recycling
from specrag.speculation.drafters.retrieval import (
    FIRST_SCORE,
    EntropyTrigger,
    Feedback,
    RetrievalDrafter,
    RetrievalSettings,
)
from specrag.speculation.drafters.suffix import (
    COPY_RATES,
    REFERENCE,
    SUFFIX,
    RequestText,
    SuffixDrafter,
    copy_grade,
)
from specrag.speculation.tree import ROOT, DraftTree, Round, Verdict

MODEL = ToyModel(vocab_size=50, order=2, scale=1.0, seed=1)
ALWAYS = RetrievalSettings(trigger=None, combine=False)


def session_of(tokens: Sequence[int]) -> Session:
    return Session(MODEL, tokens=tokens)


def rows_of(entropies: Sequence[float]) -> list[Row]:
    return [Row(entropy_of=lambda value=value: value) for value in entropies]  # type: ignore[misc]


def drafter(
    settings: RetrievalSettings = ALWAYS, references: Sequence[Sequence[int]] = ()
) -> RetrievalDrafter:
    return RetrievalDrafter(settings, NoDrafter(), lambda: 0, references)


def proposal(made: RetrievalDrafter, tokens: Sequence[int], budget: int = 60) -> DraftTree:
    session = session_of(tokens)
    run(made.start(session, ()))
    return run(made.propose(session, budget))


def paths(tree: DraftTree) -> set[tuple[int, ...]]:
    """The tree's root-to-leaf paths."""
    inner = set(tree.parents)
    found = set()
    for leaf in range(len(tree)):
        if leaf not in inner:
            path, node = [], leaf
            while node != ROOT:
                path.append(tree.tokens[node])
                node = tree.parents[node]
            found.add(tuple(reversed(path)))
    return found


# -- trigger --------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 8), max_size=6), st.integers(1, 4), st.floats(0, 3), st.floats(0, 2))
def test_the_trigger_is_the_papers_loop(
    entropies: list[float], max_key: int, threshold: float, weight: float
) -> None:
    """Against Algorithm 1, lines 4 to 14, written down as printed."""
    c_min = h_best = math.inf
    key = 0
    for k in range(1, min(max_key, len(entropies)) + 1):
        h = float(np.mean(entropies[len(entropies) - k :]))
        c = h + weight / k
        assume(abs(c - c_min) > 1e-9)  # rounding decides a tie
        if c < c_min:
            c_min, h_best, key = c, h, k
    got = EntropyTrigger(max_key, threshold, weight).key_length(entropies)
    if abs(h_best - threshold) > 1e-9:
        assert got == (key if h_best <= threshold else 0)


def test_a_trigger_that_knows_nothing_stays_closed() -> None:
    assert EntropyTrigger().key_length([]) == 0


@pytest.mark.parametrize(
    ("field", "value"), [("max_key", 0), ("threshold", -0.1), ("length_weight", math.nan)]
)
def test_wrong_triggers_are_refused(field: str, value: float) -> None:
    with pytest.raises(InputError):
        EntropyTrigger(**{field: value})  # type: ignore[arg-type]


def test_the_drafter_looks_up_only_where_the_target_was_sure() -> None:
    tokens = [1, 2, 3, 4, 9, 1, 2, 3]
    settings = RetrievalSettings(trigger=EntropyTrigger(threshold=1.0), combine=False)
    for entropies, expected in (([0.2, 0.1, 0.1], 4), ([4.0, 4.0, 3.0], None), ([], None)):
        made = drafter(settings)
        session = session_of(tokens)
        run(made.start(session, rows_of(entropies)))
        tree = run(made.propose(session, 60))
        assert (tree.tokens[0] if len(tree) else None) == expected


def test_a_schedule_that_weighs_everything_needs_no_trigger() -> None:
    tokens = [1, 2, 3, 4, 9, 1, 2, 3]
    made = drafter(RetrievalSettings(trigger=EntropyTrigger(threshold=1.0)))
    assert made.outputs == NOTHING
    session = session_of(tokens)
    run(made.start(session, ()))
    assert run(made.propose(session, 60)).tokens[0] == 4


def test_a_copy_ends_where_it_is_no_longer_worth_its_row() -> None:
    class Even:
        def rate(self, source: str, grade: int) -> float:
            return 0.5

        def least_chance(self) -> float:
            return 0.1

        def prefers(self, tree: DraftTree) -> bool:
            raise AssertionError

        def note_drafted(self, guessed: DraftTree) -> None:
            raise AssertionError

    made = RetrievalDrafter(RetrievalSettings(), NoDrafter(), lambda: 0, estimates=Even())
    tree = proposal(made, [1, 2, 3, 4, 9, 8, 7, 6, 1, 2, 3])
    assert tree.tokens == (4, 9, 8)  # 0.5 to the fourth is too little


def test_the_entropies_of_a_round_are_those_of_its_path() -> None:
    """Two accepted tokens and a bonus: the trigger then reads exactly the three rows they were drawn from."""
    trigger = EntropyTrigger(max_key=3, threshold=0.5, length_weight=0.0)
    made = drafter(RetrievalSettings(trigger=trigger, combine=False))
    session = session_of([1, 2, 3, 1])
    run(made.start(session, rows_of([9.0, 9.0, 9.0])))
    tree = DraftTree((2, 7, 3), (ROOT, ROOT, 0), (SUFFIX,) * 3)
    session.tokens.extend([2, 3, 1])
    # After the root and nodes 0 and 2; node 1 was not on the path.
    made.observe(Round(tree, rows_of([0.1, 0.2, 8.0, 0.3]), Verdict((0, 2), 1), (2, 3, 1), tree))
    assert len(run(made.propose(session, 60))) > 0
    made.truncate(6)
    session.tokens.pop()
    assert made._entropies[-2:] == [0.1, 0.2]


# -- scores ---------------------------------------------------------------------------------------------------


def test_scores_are_moving_averages() -> None:
    feedback = Feedback(rate=0.25, threshold=0.3)
    assert feedback.score(7) == FIRST_SCORE
    feedback.observe(7, 1.0)
    assert feedback.score(7) == pytest.approx(0.75 * 0.5 + 0.25)
    for _ in range(3):
        feedback.observe(8, 0.0)
    assert feedback.score(8) == pytest.approx(0.5 * 0.75**3)
    assert feedback.usable(7)
    assert not feedback.usable(8)
    assert feedback.best() == [7]
    feedback.truncate(8)
    assert feedback.score(8) == FIRST_SCORE


@pytest.mark.parametrize(("rate", "threshold"), [(0, 0.2), (1.1, 0.2), (0.3, 0.5), (0.3, -0.1)])
def test_wrong_scores_are_refused(rate: float, threshold: float) -> None:
    with pytest.raises(InputError):
        Feedback(rate, threshold)


def test_the_winner_rises_the_losers_fall_and_the_untried_stay() -> None:
    #         0  1  2  3  4  5  6  7  8  9 10
    tokens = [1, 2, 3, 21, 1, 2, 4, 22, 1, 2, 5, 23, 1, 2]
    made = drafter(RetrievalSettings(trigger=None, combine=False, draft_size=6))
    session = session_of(tokens)
    run(made.start(session, ()))
    proposed = run(made.propose(session, 60))
    assert {proposed.tokens[n] for n, parent in enumerate(proposed.parents) if parent == ROOT} == {3, 4, 5}
    # The schedule left the candidate that starts with 3 out.
    keep = [n for n in range(len(proposed)) if path_to(proposed, n)[0] != 3]
    tree = proposed.kept(keep)
    first = tree.child(ROOT, 4)
    assert first is not None
    made.observe(Round(tree, (), Verdict((first,), 9), (4, 9), proposed))
    feedback = made._feedback
    assert feedback is not None
    drafted = sum(1 for n in range(len(tree)) if path_to(tree, n)[0] == 4)
    assert feedback.score(6) == pytest.approx(0.7 * 0.5 + 0.3 * 1 / drafted)
    assert feedback.score(10) == pytest.approx(0.35)
    assert feedback.score(2) == FIRST_SCORE


def path_to(tree: DraftTree, node: int) -> list[int]:
    path: list[int] = []
    while node != ROOT:
        path.append(tree.tokens[node])
        node = tree.parents[node]
    return path[::-1]


def test_places_that_failed_are_left_out() -> None:
    tokens = [1, 2, 3, 0, 1, 2]
    made = drafter()
    session = session_of(tokens)
    run(made.start(session, ()))
    for _ in range(3):
        tree = run(made.propose(session, 60))
        assert len(tree) > 0
        made.observe(Round(tree, (), Verdict((), 7), (7,), tree))
    assert len(run(made.propose(session, 60))) == 0


def test_without_scores_nothing_is_left_out() -> None:
    made = drafter(RetrievalSettings(trigger=None, feedback_rate=None, combine=False))
    session = session_of([1, 2, 3, 0, 1, 2])
    run(made.start(session, ()))
    for _ in range(6):
        tree = run(made.propose(session, 60))
        assert len(tree) > 0
        made.observe(Round(tree, (), Verdict((), 7), (7,), tree))


# -- candidates -----------------------------------------------------------------------------------------------


def test_equal_continuations_are_one_candidate() -> None:
    tokens = [1, 2, 3, 4, 5, 6] * 3 + [9, 1, 2, 3, 8, 8, 8, 1, 2, 3]
    tree = proposal(drafter(RetrievalSettings(trigger=None, draft_size=9, combine=False)), tokens)
    assert len([parent for parent in tree.parents if parent == ROOT]) <= 3
    assert {path[0] for path in paths(tree)} == {4, 8}


def test_a_repetition_is_copied_beyond_the_newest_token() -> None:
    tree = proposal(drafter(RetrievalSettings(trigger=None, draft_size=30, combine=False)), [5, 6, 5, 6, 5])
    assert max(paths(tree), key=len)[:10] == (6, 5) * 5


def test_copies_end_where_a_reference_ends() -> None:
    tree = proposal(drafter(references=[[1, 2, 3, 4], [7, 8, 9]]), [20, 21, 2, 3])
    assert paths(tree) == {(4,)}
    assert set(tree.sources) == {REFERENCE}
    assert len(proposal(drafter(references=[[1, 2, 3], [4, 5]]), [20, 21, 2, 3])) == 0


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
    st.lists(st.lists(st.integers(0, 3), max_size=12), max_size=3),
    st.integers(1, 60),
    st.integers(1, 4),
    st.integers(1, 40),
)
def test_trees_hold_what_followed_earlier_occurrences(
    tokens: list[int], references: list[list[int]], budget: int, max_key: int, size: int
) -> None:
    settings = RetrievalSettings(trigger=None, max_key=max_key, draft_size=size, combine=False)
    tree = proposal(drafter(settings, references), tokens, budget)
    assert len(tree) <= min(budget, size)
    for path in paths(tree):
        # Some text, the session's own extended by the guess itself, holds a key followed by the path.
        own = [*tokens, *path]
        texts = [own, *references]
        key = tokens[-1]
        assert any(
            text[i] == key and tuple(text[i + 1 : i + 1 + len(path)]) == path
            for text in texts
            for i in range(len(text) - len(path))
            if not (text is own and i >= len(tokens) - 1)
        )


@given(st.lists(st.integers(0, 2), min_size=2, max_size=40), st.data())
def test_taking_back_equals_never_having_seen(tokens: list[int], data: st.DataObject) -> None:
    length = data.draw(st.integers(1, len(tokens)))
    made, fresh = drafter(), drafter()
    session = session_of(tokens)
    run(made.start(session, ()))
    run(made.propose(session, 60))
    made.truncate(length)
    session.truncate(length)
    assert run(made.propose(session, 60)) == proposal(fresh, tokens[:length])


def test_a_fork_goes_its_own_way() -> None:
    session = session_of([1, 2, 3, 0, 1, 2])
    made = drafter()
    run(made.start(session, ()))
    other = made.fork()
    longer = session_of([*session.tokens, 3, 0, 5])
    run(other.propose(longer, 60))
    assert run(made.propose(session, 60)) == proposal(drafter(), session.tokens)


def test_matched_lengths_are_those_of_the_texts() -> None:
    rng = random.Random(5)
    for _ in range(50):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(2, 30))]
        text = RequestText()
        text.follow(session_of(tokens))
        ends = np.arange(1, len(tokens))
        for end, got in zip(ends, text.copies(ends, 0, 8)[1], strict=True):
            want = 0
            while want < 8 and end - 1 - want >= 0 and tokens[end - 1 - want] == tokens[-1 - want]:
                want += 1
            assert got == want


def test_every_grade_of_a_copy_has_its_rate() -> None:
    opinions = (None, -math.inf, -9.0, -1.0, -0.1)
    grades = {
        copy_grade(matched, rank, opinion)
        for matched in range(1, 40)
        for rank in range(3)
        for opinion in opinions
    }
    assert grades == set(range(len(COPY_RATES)))


def test_copies_are_surer_the_more_agrees() -> None:
    for rank in (0, 1):
        rates = [COPY_RATES[copy_grade(matched, rank, None)] for matched in range(1, 40)]
        assert rates == sorted(rates)
        assert rates[0] < rates[-1]
        held = [COPY_RATES[copy_grade(3, rank, opinion)] for opinion in (-math.inf, -9.0, -1.0, -0.1)]
        assert held == sorted(held)
    assert COPY_RATES[copy_grade(3, 1, None)] < COPY_RATES[copy_grade(3, 0, None)]


def test_recycling_has_an_opinion_of_what_it_has_seen() -> None:
    made = Recycling()
    top = Row(top_tokens=np.array([7, 9]), top_log_probs=np.array([-0.25, -2.0], dtype=np.float32))
    session = session_of([5, 6])
    run(made.start(session, [top]))
    assert made.opinion(5, 7) == -0.25
    assert made.opinion(5, 9) == -2.0
    assert made.opinion(5, 8) == -math.inf
    assert made.opinion(6, 7) is None


def test_sam_copies_behind_the_longest_match_only_if_it_is_long() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 30, 1, 2, 3, 4, 5]
    session = session_of(text)
    made = SuffixDrafter(min_match=5, max_tokens=3)
    run(made.start(session, ()))
    tree = run(made.propose(session, 60))
    assert tree.tokens == (6, 7, 8)
    assert len(run(made.propose(session_of([*text, 6][1:]), 2))) <= 2
    short = SuffixDrafter(min_match=6)
    run(short.start(session, ()))
    assert len(run(short.propose(session, 60))) == 0
    for wrong in ({"min_match": 0}, {"max_tokens": 0}):
        with pytest.raises(InputError):
            SuffixDrafter(**wrong)


@pytest.mark.parametrize("field", ["max_key", "candidates", "draft_size"])
@pytest.mark.parametrize("value", [0, 1.5, True])
def test_wrong_settings_are_refused(field: str, value: float) -> None:
    with pytest.raises(InputError, match=field):
        RetrievalSettings(**{field: value})  # type: ignore[arg-type]


def test_outputs_hold_what_trigger_and_fallback_read() -> None:
    class Reader(NoDrafter):
        outputs = Outputs(top_k=8)

    with_trigger = RetrievalDrafter(RetrievalSettings(combine=False), Reader(), lambda: 0)
    assert with_trigger.outputs == Outputs(top_k=8, entropy=True)
    assert RetrievalDrafter(ALWAYS, Reader(), lambda: 0).outputs == Outputs(top_k=8)
