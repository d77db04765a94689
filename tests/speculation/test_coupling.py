"""Coupling of drawn guesses with the target's tokens, proved by enumerating every outcome on the toy model."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from specrag.engine.sampling import warp
from specrag.engine.sampling_params import SamplingParams
from specrag.models.toy import ToyModel
from specrag.speculation.acceptance import Matching, RowNeeds, Rule, View, coupled, match
from specrag.speculation.tree import ROOT, DraftTree, Verdict
from tests.speculation.enumeration import (
    DRAWN,
    PARAMS,
    TOKENS,
    Dice,
    DiceView,
    Law,
    distance,
    law_by_rounds,
    outcomes,
    plain_law,
    target_probs,
)

VOCAB = 4
Probs = NDArray[np.float64]
#: From the tokens so far to the chain that is verified there.
Draft = Callable[[Dice, Sequence[int]], DraftTree]


def draft_probs(model: ToyModel, tokens: Sequence[int]) -> Probs:
    """Another model's distribution: some of its tokens have no chance, as behind top-k."""
    return warp(model.logits(tokens), SamplingParams(temperature=0.8, top_k=3)).dense(model.vocab_size)


def drawn_chain(dice: Dice, model: ToyModel, context: Sequence[int], length: int) -> DraftTree:
    tokens: list[int] = []
    probs = [draft_probs(model, context)]
    for _ in range(length):
        tokens.append(dice.throw(probs[-1]))
        probs.append(draft_probs(model, [*context, *tokens]))
    return replace(DraftTree.chain(tokens, DRAWN), opinions=tuple(probs))


def stochastic(model: ToyModel, seed: int, most: int) -> Draft:
    """A drafter that draws a chain whose length depends on the context alone."""

    def propose(dice: Dice, context: Sequence[int]) -> DraftTree:
        length = random.Random(f"{seed}/{list(context)}").randint(0, most)
        return drawn_chain(dice, model, context, length)

    return propose


def spoken_law(model: ToyModel, params: SamplingParams, draft: Draft, rule: Rule, count: int = TOKENS) -> Law:
    def round_law(output: tuple[int, ...]) -> Law:
        context = [1, 2, *output]

        def play(dice: Dice) -> tuple[int, ...]:
            tree = draft(dice, context)
            verdict = rule.judge(tree, DiceView(model, params, context, tree, dice))
            assert verdict.bonus is not None
            assert verdict.relaxed == frozenset()
            return (*(tree.tokens[node] for node in verdict.path), verdict.bonus)

        return outcomes(play)

    return law_by_rounds(round_law, count)


def models(table: int) -> tuple[ToyModel, ToyModel]:
    """Target and drafter, alike but not equal."""
    target = ToyModel(VOCAB, order=2, scale=1.2, seed=table)
    drafter = ToyModel(VOCAB, order=2, scale=1.2, seed=table)
    drafter.table += np.random.default_rng(table + 1).normal(0.0, 0.8, target.table.shape).astype(np.float32)
    return target, drafter


class Coupled:
    """Every token by :func:`coupled`, from the drafter's distribution and the target's."""

    needs = RowNeeds(logits=True, opinions=True)

    def judge(self, tree: DraftTree, target: View) -> Verdict:
        def token(node: int) -> int:
            return coupled(target, node, tree.opinions[node + 1], target.probs(node).dense(VOCAB))

        return match(tree, token)


@pytest.mark.parametrize("name", PARAMS)
@settings(max_examples=6, deadline=None)
@given(table=st.integers(0, 1000), lengths=st.integers(0, 1000))
def test_coupling_keeps_the_law(name: str, table: int, lengths: int) -> None:
    target, drafter = models(table)
    expected = plain_law(target, PARAMS[name], [1, 2])
    got = spoken_law(target, PARAMS[name], stochastic(drafter, lengths, 2), Coupled())
    assert sum(got.values()) == pytest.approx(1)
    assert distance(got, expected) < 1e-9


def test_longer_chains_keep_the_law_too() -> None:
    target, drafter = models(3)
    draft: Draft = lambda dice, context: drawn_chain(dice, drafter, context, 3)  # noqa: E731
    got = spoken_law(target, PARAMS["all"], draft, Coupled())
    assert distance(got, plain_law(target, PARAMS["all"], [1, 2])) < 1e-9


def test_a_perfect_drafter_is_never_rejected() -> None:
    """Behind the same warping, so that q is p."""
    model = ToyModel(VOCAB, seed=5)
    params = SamplingParams(temperature=0.8, top_k=3)

    def play(dice: Dice) -> tuple[int, ...]:
        tree = drawn_chain(dice, model, [1, 2], 3)
        return (len(Coupled().judge(tree, DiceView(model, params, [1, 2], tree, dice)).path),)

    assert outcomes(play)[(3,)] == pytest.approx(1)


def test_acceptance_is_one_minus_the_distance_of_the_distributions() -> None:
    """Theorem 3.5 of Leviathan et al.: no rule for one draft accepts more often."""
    for table in range(20):
        target, drafter = models(table)
        params = PARAMS["plain"]

        def play(dice: Dice) -> tuple[int, ...]:
            tree = drawn_chain(dice, drafter, [1, 2], 1)  # noqa: B023 - played at once
            return Coupled().judge(tree, DiceView(target, params, [1, 2], tree, dice)).path  # noqa: B023

        p, q = target_probs(target, params, [1, 2]), draft_probs(drafter, [1, 2])
        assert outcomes(play)[(0,)] == pytest.approx(np.minimum(p, q).sum())


