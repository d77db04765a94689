"""RAPID's rule: the formulas against slow ones, the laws by enumerating every outcome on the toy model."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from specrag.engine.sampling import warp
from specrag.engine.sampling_params import SamplingParams
from specrag.errors import InputError
from specrag.models.toy import ToyModel
from specrag.speculation.acceptance import Rule, View, coupled, match
from specrag.speculation.augmented_target import (
    Augmented,
    AugmentedSettings,
    Guard,
    augmented_probs,
    guarded,
    paper_residual,
)
from specrag.speculation.tree import DraftTree, Verdict
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
PROMPT = [1, 2]
UNIT = SamplingParams(temperature=1.0)
SAMPLED = [name for name, params in PARAMS.items() if not params.greedy]
Probs = NDArray[np.float64]
Draft = Callable[[Dice, Sequence[int]], DraftTree]


def slowly(
    logits: Sequence[float], draft: Sequence[float], params: SamplingParams, setting: AugmentedSettings
) -> list[float]:
    """The guarded p-hat token by token, as the formulas read."""
    own = warp(np.array(logits), params).dense(len(logits))
    exponents = []
    for token, prob in enumerate(own):
        shift = setting.eta * (draft[token] - prob)
        if draft[token] < setting.mask * max(draft):
            shift = 0.0
        exponents.append(math.log(prob) + shift if prob > 0 else -math.inf)
    highest = max(exponents)
    weights = [math.exp(exponent - highest) for exponent in exponents]
    moved = [weight / sum(weights) for weight in weights]
    if setting.effective_guard == "off":
        return moved
    put_back = [own[k] if value < 0.1 * max(moved) else value for k, value in enumerate(moved)]
    total = sum(put_back) if setting.effective_guard == "renormalised" else 1.0
    return [float(value / total) for value in put_back]


def quickly(
    logits: Sequence[float], draft: Sequence[float], params: SamplingParams, setting: AugmentedSettings
) -> Probs:
    own = warp(np.array(logits), params)
    moved = augmented_probs(own, np.array(draft), setting.eta, setting.mask)
    found = np.zeros(len(logits))
    found[own.tokens] = guarded(moved, own, setting.effective_guard)
    return found


SETTINGS = st.builds(
    lambda eta, guard, mask: AugmentedSettings(eta, "paper", guard, mask),
    st.sampled_from([0.0, 0.5, 5.0, 20.0, 50.0]),
    st.sampled_from(["renormalised", "raw", "off"]),
    st.sampled_from([0.0, 0.1]),
)


# --- the formulas --------------------------------------------------------------------------------------------


@given(
    st.lists(st.floats(-8, 8), min_size=2, max_size=9),
    st.integers(0, 1000),
    st.sampled_from(SAMPLED),
    SETTINGS,
)
def test_the_formulas_are_the_papers(
    logits: list[float], seed: int, name: str, setting: AugmentedSettings
) -> None:
    draft = np.random.default_rng(seed).dirichlet(np.full(len(logits), 0.5))
    found = quickly(logits, draft.tolist(), PARAMS[name], setting)
    assert found == pytest.approx(slowly(logits, draft.tolist(), PARAMS[name], setting), abs=1e-12)


@given(st.integers(0, 1000), st.sampled_from(SAMPLED), SETTINGS)
def test_without_transfer_nothing_is_moved(seed: int, name: str, setting: AugmentedSettings) -> None:
    rng = np.random.default_rng(seed)
    logits, draft = rng.normal(0, 2, 9), rng.dirichlet(np.ones(9))
    found = quickly(logits.tolist(), draft.tolist(), PARAMS[name], replace(setting, eta=0.0))
    assert found == pytest.approx(warp(logits, PARAMS[name]).dense(9), abs=1e-12)


@pytest.mark.parametrize("guard", ["renormalised", "off"])
@pytest.mark.parametrize("eta", [5.0, 50.0, 1e6])
def test_extreme_logits_of_half_precision_are_safe(guard: Guard, eta: float) -> None:
    """As a bf16 model gives them: large, equal, forbidden."""
    logits = np.array([3e4, 3e4, -3e4, -math.inf, 29952.0, 0.0], dtype=np.float32)
    draft = np.array([0.0, 0.0, 1.0, 0.0, 0.0, 0.0], dtype=np.float32)
    with np.errstate(all="raise", under="ignore"):
        found = quickly(logits.tolist(), draft.tolist(), UNIT, AugmentedSettings(eta, guard=guard))
    assert np.isfinite(found).all()
    assert found.sum() == pytest.approx(1)
    assert found[3] == 0.0


def test_a_guarded_tail_keeps_the_targets_own_share() -> None:
    """PAPERS.md: raw, the vector may sum to nearly 2."""
    logits, draft = [math.log(0.5), math.log(0.5)], [0.0, 1.0]
    setting = AugmentedSettings(20.0, "paper", "raw")
    raw = quickly(logits, draft, UNIT, setting)
    assert raw[0] == pytest.approx(0.5)
    assert raw.sum() == pytest.approx(1.5, abs=1e-6)
    assert quickly(logits, draft, UNIT, AugmentedSettings(20.0)) == pytest.approx(raw / raw.sum())
    assert quickly(logits, draft, UNIT, AugmentedSettings(20.0, guard="off"))[0] < 1e-6


# --- the laws ------------------------------------------------------------------------------------------------


def models(table: int) -> tuple[ToyModel, ToyModel]:
    """Target and drafter, alike but not equal."""
    target = ToyModel(VOCAB, order=2, scale=1.2, seed=table)
    drafter = ToyModel(VOCAB, order=2, scale=1.2, seed=table)
    drafter.table += np.random.default_rng(table + 1).normal(0.0, 0.8, target.table.shape).astype(np.float32)
    return target, drafter


def opinions(
    model: ToyModel, params: SamplingParams, context: Sequence[int], tokens: Sequence[int]
) -> tuple[Probs, ...]:
    own = UNIT if params.greedy else params
    return tuple(target_probs(model, own, [*context, *tokens[:count]]) for count in range(len(tokens) + 1))


def guesses(model: ToyModel, params: SamplingParams, seed: int, most: int = 2) -> Draft:
    """Drawn chains and copies of any length, also of none; what it is depends on the context alone."""

    def propose(dice: Dice, context: Sequence[int]) -> DraftTree:
        rng = random.Random(f"{seed}/{list(context)}")
        length, copies = rng.randint(0, most), rng.random() < 0.3
        tokens: list[int] = []
        for _ in range(length):
            probs = opinions(model, params, [*context, *tokens], [])[0]
            tokens.append(rng.randrange(VOCAB) if copies else dice.throw(probs))
        known = opinions(model, params, context, tokens)
        return replace(DraftTree.chain(tokens, "copy" if copies else DRAWN), opinions=known)

    return propose


def spoken_law(model: ToyModel, params: SamplingParams, draft: Draft, rule: Rule, count: int = TOKENS) -> Law:
    def round_law(output: tuple[int, ...]) -> Law:
        context = [*PROMPT, *output]

        def play(dice: Dice) -> tuple[int, ...]:
            tree = draft(dice, context)
            verdict = rule.judge(tree, DiceView(model, params, context, tree, dice))
            assert verdict.bonus is not None
            return (*(tree.tokens[node] for node in verdict.path), verdict.bonus)

        return outcomes(play)

    return law_by_rounds(round_law, count)


def augmented_law(
    target: ToyModel,
    drafter: ToyModel,
    params: SamplingParams,
    setting: AugmentedSettings,
    count: int = TOKENS,
) -> Law:
    """Token by token from p-hat."""
    law: Law = {(): 1.0}
    for _ in range(count):
        longer: Law = defaultdict(float)
        for tokens, weight in law.items():
            context = [*PROMPT, *tokens]
            draft = opinions(drafter, params, context, [])[0]
            probs = slowly(target.logits(context).tolist(), draft.tolist(), params, setting)
            for token, prob in enumerate(probs):
                if prob:
                    longer[*tokens, token] += weight * prob
        law = longer
    return law


@pytest.mark.parametrize("name", SAMPLED)
@settings(max_examples=6, deadline=None)
@given(
    table=st.integers(0, 1000),
    lengths=st.integers(0, 1000),
    eta=st.sampled_from([0.0, 1.0, 5.0, 20.0, 50.0]),
    guard=st.sampled_from([None, "off"]),
    mask=st.sampled_from([0.0, 0.1]),
)
def test_the_exact_residual_gives_p_hat(
    name: str, table: int, lengths: int, eta: float, guard: Guard | None, mask: float
) -> None:
    """Whatever was drawn or copied, and wherever rounds end."""
    target, drafter = models(table)
    params, setting = PARAMS[name], AugmentedSettings(eta, guard=guard, mask=mask)
    expected = augmented_law(target, drafter, params, setting)
    got = spoken_law(target, params, guesses(drafter, params, lengths), Augmented(setting, params))
    assert sum(got.values()) == pytest.approx(1)
    assert distance(got, expected) < 1e-9
    if eta == 0:
        assert distance(got, plain_law(target, params, PROMPT)) < 1e-9


def drawn(model: ToyModel, params: SamplingParams, length: int) -> Draft:
    """Always a drawn chain of this length."""

    def propose(dice: Dice, context: Sequence[int]) -> DraftTree:
        tokens: list[int] = []
        for _ in range(length):
            tokens.append(dice.throw(opinions(model, params, [*context, *tokens], [])[0]))
        known = opinions(model, params, context, tokens)
        return replace(DraftTree.chain(tokens, DRAWN), opinions=known)

    return propose


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.parametrize("table", range(4))
def test_without_transfer_the_papers_residual_gives_p(name: str, table: int) -> None:
    target, drafter = models(table)
    params = PARAMS[name]
    rule = Augmented(AugmentedSettings(0.0, "paper"), params)
    for length in (0, 2):
        got = spoken_law(target, params, drawn(drafter, params, length), rule)
        assert distance(got, plain_law(target, params, PROMPT)) < 1e-9


def printed_text_law(
    target: ToyModel, drafter: ToyModel, params: SamplingParams, setting: AugmentedSettings
) -> Law:
    """Token by token what Algorithm 1 prints for a verified one."""
    law: Law = {(): 1.0}
    for _ in range(TOKENS):
        longer: Law = defaultdict(float)
        for tokens, weight in law.items():
            context = [*PROMPT, *tokens]
            p, q = (target_probs(model, params, context) for model in (target, drafter))
            weights = np.array(slowly(target.logits(context).tolist(), q.tolist(), params, setting))
            for token, prob in enumerate(printed_law(p, q, weights)):
                longer[*tokens, token] += weight * prob
        law = longer
    return law


@pytest.mark.slow
@pytest.mark.parametrize("guard", ["raw", "off"])
@pytest.mark.parametrize("name", ["plain", "all"])
@settings(max_examples=6, deadline=None)
@given(table=st.integers(0, 1000), lengths=st.integers(0, 1000))
def test_the_papers_law_does_not_depend_on_where_rounds_end(
    name: str, guard: Guard, table: int, lengths: int
) -> None:
    target, drafter = models(table)
    params, setting = PARAMS[name], AugmentedSettings(10.0, "paper", guard)
    got = spoken_law(target, params, guesses(drafter, params, lengths), Augmented(setting, params))
    assert distance(got, printed_text_law(target, drafter, params, setting)) < 1e-9


def printed_law(p: Probs, q: Probs, weights: Probs) -> Probs:
    """Of one verified token: Algorithm 1 as it is printed."""
    kept = np.array([q[x] * min(1.0, weights[x] / q[x]) if q[x] else 0.0 for x in range(len(p))])
    left = np.array([max(p[x] - weights[x], p[x] - q[x], 0.0) for x in range(len(p))])
    left = left / left.sum() if left.any() else p
    law: Probs = kept + (1 - kept.sum()) * left
    return law


@pytest.mark.parametrize("guard", ["raw", "renormalised", "off"])
@pytest.mark.parametrize("name", SAMPLED)
def test_the_papers_residual_gives_what_is_printed(name: str, guard: Guard) -> None:
    """Of every token, also the one behind a full chain: it is neither p nor p-hat."""
    params, setting = PARAMS[name], AugmentedSettings(10.0, "paper", guard)
    off_p, off_p_hat = [], []
    for table in range(6):
        target, drafter = models(table)
        got = spoken_law(target, params, drawn(drafter, params, 1), Augmented(setting, params), count=1)
        p, q = (target_probs(model, params, PROMPT) for model in (target, drafter))
        weights = np.array(slowly(target.logits(PROMPT).tolist(), q.tolist(), params, setting))
        expected = printed_law(p, q, weights)
        assert [got.get((token,), 0.0) for token in range(VOCAB)] == pytest.approx(expected, abs=1e-9)
        off_p.append(float(np.abs(expected - p).sum() / 2))
        off_p_hat.append(float(np.abs(expected - weights / weights.sum()).sum() / 2))

        def play(dice: Dice, target: ToyModel = target, drafter: ToyModel = drafter) -> tuple[int, ...]:
            tree = drawn(drafter, params, 1)(dice, PROMPT)
            verdict = Augmented(setting, params).judge(tree, DiceView(target, params, PROMPT, tree, dice))
            assert verdict.bonus is not None
            return (tree.tokens[0], verdict.bonus) if verdict.path else ()

        law = outcomes(play)
        for first in range(VOCAB):
            accepted = sum(law.get((first, second), 0.0) for second in range(VOCAB))
            behind = [*PROMPT, first]
            own, draft = (target_probs(model, params, behind) for model in (target, drafter))
            wanted = np.array(slowly(target.logits(behind).tolist(), draft.tolist(), params, setting))
            after = printed_law(own, draft, wanted)
            for second in range(VOCAB):
                assert law.get((first, second), 0.0) == pytest.approx(accepted * after[second], abs=1e-9)
    assert max(off_p) > 0.05
    assert max(off_p_hat) > 0.02


def test_the_distances_that_are_documented() -> None:
    """PAPERS.md, section 2: the printed rule samples neither p nor p-hat."""
    rng = np.random.default_rng(0)
    found: dict[float, list[tuple[float, float]]] = {5.0: [], 10.0: [], 20.0: []}
    for _ in range(200):
        logits = rng.normal(0, 2, 50)
        own, other = warp(logits, UNIT), warp(logits + rng.normal(0, 1, 50), UNIT)
        p, q = own.dense(50), other.dense(50)
        for eta, distances in found.items():
            moved = augmented_probs(own, q, eta)
            law = printed_law(p, q, moved)
            distances.append((float(np.abs(law - p).sum() / 2), float(np.abs(law - moved).sum() / 2)))
    means = {eta: np.mean(distances, axis=0).round(2).tolist() for eta, distances in found.items()}
    assert means == {5.0: [0.17, 0.06], 10.0: [0.22, 0.18], 20.0: [0.22, 0.37]}


class BonusFromP:
    """Wrong at eta > 0: the token behind a full chain does without the drafter's opinion."""

    def __init__(self, setting: AugmentedSettings, params: SamplingParams) -> None:
        self._setting, self._params = setting, params
        self.needs = Augmented(setting, params).needs

    def judge(self, tree: DraftTree, target: View) -> Verdict:
        def token(node: int) -> int:
            own = target.probs(node)
            if node == len(tree) - 1:
                return target.draw(node)
            moved = augmented_probs(own, tree.opinions[node + 1], self._setting.eta)
            found = np.zeros(VOCAB)
            found[own.tokens] = guarded(moved, own, self._setting.effective_guard)
            return coupled(target, node, tree.opinions[node + 1], found)

        return match(tree, token)


