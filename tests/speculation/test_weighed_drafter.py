"""Free guesses in every round, dear ones beside them where they promise more."""

from __future__ import annotations

import math

import pytest

from specrag.engine.executor import run
from specrag.engine.passes import Coroutine
from specrag.engine.session import Session
from specrag.models.toy import ToyModel
from specrag.speculation.drafters.base import ANY_DEPTH, NoDrafter
from specrag.speculation.drafters.pair import Weighed
from specrag.speculation.drafters.suffix import SUFFIX, copy_grade
from specrag.speculation.relaxed import Relaxed
from specrag.speculation.schedule.base import Timed
from specrag.speculation.schedule.cost_model import CostModel
from specrag.speculation.schedule.tokens import CostAware, SharedCosts
from specrag.speculation.tree import EMPTY, DraftTree, Round, Verdict

MODEL = ToyModel(vocab_size=50, order=2, scale=1.0, seed=1)
SURE = DraftTree.chain([1] * 6, SUFFIX, [copy_grade(16, 0, math.log(0.9))] * 6)
DOUBTFUL = DraftTree.chain([3, 2], SUFFIX, [copy_grade(1, 0, -math.inf)] * 2)


class Scripted(NoDrafter):
    """Proposes one tree, cut to what it is asked for, and counts how often it is asked."""

    def __init__(self, tree: DraftTree, *, runs_passes: bool = False) -> None:
        self.tree, self.asked = tree, 0
        self.runs_passes = runs_passes

    def propose(self, session: Session, budget: int, depth: int = ANY_DEPTH) -> Coroutine[DraftTree]:
        del session
        yield from ()
        self.asked += 1
        return self.tree.kept(range(min(budget, len(self.tree))))


class AlwaysAsking(CostAware):
    """Always asks the dear drafter too."""

    def __init__(self, like: CostAware) -> None:
        super().__init__(like._shared)

    def prefers(self, tree: DraftTree) -> bool:
        return False


class Table:
    """A target whose choice behind each node is given; every other token is one nat below it."""

    def __init__(self, choices: dict[int, int]) -> None:
        self._choices = choices

    def draw(self, node: int) -> int:
        return self._choices.get(node, 0)

    def gap(self, node: int, token: int, top_k: int) -> float | None:
        return 1.0


def schedule(seconds: float = 0.001, rate: float = 0.7) -> CostAware:
    """A pass takes 20 ms and 0.9 ms a row; a dear guess takes ``seconds``."""
    passes = CostModel()
    for number in range(60):
        rows = (1, 2, 5, 9, 17)[number % 5]
        passes.observe(rows, 300, 0.020 + 0.0009 * rows)
    made = CostAware(SharedCosts(passes=passes, depth_rate=rate, draft_seconds=seconds))
    made.choose(EMPTY, 300)
    return made


@pytest.mark.parametrize(
    ("free", "seconds", "asked"),
    [(SURE, 0.001, 0), (DOUBTFUL, 0.001, 1), (DOUBTFUL, 0.03, 0), (EMPTY, 0.001, 1)],
)
def test_the_dear_drafter_is_asked_where_it_promises_more(
    free: DraftTree, seconds: float, asked: int
) -> None:
    priced, estimates = Scripted(DraftTree.chain([3] * 12, "model"), runs_passes=True), schedule(seconds)
    made = Weighed(Scripted(free), priced, estimates, lambda: estimates.budget(runs_passes=True))
    tree = run(made.propose(Session(MODEL, tokens=[1]), 60))
    assert priced.asked == asked
    if not asked:
        assert tree == free
    else:
        own = [place for place, source in enumerate(tree.sources) if source == "model"]
        assert own == list(range(len(own)))
        assert len(own) > 1
        # The token that both guessed stands once, as the dear one's; the other free guess hangs below it.
        assert tree.tokens[len(own) :] == free.tokens[1:]