# --- what is wrong is seen -----------------------------------------------------------------------------------


def ratio(p: Probs, q: Probs, x: int) -> float:
    return float(p[x] / q[x])


def p_alone(p: Probs, q: Probs, x: int) -> float:
    return float(p[x])


def turned_ratio(p: Probs, q: Probs, x: int) -> float:
    return float(q[x] / p[x])


def all_or_nothing(p: Probs, q: Probs, x: int) -> float:
    return float(p[x] >= q[x])


def always(p: Probs, q: Probs, x: int) -> float:
    return 1.0


def surplus(p: Probs, q: Probs) -> Probs:
    return np.maximum(p - q, 0)


def all_of_p(p: Probs, q: Probs) -> Probs:
    return p


def unnormalised(p: Probs, q: Probs) -> Probs:
    """max(p - q, 0) taken as it is: what is missing to 1 falls to the last token."""
    left = np.maximum(p - q, 0)
    left[-1] += 1 - left.sum()
    return left


def both_ways(p: Probs, q: Probs) -> Probs:
    return np.abs(p - q)


@dataclass(frozen=True)
class Variant:
    """Coupling spelt out, with parts that can be replaced."""

    chance: Callable[[Probs, Probs, int], float] = ratio
    residual: Callable[[Probs, Probs], Probs] = surplus

    @property
    def needs(self) -> RowNeeds:
        return RowNeeds(logits=True, opinions=True)

    def judge(self, tree: DraftTree, target: View) -> Verdict:
        def token(node: int) -> int:
            p, q = target.probs(node).dense(VOCAB), tree.opinions[node + 1]
            guess = target.guess_from(node, q)
            if target.uniform(node) < self.chance(p, q, guess):
                return guess
            left = self.residual(p, q)
            return target.draw_from(node, left if left.any() else p)

        return match(tree, token)


WRONG: dict[str, Rule] = {
    "the target in place of the residual": Variant(residual=all_of_p),
    "the residual not renormalised": Variant(residual=unnormalised),
    "the absolute difference as residual": Variant(residual=both_ways),
    "accepted by p alone": Variant(p_alone),
    "accepted by q over p": Variant(turned_ratio),
    "accepted if p is not below q": Variant(all_or_nothing),
    "always accepted": Variant(always),
}


@pytest.mark.parametrize("what", ["nothing", *WRONG])
def test_the_check_sees_a_wrong_rule(what: str) -> None:
    rule: Rule = Variant() if what == "nothing" else WRONG[what]
    errors = []
    for table in range(6):
        target, drafter = models(table)
        draft: Draft = lambda dice, context, model=drafter: drawn_chain(dice, model, context, 2)  # type: ignore[misc]  # noqa: E731
        got = spoken_law(target, PARAMS["plain"], draft, rule, count=2)
        assert sum(got.values()) == pytest.approx(1)
        errors.append(distance(got, plain_law(target, PARAMS["plain"], [1, 2], count=2)))
    if what == "nothing":
        assert max(errors) < 1e-9
    else:
        assert max(errors) > 0.02


def test_matching_keeps_the_law_of_a_best_guess() -> None:
    """The likeliest token of q was not drawn from q: accepting it by p/q would be biased, matching is not."""
    for table in range(20):
        target, drafter = models(table)

        def best(dice: Dice, context: Sequence[int], model: ToyModel = drafter) -> DraftTree:
            return DraftTree((int(draft_probs(model, context).argmax()),), (ROOT,), ("best",))

        got = spoken_law(target, PARAMS["plain"], best, Matching(), count=1)
        assert distance(got, plain_law(target, PARAMS["plain"], [1, 2], count=1)) < 1e-9


# --- another target, another residual ------------------------------------------------------------------------


def test_the_target_may_be_another_distribution() -> None:
    """Any mixture of p and q, which needs the drafter's q behind a full chain as well."""
    target, drafter = models(4)
    params = PARAMS["plain"]

    def mixed(tokens: Sequence[int]) -> Probs:
        return 0.3 * target_probs(target, params, tokens) + 0.7 * draft_probs(drafter, tokens)

    class Shifted:
        needs = RowNeeds(logits=True, opinions=True)

        def judge(self, tree: DraftTree, target: View) -> Verdict:
            assert isinstance(target, DiceView)
            context = list(target.context)

            def token(node: int) -> int:
                wanted = mixed([*context, *tree.tokens[: node + 1]])
                return coupled(target, node, tree.opinions[node + 1], wanted)

            return match(tree, token)

    got = spoken_law(target, params, stochastic(drafter, 1, 2), Shifted(), count=2)
    expected: Law = {
        (first, second): mixed([1, 2])[first] * mixed([1, 2, first])[second]
        for first in range(VOCAB)
        for second in range(VOCAB)
    }
    assert distance(got, expected) < 1e-9


def test_a_residual_of_ones_own_takes_the_rejected_guesss_place() -> None:
    target, drafter = models(4)
    params = PARAMS["plain"]
    p, q = target_probs(target, params, [1, 2]), draft_probs(drafter, [1, 2])
    own = np.array([0.0, 2.0, 0.0, 6.0])

    def play(dice: Dice) -> tuple[int, ...]:
        tree = drawn_chain(dice, drafter, [1, 2], 1)
        return (coupled(DiceView(target, params, [1, 2], tree, dice), ROOT, q, p, own),)

    law = outcomes(play)
    kept = np.minimum(p, q)
    for token in range(VOCAB):
        wanted = kept[token] + (1 - kept.sum()) * own[token] / own.sum()
        assert law.get((token,), 0.0) == pytest.approx(wanted)
