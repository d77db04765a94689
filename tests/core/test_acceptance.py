"""Acceptance rules, proved by enumerating every outcome of the target's draws on the toy model."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specrag.speculation.decode as loop
from specrag.engine.executor import run
from specrag.engine.passes import Coroutine
from specrag.engine.sampling import SamplingParams, warp
from specrag.engine.session import Session
from specrag.engine.stopping import StopConditions
from specrag.models.toy import ToyModel
from specrag.speculation.acceptance import matching
from specrag.speculation.decode import Settings
from specrag.speculation.tree import ROOT, DraftTree, Verdict
from tests.core.guessing import Budgets, RandomDrafter, decoding, random_tree

Law = dict[tuple[int, ...], float]
Draw = Callable[[int], int]
Probability = Callable[[int, int], float]
Rule = Callable[[DraftTree, Draw, Probability], Verdict]

TOKENS = 3


@dataclass
class Dice:
    """Replays the first outcomes of a sequence of draws, and says what else could have come."""

    script: list[int]
    weight: float = 1.0
    used: int = 0
    branches: list[list[int]] = field(default_factory=list)

    def throw(self, probs: np.ndarray) -> int:
        outcomes = np.flatnonzero(probs)
        if self.used == len(self.script):
            # The first visit takes the first outcome; the others are to be visited later.
            self.branches += [[*self.script, int(other)] for other in outcomes[1:]]
            self.script.append(int(outcomes[0]))
        token = self.script[self.used]
        self.used += 1
        self.weight *= float(probs[token])
        return token


def outcomes(play: Callable[[Dice], tuple[int, ...]]) -> Law:
    """The exact law of what ``play`` returns, over all outcomes of its dice."""
    law: Law = defaultdict(float)
    left: list[list[int]] = [[]]
    while left:
        dice = Dice(left.pop())
        law[play(dice)] += dice.weight
        left += dice.branches
    return law


def distance(left: Law, right: Law) -> float:
    """Largest difference of a probability."""
    return max(abs(left.get(key, 0.0) - right.get(key, 0.0)) for key in {*left, *right})


def target_probs(model: ToyModel, params: SamplingParams, tokens: Sequence[int]) -> np.ndarray:
    return warp(model.logits(tokens), params).dense(model.vocab_size)


def plain_law(model: ToyModel, params: SamplingParams, prompt: list[int], count: int = TOKENS) -> Law:
    law: Law = {(): 1.0}
    for _ in range(count):
        longer: Law = defaultdict(float)
        for tokens, weight in law.items():
            for token, prob in enumerate(target_probs(model, params, [*prompt, *tokens])):
                if prob:
                    longer[*tokens, token] += weight * prob
        law = longer
    return law


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

            def probs(node: int, context: list[int] = context, tree: DraftTree = tree) -> np.ndarray:
                path: list[int] = []
                while node != ROOT:
                    path.append(tree.tokens[node])
                    node = tree.parents[node]
                return target_probs(model, params, [*context, *path[::-1]])

            verdict = rule(
                tree, lambda node: dice.throw(probs(node)), lambda node, token: float(probs(node)[token])
            )
            assert verdict.bonus is not None
            output += [*(tree.tokens[node] for node in verdict.path), verdict.bonus]
        return tuple(output[:count])

    return outcomes(play)


def by_matching(tree: DraftTree, draw: Draw, probability: Probability) -> Verdict:
    return matching(tree, draw)


def children(tree: DraftTree, node: int) -> Iterator[int]:
    return (child for child, parent in enumerate(tree.parents) if parent == node)


def by_probability(tree: DraftTree, draw: Draw, probability: Probability) -> Verdict:
    """Wrong: accepts a child that is probable enough, without drawing."""
    path: list[int] = []
    node = ROOT
    while True:
        good = [child for child in children(tree, node) if probability(node, tree.tokens[child]) > 0.3]
        if not good:
            return Verdict(tuple(path), draw(node))
        node = good[0]
        path.append(node)


def by_redrawing(tree: DraftTree, draw: Draw, probability: Probability) -> Verdict:
    """Wrong: every sibling gets a draw of its own, and so does the token after a rejection."""
    path: list[int] = []
    node = ROOT
    while True:
        hit = next((child for child in children(tree, node) if draw(node) == tree.tokens[child]), None)
        if hit is None:
            return Verdict(tuple(path), draw(node))
        path.append(hit)
        node = hit


PARAMS = {
    "plain": SamplingParams(temperature=1.0),
    "temperature": SamplingParams(temperature=0.6),
    "top-k": SamplingParams(temperature=1.3, top_k=3),
    "top-p": SamplingParams(temperature=0.9, top_p=0.8),
    "min-p": SamplingParams(temperature=1.0, min_p=0.15),
    "all": SamplingParams(temperature=1.4, top_k=4, top_p=0.95, min_p=0.05),
    "greedy": SamplingParams(),
}


@pytest.mark.parametrize("name", PARAMS)
@settings(max_examples=8, deadline=None)
@given(table=st.integers(0, 1000), guesses=st.integers(0, 1000))
def test_matching_keeps_the_law(name: str, table: int, guesses: int) -> None:
    model = ToyModel(vocab_size=5, order=2, scale=1.0, seed=table)
    expected = plain_law(model, PARAMS[name], [1, 2])
    assert sum(expected.values()) == pytest.approx(1)
    got = speculative_law(model, PARAMS[name], [1, 2], guesses, by_matching)
    assert distance(got, expected) < 1e-9


@pytest.mark.parametrize("rule", [by_probability, by_redrawing])
def test_the_check_sees_a_wrong_rule(rule: Rule) -> None:
    """One token behind small trees, as the draws of a wrong rule are many more."""
    model = ToyModel(vocab_size=5, order=2, scale=1.0, seed=1)
    params = PARAMS["plain"]
    expected = plain_law(model, params, [1, 2], count=1)
    errors = []
    for seed in range(6):
        right = speculative_law(model, params, [1, 2], seed, by_matching, count=1, nodes=3)
        assert distance(right, expected) < 1e-9
        wrong = speculative_law(model, params, [1, 2], seed, rule, count=1, nodes=3)
        assert sum(wrong.values()) == pytest.approx(1)
        errors.append(distance(wrong, expected))
    assert max(errors) > 0.05


class ContextDrafter(RandomDrafter):
    """The same tree after the same tokens, and never an empty one."""

    def propose(self, session: Session, budget: int) -> Coroutine[DraftTree]:
        yield from ()
        return random_tree(random.Random(f"{self.seed}{session.tokens}"), budget, self.vocab_size)


@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.parametrize("seed", range(4))
def test_the_whole_loop_keeps_the_law(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same proof with sessions, caches and the loop itself: only its draw is replaced by dice."""
    model = ToyModel(vocab_size=4, order=2, scale=1.0, seed=seed)
    params = PARAMS[name]
    accepted = 0

    def play(dice: Dice) -> tuple[int, ...]:
        nonlocal accepted
        monkeypatch.setattr(
            loop, "choose", lambda logits, sampling, _: dice.throw(warp(logits, sampling).dense(4))
        )
        drafter = ContextDrafter(seed, model.vocab_size)
        decoded = run(
            decoding(model, [1, 2], Settings(StopConditions(TOKENS), params), drafter, Budgets([2]))
        )
        accepted += sum(step.accepted for step in decoded.steps)
        return tuple(decoded.tokens)

    assert distance(outcomes(play), plain_law(model, params, [1, 2])) < 1e-9
    assert accepted > 0
