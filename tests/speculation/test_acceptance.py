"""Matching, proved by enumerating every outcome of the target's draws on the toy model."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specrag.speculation.target as loop_target
from specrag.engine.executor import run
from specrag.engine.passes import Coroutine
from specrag.engine.sampling import warp
from specrag.engine.sampling_params import SamplingParams
from specrag.engine.session import Session
from specrag.engine.stopping import StopConditions
from specrag.models.toy import ToyModel
from specrag.speculation.acceptance import Matching, RowNeeds, Rule, View
from specrag.speculation.decode import Settings
from specrag.speculation.drafters.base import ANY_DEPTH
from specrag.speculation.tree import ROOT, DraftTree, Verdict
from tests.speculation.enumeration import PARAMS, TOKENS, Dice, DiceView, Law, distance, outcomes, plain_law
from tests.speculation.guessing import Budgets, PruningBudgets, RandomDrafter, decoding, random_tree


def tree_after(seed: int, tokens: Sequence[int], nodes: int, vocab_size: int) -> DraftTree:
    """A drafter that is a function of the context: the same tree after the same tokens."""
    rng = random.Random(f"{seed}{list(tokens)}")
    return random_tree(rng, rng.randint(0, nodes), vocab_size)


def speculative_law(
    model: ToyModel,
    params: SamplingParams,
    prompt: list[int],
    seed: int,
    rule: Rule,
    count: int = TOKENS,
    nodes: int = 6,
) -> Law:
    def play(dice: Dice) -> tuple[int, ...]:
        output: list[int] = []
        while len(output) < count:
            context = [*prompt, *output]
            tree = tree_after(seed, context, nodes, model.vocab_size)
            verdict = rule.judge(tree, DiceView(model, params, context, tree, dice))
            assert verdict.bonus is not None
            output += [*(tree.tokens[node] for node in verdict.path), verdict.bonus]
        return tuple(output[:count])

    return outcomes(play)


def children(tree: DraftTree, node: int) -> Iterator[int]:
    return (child for child, parent in enumerate(tree.parents) if parent == node)


class ByProbability:
    """Wrong: accepts a child that is probable enough, without drawing."""

    needs = RowNeeds(logits=True)

    def judge(self, tree: DraftTree, target: View) -> Verdict:
        path: list[int] = []
        node = ROOT
        while True:
            probs = target.probs(node).dense(5)
            good = [child for child in children(tree, node) if probs[tree.tokens[child]] > 0.3]
            if not good:
                return Verdict(tuple(path), target.draw(node))
            node = good[0]
            path.append(node)


class ByRedrawing:
    """Wrong: every sibling gets a draw of its own, and so does the token after a rejection."""

    needs = RowNeeds()

    def judge(self, tree: DraftTree, target: View) -> Verdict:
        path: list[int] = []
        node = ROOT
        while True:
            hit = next((c for c in children(tree, node) if target.draw(node) == tree.tokens[c]), None)
            if hit is None:
                return Verdict(tuple(path), target.draw(node))
            path.append(hit)
            node = hit


@pytest.mark.parametrize("name", PARAMS)
@settings(max_examples=8, deadline=None)
@given(table=st.integers(0, 1000), guesses=st.integers(0, 1000))
def test_matching_keeps_the_law(name: str, table: int, guesses: int) -> None:
    model = ToyModel(vocab_size=5, order=2, scale=1.0, seed=table)
    expected = plain_law(model, PARAMS[name], [1, 2])
    assert sum(expected.values()) == pytest.approx(1)
    got = speculative_law(model, PARAMS[name], [1, 2], guesses, Matching())
    assert distance(got, expected) < 1e-9


@pytest.mark.parametrize("rule", [ByProbability(), ByRedrawing()])
def test_the_check_sees_a_wrong_rule(rule: Rule) -> None:
    """One token behind small trees, as the draws of a wrong rule are many more."""
    model = ToyModel(vocab_size=5, order=2, scale=1.0, seed=1)
    params = PARAMS["plain"]
    expected = plain_law(model, params, [1, 2], count=1)
    errors = []
    for seed in range(6):
        right = speculative_law(model, params, [1, 2], seed, Matching(), count=1, nodes=3)
        assert distance(right, expected) < 1e-9
        wrong = speculative_law(model, params, [1, 2], seed, rule, count=1, nodes=3)
        assert sum(wrong.values()) == pytest.approx(1)
        errors.append(distance(wrong, expected))
    assert max(errors) > 0.05


class ContextDrafter(RandomDrafter):
    """The same tree after the same tokens, and never an empty one."""

    def propose(self, session: Session, budget: int, depth: int = ANY_DEPTH) -> Coroutine[DraftTree]:
        yield from ()
        return random_tree(random.Random(f"{self.seed}{session.tokens}"), budget, self.vocab_size, most=depth)


@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("prunes", [False, True])
def test_the_whole_loop_keeps_the_law(
    name: str, seed: int, prunes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same proof with sessions, caches and the loop itself: only its draw is replaced by dice."""
    model = ToyModel(vocab_size=4, order=2, scale=1.0, seed=seed)
    params = PARAMS[name]
    accepted = pruned = 0

    def play(dice: Dice) -> tuple[int, ...]:
        nonlocal accepted, pruned
        monkeypatch.setattr(
            loop_target, "choose", lambda logits, sampling, _: dice.throw(warp(logits, sampling).dense(4))
        )
        drafter = ContextDrafter(seed, model.vocab_size)
        schedule = PruningBudgets([2], seed) if prunes else Budgets([2])
        decoded = run(decoding(model, [1, 2], Settings(StopConditions(TOKENS), params), drafter, schedule))
        accepted += sum(step.accepted for step in decoded.steps)
        pruned += schedule.pruned if isinstance(schedule, PruningBudgets) else 0
        return tuple(decoded.tokens)

    assert distance(outcomes(play), plain_law(model, params, [1, 2])) < 1e-9
    assert accepted > 0
    assert (pruned > 0) == prunes


class ListedDraws:
    """A view whose draws are a list, in the order in which they are asked for."""

    def __init__(self, draws: Sequence[int]) -> None:
        self._draws = draws
        self.asked: list[int] = []

    def draw(self, node: int) -> int:
        self.asked.append(node)
        return self._draws[len(self.asked) - 1]


@given(st.integers(0, 10**6), st.integers(0, 24), st.lists(st.integers(0, 3), min_size=30, max_size=30))
def test_matching_follows_the_draws_as_far_as_the_tree_does(seed: int, nodes: int, draws: list[int]) -> None:
    tree = random_tree(random.Random(seed), nodes, 4)
    view = ListedDraws(draws)
    verdict = Matching().judge(tree, view)  # type: ignore[arg-type]  # it may ask for draws alone
    accepted = [tree.tokens[node] for node in verdict.path]
    assert [*accepted, verdict.bonus] == draws[: len(accepted) + 1]
    assert view.asked == [ROOT, *verdict.path]  # each once, from the root downwards
    assert verdict.bonus is not None
    assert tree.child(view.asked[-1], verdict.bonus) is None
    assert verdict.relaxed == frozenset()