def test_the_check_sees_a_bonus_without_the_drafters_opinion() -> None:
    params, setting = PARAMS["plain"], AugmentedSettings(10.0)
    target, drafter = models(0)
    expected = augmented_law(target, drafter, params, setting, count=2)
    right = spoken_law(target, params, drawn(drafter, params, 1), Augmented(setting, params), count=2)
    wrong = spoken_law(target, params, drawn(drafter, params, 1), BonusFromP(setting, params), count=2)
    assert distance(right, expected) < 1e-9
    assert distance(wrong, expected) > 0.02


def test_the_exact_residual_accepts_as_often_as_any_rule_can() -> None:
    params = PARAMS["plain"]
    for table in range(10):
        target, drafter = models(table)
        setting = AugmentedSettings(10.0)

        def play(dice: Dice) -> tuple[int, ...]:
            tree = drawn(drafter, params, 1)(dice, PROMPT)  # noqa: B023 - played at once
            view = DiceView(target, params, PROMPT, tree, dice)  # noqa: B023
            return Augmented(setting, params).judge(tree, view).path  # noqa: B023

        q = target_probs(drafter, params, PROMPT)
        p_hat = slowly(target.logits(PROMPT).tolist(), q.tolist(), params, setting)
        assert outcomes(play)[(0,)] == pytest.approx(np.minimum(p_hat, q).sum())