def test_nothing_is_asked_of_a_drafter_that_rests() -> None:
    priced = Scripted(DraftTree.chain([3] * 12, "model"), runs_passes=True)
    made = Weighed(Scripted(DOUBTFUL), priced, schedule(), lambda: 0)
    assert run(made.propose(Session(MODEL, tokens=[1]), 60)) == DOUBTFUL
    assert priced.asked == 0


def test_a_token_that_both_guess_keeps_the_better_grade_and_what_a_copy_may() -> None:
    """The sure copy outweighs what an unknown model guesses, the doubtful one does not; both may be relaxed."""
    estimates = schedule()

    for free, source in ((SURE, SUFFIX), (DOUBTFUL, "model")):
        guessed = DraftTree.chain([free.tokens[0], 7, 8, 9], "model")
        made = Weighed(
            Scripted(free), Scripted(guessed, runs_passes=True), AlwaysAsking(estimates), lambda: 12
        )
        tree = run(made.propose(Session(MODEL, tokens=[1]), 60))
        assert tree.tokens[:4] == guessed.tokens
        assert tree.sources[0] == source
        assert tree.grades[0] == (free.grades[0] if source == SUFFIX else 0)
        assert tree.sources_of(0) == {SUFFIX, "model"}
        assert tree.kept([0, 1]).sources_of(0) == {SUFFIX, "model"}
        assert tree.sources_of(1) == {"model"}
        # The target would have written 5, and finds the rest right.
        target = Table({-1: 5, 0: 7, 1: 8, 2: 9, 3: 1})
        verdict = Relaxed(frozenset({SUFFIX})).judge(tree, target)  # type: ignore[arg-type]
        assert verdict.path == (0, 1, 2, 3)
        assert verdict.relaxed == {0}
        alone = Relaxed(frozenset({SUFFIX})).judge(guessed, target)  # type: ignore[arg-type]
        assert alone.path == ()


def observed(estimates: CostAware, guessed: DraftTree, tree: DraftTree, tokens: tuple[int, ...]) -> None:
    """A round in which the dear drafter took 12 ms."""
    estimates.budget(runs_passes=True)
    estimates.note_drafted(guessed)
    path, node = [], -1
    for token in tokens[:-1]:
        found = tree.child(node, token)
        assert found is not None
        path.append(found)
        node = found
    estimates.observe(
        Round(tree, (), Verdict(tuple(path), tokens[-1]), tokens, tree), Timed(300, 0.012, 0.025, 0.038)
    )


def test_free_guesses_beside_them_do_not_make_the_dear_ones_cheap_or_right() -> None:
    guessed = DraftTree.chain([5, 6, 7], "model")
    both = DraftTree((5, 6, 7, 1, 2, 3, 4), (-1, 0, 1, -1, 3, 4, 5), ("model",) * 3 + (SUFFIX,) * 4)
    estimates = schedule(0.0, rate=0.6)
    observed(estimates, guessed, both, (1, 2, 3, 4, 9))  # all free guesses were right, no dear one
    shared = estimates._shared
    assert shared.draft_seconds == pytest.approx(0.012 / 3)
    assert shared.depth_rate < 0.6
    lower = shared.depth_rate
    observed(estimates, guessed, both, (5, 6, 7, 9))
    assert shared.depth_rate > lower


def test_a_tree_is_priced_by_its_levels() -> None:
    """Three levels of two nodes each: three passes, and six rows."""
    guessed = DraftTree((5, 4, 6, 3, 7, 2), (-1, -1, 0, 0, 2, 2), ("eagle",) * 6)
    estimates = schedule(0.0, rate=0.6)
    observed(estimates, guessed, guessed, (5, 6, 2, 9))
    shared = estimates._shared
    assert shared.draft_seconds == pytest.approx(0.012 / 3)
    assert shared.level_nodes == pytest.approx(2.0)
    assert shared.depth_rate > 0.6  # each level held the right token
    assert estimates.budget(runs_passes=True) % 2 == 0
