"""ReSpec's choices among earlier occurrences (Fang et al., section 3.3 and Algorithm 1), each pinned alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from specrag.engine.executor import run
from specrag.engine.outputs import Row
from specrag.engine.passes import Coroutine
from specrag.engine.session import Session
from specrag.models.toy import ToyModel
from specrag.speculation.drafters.base import ANY_DEPTH, NoDrafter
from specrag.speculation.drafters.retrieval import (
    FIRST_SCORE,
    MOST_OCCURRENCES,
    EntropyTrigger,
    RetrievalDrafter,
    RetrievalSettings,
)
from specrag.speculation.drafters.suffix import CORPUS, SUFFIX
from specrag.speculation.suffix.automaton import SuffixAutomaton
from specrag.speculation.tree import ROOT, DraftTree, Round, Verdict

MODEL = ToyModel(vocab_size=100, order=2, scale=1.0, seed=1)
#: Keys of two tokens; copies are three tokens long where three occurrences are copied.
SHORT = RetrievalSettings(trigger=None, max_key=2, combine=False, draft_size=9)
RATE = 0.3


class Followed:
    """A drafter and the session that it follows."""

    def __init__(
        self,
        tokens: Sequence[int],
        settings: RetrievalSettings = SHORT,
        corpus: SuffixAutomaton | None = None,
        entropies: Sequence[float] = (),
    ) -> None:
        self.session = Session(MODEL, tokens=tokens)
        self.drafter = RetrievalDrafter(settings, NoDrafter(), lambda: 0, corpus=corpus)
        rows = [Row(entropy_of=lambda value=value: value) for value in entropies]  # type: ignore[misc]
        run(self.drafter.start(self.session, rows))

    def propose(self, *more: int) -> DraftTree:
        """The proposal behind the session and ``more``."""
        self.session.tokens.extend(more)
        tree: DraftTree = run(self.drafter.propose(self.session, 60))
        return tree

    def accept(self, *path: int) -> DraftTree:
        """A round in which the target writes ``path`` and then something that nobody guessed."""
        tree, node, kept = self.propose(), ROOT, []
        for token in path:
            found = tree.child(node, token)
            assert found is not None
            kept.append(found)
            node = found
        self.drafter.observe(Round(tree, (), Verdict(tuple(kept), 99), (*path, 99), tree))
        return tree

    def score(self, position: int) -> float:
        assert self.drafter._feedback is not None
        return self.drafter._feedback.score(position)


def first_guesses(tree: DraftTree) -> list[int]:
    return [token for token, parent in zip(tree.tokens, tree.parents, strict=True) if parent == ROOT]


@pytest.mark.parametrize(("length", "guessed"), [(3, []), (2, [9])])
def test_behind_a_trigger_the_whole_key_must_have_occurred(length: int, guessed: list[int]) -> None:
    """The last two tokens occurred before, the last three did not."""
    tokens = [1, 2, 3, 9, 8, 7, 2, 3]
    trigger = EntropyTrigger(max_key=length, threshold=1.0)
    settings = RetrievalSettings(trigger=trigger, combine=False, draft_size=9)
    assert first_guesses(Followed(tokens, settings, entropies=[0.1] * 7).propose()) == guessed


def test_without_a_trigger_a_shorter_key_will_do() -> None:
    assert first_guesses(Followed([1, 2, 3, 9, 8, 7, 3]).propose()) == [9]


def test_the_best_score_goes_before_the_longer_match_and_the_newer_place() -> None:
    followed = Followed([1, 2, 30, 10, 5, 1, 2, 40, 11, 5, 1, 2])
    assert first_guesses(followed.accept(30)) == [40, 30]
    assert first_guesses(followed.propose()) == [30, 40]


def test_of_equal_scores_the_longer_match_goes_first_and_then_the_newer_place() -> None:
    longer_is_older = [5, 1, 2, 30, 10, 6, 1, 2, 40, 11, 7, 1, 2, 50, 12, 5, 1, 2]
    assert first_guesses(Followed(longer_is_older).propose()) == [30, 50, 40]


def test_all_that_share_the_accepted_path_win() -> None:
    #         0  1   2   3   4  5  6   7   8   9 10 11  12  13  14
    tokens = [1, 2, 30, 31, 10, 1, 2, 30, 32, 11, 1, 2, 40, 41, 12, 1, 2]
    followed = Followed(tokens)
    followed.accept(30)
    won = (1 - RATE) * FIRST_SCORE + RATE * 1 / 3
    assert [followed.score(position) for position in (2, 7)] == pytest.approx([won, won])
    assert followed.score(12) == pytest.approx((1 - RATE) * FIRST_SCORE)


def test_one_that_left_the_accepted_path_loses() -> None:
    followed = Followed([1, 2, 30, 31, 10, 1, 2, 30, 32, 11, 1, 2])
    followed.accept(30, 31, 10)
    assert followed.score(2) == pytest.approx((1 - RATE) * FIRST_SCORE + RATE * 3 / 4)
    assert followed.score(7) == pytest.approx((1 - RATE) * FIRST_SCORE)


def test_every_place_of_a_merged_copy_is_rewarded() -> None:
    followed = Followed([*([1, 2, 30, 31, 32, 33] * 2), 1, 2, 40, 41, 42, 1, 2])
    followed.accept(30, 31, 32, 33)
    won = (1 - RATE) * FIRST_SCORE + RATE
    assert [followed.score(position) for position in (2, 8)] == pytest.approx([won, won])


@pytest.mark.parametrize("candidates", [3, 2])
def test_no_more_than_the_best_few_are_merged(candidates: int) -> None:
    tokens = [token for follower in range(30, 36) for token in (1, 2, follower, 10)] + [1, 2]
    settings = replace(SHORT, candidates=candidates)
    assert first_guesses(Followed(tokens, settings).propose()) == [35, 34, 33][:candidates]


def test_an_old_place_that_proved_good_is_copied_beside_many_newer_ones() -> None:
    followed = Followed([1, 2, 30, 10, 1, 2])
    followed.accept(*[30, 10, 1, 2] * 2, 30)
    newer = [token for follower in range(40, 41 + MOST_OCCURRENCES) for token in (follower, 10, 1, 2)]
    assert first_guesses(followed.propose(*newer))[0] == 30


def test_an_old_good_place_behind_another_key_is_not() -> None:
    followed = Followed([1, 2, 30, 10, 1, 2])
    followed.accept(*[30, 10, 1, 2] * 2, 30)
    newer = [token for follower in range(40, 42 + MOST_OCCURRENCES) for token in (6, 7, follower)]
    guesses = first_guesses(followed.propose(*newer, 6, 7))
    assert len(guesses) == 3
    assert 30 not in guesses


def corpus_of(*texts: Sequence[int]) -> SuffixAutomaton:
    corpus = SuffixAutomaton()
    for text in texts:
        corpus.extend(text)
        corpus.end_text()
    return corpus


def test_a_corpus_is_copied_from_where_the_own_text_holds_nothing() -> None:
    corpus = corpus_of([1, 2, 50, 51, 52, 53], [1, 2, 50, 51, 52, 54])
    tree = Followed([8, 9, 1, 2], corpus=corpus).propose()
    assert tree.tokens[:3] == (50, 51, 52)
    assert set(tree.sources) == {CORPUS}
    assert first_guesses(tree) == [50]


def test_a_corpus_takes_the_places_that_the_own_text_leaves() -> None:
    corpus = corpus_of([1, 2, 50, 10], [1, 2, 51, 10], [1, 2, 52, 10])
    one = Followed([1, 2, 30, 10, 1, 2], corpus=corpus).propose()
    assert first_guesses(one)[0] == 30
    assert len(first_guesses(one)) == 3
    assert [one.sources[node] for node in range(len(one)) if one.parents[node] == ROOT] == [
        SUFFIX, CORPUS, CORPUS,
    ]  # fmt: skip
    three = [token for follower in (30, 31, 32) for token in (1, 2, follower, 10)] + [1, 2]
    assert set(Followed(three, corpus=corpus).propose().sources) == {SUFFIX}


def test_a_corpus_is_asked_for_a_whole_key() -> None:
    corpus = corpus_of([1, 2, 50, 51])
    assert len(Followed([8, 3, 2], corpus=corpus).propose()) == 0
    assert first_guesses(Followed([8, 1, 2], corpus=corpus).propose()) == [50]


# -- lengths --------------------------------------------------------------------------------------------------

LONG = [1, 2, *range(10, 90)]


def test_a_lone_copy_takes_the_whole_tree() -> None:
    alone = Followed([*LONG, 1, 2], replace(SHORT, draft_size=60)).propose()
    assert alone.tokens == tuple(range(10, 70))
    corpus = Followed([5, 1, 2], replace(SHORT, draft_size=60), corpus=corpus_of(LONG)).propose()
    assert corpus.tokens == tuple(range(10, 70))
    assert set(corpus.sources) == {CORPUS}


def test_two_copies_share_it() -> None:
    tree = Followed([*LONG, 1, 2, *LONG[::-1], 1, 2], replace(SHORT, draft_size=60)).propose()
    assert len(tree) == 60
    assert first_guesses(tree) == [89, 10]
    assert [tree.tokens.index(token) for token in (60, 39)] == [29, 59]


def test_beside_free_guesses_a_copy_takes_what_they_leave() -> None:
    guesses = DraftTree((91, 92, 93), (ROOT,) * 3, ("free",) * 3)

    class Free(NoDrafter):
        def propose(self, session: Session, budget: int, depth: int = ANY_DEPTH) -> Coroutine[DraftTree]:
            yield from ()
            return guesses

    session = Session(MODEL, tokens=[*LONG, 1, 2])
    made = RetrievalDrafter(RetrievalSettings(), Free(), lambda: 0)
    run(made.start(session, ()))
    tree = run(made.propose(session, 60))
    assert len(tree) == 60
    assert first_guesses(tree) == [10, 91, 92, 93]
    assert tree.sources.count(SUFFIX) == 57


def test_of_places_that_agree_at_first_those_win_that_hold_the_accepted_path() -> None:
    """Both copies begin with three equal tokens; the newer one goes on."""
    followed = Followed([1, 2, 30, 31, 32, 33, 10, 1, 2, 30, 31, 32, 34, 11, 1, 2])
    assert followed.accept(30, 31, 32, 34).tokens[:4] == (30, 31, 32, 34)
    assert followed.score(9) == pytest.approx((1 - RATE) * FIRST_SCORE + RATE * 4 / 9)
    assert followed.score(2) == FIRST_SCORE