# --- greedy --------------------------------------------------------------------------------------------------


@given(st.integers(0, 1000), st.integers(0, 1000), st.sampled_from([0.0, 3.0, 20.0]))
@example(493, 0, 20.0)  # its best first token leads by 2.6e-4
def test_greedy_text_is_the_limit_of_drawn_ones_the_targets_own(table: int, seed: int, eta: float) -> None:
    target, drafter = models(table)
    params, setting = PARAMS["greedy"], AugmentedSettings(eta)
    got = spoken_law(target, params, guesses(drafter, params, seed), Augmented(setting, params))
    expected = plain_law(target, params, PROMPT)
    assert distance(got, expected) < 1e-9
    (path,) = expected
    steps = [np.sort(target.logits([*PROMPT, *path[:count]])) for count in range(len(path))]
    # The drafter moves a logit by up to twice eta times the temperature, here 4e-6.
    assume(min(step[-1] - step[-2] for step in steps) > 1e-4)
    cold = SamplingParams(temperature=1e-7)
    assert distance(augmented_law(target, drafter, cold, setting), expected) < 1e-6


def test_a_greedy_text_needs_no_opinion() -> None:
    rule = Augmented(AugmentedSettings(10.0), PARAMS["greedy"])
    assert not rule.needs.opinions
    tree = DraftTree.chain([1], "copy")
    model = ToyModel(VOCAB)
    model.table[:] = 1.0
    assert rule.judge(tree, DiceView(model, rule.sampling, PROMPT, tree, Dice([]))) == Verdict((), 0)


# --- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"eta": -1.0}, "eta"),
        ({"eta": math.inf}, "eta"),
        ({"eta": True}, "eta"),
        ({"residual": "both"}, "residual"),
        ({"guard": "half"}, "guard"),
        ({"guard": "raw"}, "does not sum to 1"),
        ({"mask": 1.5}, "mask"),
    ],
)
def test_wrong_settings_are_refused(change: dict[str, object], match: str) -> None:
    with pytest.raises(InputError, match=match):
        AugmentedSettings(**change)  # type: ignore[arg-type]


def test_a_tree_without_opinions_is_refused() -> None:
    params, model = PARAMS["plain"], ToyModel(VOCAB)
    bare = DraftTree.chain([1], "copy")
    rule = Augmented(AugmentedSettings(5.0, "paper"), params)
    with pytest.raises(InputError, match="distribution behind every node"):
        rule.judge(bare, DiceView(model, params, PROMPT, bare, Dice([])))


def test_what_a_schedule_leaves_out_takes_its_opinions_with_it() -> None:
    model = ToyModel(VOCAB)
    tree = replace(DraftTree.chain([1, 2, 3], "drawn"), opinions=opinions(model, UNIT, PROMPT, [1, 2, 3]))
    kept = tree.kept([0])
    assert len(kept.opinions) == 2
    assert np.array_equal(kept.opinions[1], cast("Probs", tree.opinions[1]))
    with pytest.raises(InputError, match="opinions"):
        replace(tree, opinions=tree.opinions[:2])


def test_paper_residual_is_zero_where_the_target_has_less() -> None:
    p, q = np.array([0.2, 0.8, 0.0]), np.array([0.5, 0.4, 0.1])
    assert paper_residual(p, np.array([0.3, 0.6, 0.1]), q) == pytest.approx([0.0, 0.4, 0.0])
