"""The RAG drafter: what it proposes behind another prompt, its rollback, and RAPID's law through the whole loop."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from specrag.engine.executor import run
from specrag.engine.processors import LogitsProcessor, build_processors
from specrag.engine.sampling import warp
from specrag.engine.sampling_params import SamplingParams
from specrag.engine.session import Session
from specrag.engine.stopping import StopConditions
from specrag.errors import ContextLengthError, InputError
from specrag.models.toy import ToyModel
from specrag.speculation.acceptance import Matching, Rule
from specrag.speculation.augmented_target import Augmented, AugmentedSettings, Residual
from specrag.speculation.decode import Settings
from specrag.speculation.drafters.base import Stopwatch
from specrag.speculation.drafters.draft_model import Guess
from specrag.speculation.drafters.rag import RAG, Guessing, RagDrafter
from specrag.speculation.drafters.suffix import SUFFIX
from specrag.speculation.schedule.base import Timed
from specrag.speculation.schedule.chains import ChainCosts, ChainLength
from specrag.speculation.target import TargetView
from specrag.speculation.tree import DraftTree, Round, Verdict
from tests.speculation.enumeration import PARAMS, TOKENS, Dice, DiceView, Law, distance, outcomes, plain_law
from tests.speculation.guessing import Budgets, decoding, plain_decoding
from tests.speculation.test_augmented_target import augmented_law, slowly

VOCAB = 6
PROMPT = [1, 2, 3, 4, 5, 0, 1]
READING = [2, 4, 4]
GREEDY = SamplingParams()
DRAWN = SamplingParams(temperature=0.9, top_k=4, seed=3)


def toy(seed: int = 0, vocab_size: int = VOCAB, context_length: int = 512) -> ToyModel:
    return ToyModel(vocab_size, order=2, scale=1.5, seed=seed, context_length=context_length)


def near(target: ToyModel, noise: float = 0.6) -> ToyModel:
    model = ToyModel(target.vocab_size, order=2, scale=1.5, seed=0)
    rng = np.random.default_rng(9)
    model.table = target.table + rng.normal(0, noise, target.table.shape).astype(np.float32)
    return model


def greedy(model: ToyModel, tokens: Sequence[int], count: int) -> list[int]:
    found = list(tokens)
    for _ in range(count):
        found.append(int(model.logits(found).argmax()))
    return found[len(tokens) :]


class Followed:
    """A drafter beside a target's session, driven by hand."""

    def __init__(
        self, drafter: RagDrafter, output: Sequence[int] = (), prompt: Sequence[int] = PROMPT
    ) -> None:
        self.drafter = drafter
        self.session = Session(toy())
        run(self.session.extend(prompt))
        run(drafter.start(self.session, ()))
        if output:
            run(self.session.extend(output))

    def propose(self, budget: int) -> DraftTree:
        tree: DraftTree = run(self.drafter.propose(self.session, budget))
        return tree


# --- what it proposes ----------------------------------------------------------------------------------------


def test_it_proposes_its_own_text_behind_its_own_prompt() -> None:
    followed = Followed(RagDrafter(toy(1), READING, Guessing(GREEDY)))
    tree = followed.propose(7)
    assert tree.tokens == tuple(greedy(toy(1), READING, 7))
    assert set(tree.sources) == {RAG}
    assert tree.opinions == ()
    for said in ([*tree.tokens[:3], 5], [0], list(tree.tokens), [5, 4, 3, 2, 1, 0] * 8):
        other = Followed(RagDrafter(toy(1), READING, Guessing(GREEDY)), said)
        assert other.propose(4).tokens == tuple(greedy(toy(1), [*READING, *said], 4))


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=1.0), DRAWN])
def test_its_opinion_stands_behind_every_node(sampling: SamplingParams) -> None:
    followed = Followed(RagDrafter(toy(1), READING, Guessing(sampling, opinions=True)), [1, 5])
    for budget in (4, 0):
        tree = followed.propose(budget)
        assert len(tree) == budget
        for count, opinion in enumerate(tree.opinions):
            context = [*READING, 1, 5, *tree.tokens[:count]]
            assert np.array_equal(opinion, warp(toy(1).logits(context), sampling).dense(VOCAB))
        assert len(tree.opinions) == budget + 1


def test_each_guess_costs_a_pass_and_the_last_opinion_one_more() -> None:
    for opinions, passes in ((False, 5), (True, 6)):
        model = toy(1)
        sampling = DRAWN if opinions else GREEDY
        followed = Followed(RagDrafter(model, READING, Guessing(sampling, opinions)))
        followed.propose(1)  # reads the prompt
        for kept in (5, 2, 0):
            before = model.passes
            tree = followed.propose(5)
            assert model.passes - before == passes
            run(followed.session.extend([*tree.tokens[:kept], 0]))


def test_copies_come_from_what_it_reads_and_cost_one_pass() -> None:
    model = toy(1)
    reading = [0, 1, 2, 3, 4, 5, 5, 4]
    followed = Followed(RagDrafter(model, reading, Guessing(DRAWN, opinions=True, copy_from=3)), [1, 2, 3])
    followed.propose(0)  # reads the prompt
    before = model.passes
    tree = followed.propose(3)
    assert model.passes - before == 1
    assert tree.tokens == (4, 5, 5)
    assert set(tree.sources) == {SUFFIX}
    for count, opinion in enumerate(tree.opinions):
        context = [*reading, 1, 2, 3, *tree.tokens[:count]]
        assert np.array_equal(opinion, warp(model.logits(context), DRAWN).dense(VOCAB))
    run(followed.session.extend([4, 0, 0]))
    assert set(followed.propose(3).sources) == {RAG}


def test_it_takes_the_targets_random_numbers_where_no_opinion_is_asked_for() -> None:
    """Of two like models the draws mostly agree, far more often than independent ones."""
    target, agreed, alone = toy(), 0.0, 0.0
    model = near(target, 0.3)
    for seed in range(300):
        sampling = SamplingParams(temperature=1.0, seed=seed)
        plain = plain_decoding(target, PROMPT, max_tokens=1, sampling=sampling).tokens[0]
        for opinions in (False, True):
            followed = Followed(RagDrafter(model, PROMPT, Guessing(sampling, opinions)))
            same = followed.propose(1).tokens[0] == plain
            agreed, alone = (agreed, alone + same) if opinions else (agreed + same, alone)
    assert agreed / 300 > 0.8
    assert alone / 300 < 0.6


def test_drawn_guesses_follow_their_law_and_not_the_targets_draws() -> None:
    count = 1500
    drawn: Counter[tuple[int, int]] = Counter()
    for seed in range(count):
        sampling = SamplingParams(temperature=1.0, seed=seed)
        token = Followed(RagDrafter(toy(), PROMPT, Guessing(sampling, opinions=True))).propose(1).tokens[0]
        targets = plain_decoding(toy(), PROMPT, max_tokens=1, sampling=sampling).tokens[0]
        drawn[token, targets] += 1
    law = warp(toy().logits(PROMPT), SamplingParams(temperature=1.0)).dense(VOCAB)
    found = np.array([[drawn[mine, theirs] for theirs in range(VOCAB)] for mine in range(VOCAB)]) / count
    # Of independent draws from one law, each pair comes as often as the product says.
    assert np.abs(found - np.outer(law, law)).sum() / 2 < 0.08


def test_grades_do_not_tell_what_was_drawn() -> None:
    one, other = (
        Followed(RagDrafter(toy(1), READING, Guessing(replace(DRAWN, seed=seed), opinions=True))).propose(6)
        for seed in (3, 4)
    )
    assert one.tokens != other.tokens
    assert one.grades == other.grades


def test_where_its_context_ends_nothing_is_proposed_unless_its_opinion_is_needed() -> None:
    short = toy(1, context_length=10)
    assert len(Followed(RagDrafter(short, READING, Guessing(GREEDY)), [1] * 4).propose(20)) == 4
    assert len(Followed(RagDrafter(short, READING, Guessing(GREEDY)), [1] * 8).propose(20)) == 0
    needed = Guessing(DRAWN, opinions=True)
    assert len(Followed(RagDrafter(short, READING, needed), [1] * 4).propose(20)) == 3
    with pytest.raises(ContextLengthError):
        Followed(RagDrafter(short, READING, needed), [1] * 8).propose(20)


def test_an_unlikely_guess_ends_the_chain() -> None:
    whole = Followed(RagDrafter(toy(2), READING, Guessing(GREEDY))).propose(10)
    confidences = [
        warp(toy(2).logits([*READING, *whole.tokens[:count]]), SamplingParams(temperature=1.0))
        .dense(VOCAB)
        .max()
        for count in range(10)
    ]
    least = float(sorted(confidences)[3])
    ended = next(place for place, value in enumerate(confidences) if value < least)
    tree = Followed(RagDrafter(toy(2), READING, Guessing(GREEDY, min_confidence=least))).propose(10)
    assert tree.tokens == whole.tokens[: ended + 1]


def test_wrong_values_are_refused() -> None:
    with pytest.raises(InputError, match="reading"):
        RagDrafter(toy(), [], Guessing(GREEDY))
    with pytest.raises(InputError, match="min_confidence"):
        Guessing(GREEDY, min_confidence=1.5)
    with pytest.raises(InputError, match="copy_from"):
        Guessing(DRAWN, opinions=True, copy_from=-1)
    with pytest.raises(InputError, match="greedy text needs none"):
        Guessing(GREEDY, opinions=True)
    with pytest.raises(InputError, match="SuffixDrafter"):
        Guessing(GREEDY, copy_from=3)


# --- rollback ------------------------------------------------------------------------------------------------

ROUNDS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 10**6)), min_size=1, max_size=8)
GUESSINGS = {
    "likeliest": Guessing(GREEDY),
    "coupled": Guessing(DRAWN),
    "drawn": Guessing(DRAWN, opinions=True),
    "copying": Guessing(DRAWN, opinions=True, copy_from=2),
}


@pytest.mark.parametrize("name", GUESSINGS)
@settings(max_examples=40, deadline=None)
@given(rounds=ROUNDS, cuts=st.lists(st.integers(0, 40), max_size=2))
def test_both_sessions_are_rolled_back_behind_every_rejection(
    name: str, rounds: list[tuple[int, int]], cuts: list[int]
) -> None:
    """Whatever was rejected or taken back, both go on as sessions do that never saw it."""
    followed = Followed(RagDrafter(near(toy()), READING, GUESSINGS[name]))
    session = followed.session
    for number, (budget, seed) in enumerate(rounds):
        rng = random.Random(seed)
        tree = followed.propose(budget)
        rows = run(session.score(tree, followed.drafter.outputs))
        path = tuple(range(rng.randint(0, len(tree))))
        bonus = rng.randrange(VOCAB)
        session.commit(path, bonus)
        verdict = Verdict(path, bonus)
        tokens = (*(tree.tokens[node] for node in path), bonus)
        followed.drafter.observe(Round(tree, rows, verdict, tokens, tree))
        if number < len(cuts):
            length = max(len(PROMPT), len(session) - cuts[number] % 5)
            session.truncate(length)
            followed.drafter.truncate(length)
        fresh = Followed(RagDrafter(near(toy()), READING, GUESSINGS[name]), session.tokens[len(PROMPT) :])
        assert session.cache.rows == session.tokens[: session.cache.length]
        fork = Followed(RagDrafter(near(toy()), READING, GUESSINGS[name]))
        fork.drafter, fork.session = followed.drafter.fork(), session.fork()
        mine, theirs = fork.propose(4), fresh.propose(4)
        assert mine == theirs
        assert all(np.array_equal(a, b) for a, b in zip(mine.opinions, theirs.opinions, strict=True))
        own = fork.drafter._session
        assert own.cache.rows == own.tokens[: own.cache.length]


# --- the whole loop ------------------------------------------------------------------------------------------

SMALL = 4
ETAS = (0.0, 5.0, 20.0)


def in_the_loop(
    monkeypatch: pytest.MonkeyPatch,
    params: SamplingParams,
    guessing: Guessing,
    rule: Rule,
    budgets: list[int],
    processors: Sequence[LogitsProcessor] = (),
) -> tuple[Law, Counter[str]]:
    """The law of the loop's text, with sessions and caches; only random numbers are replaced by dice."""
    target = toy(vocab_size=SMALL)
    seen: Counter[str] = Counter()

    def play(dice: Dice) -> tuple[int, ...]:
        monkeypatch.setattr(TargetView, "uniform", DiceView.uniform)
        monkeypatch.setattr(TargetView, "dice", dice, raising=False)
        monkeypatch.setattr(TargetView, "draw_from", DiceView.draw_from)
        monkeypatch.setattr(TargetView, "tree", property(lambda view: view._tree), raising=False)
        monkeypatch.setattr(TargetView, "guess_from", DiceView.guess_from)
        monkeypatch.setattr(TargetView, "draw", lambda view, node: dice.throw(view.probs(node).dense(SMALL)))
        monkeypatch.setattr(RagDrafter, "_guess_from", lambda _, opinion, __: Guess(dice.throw(opinion), 1.0))
        drafter = RagDrafter(near(target), PROMPT_READ, guessing)
        wanted = Settings(StopConditions(TOKENS), params, processors=processors)
        decoded = run(decoding(target, [1, 2], wanted, drafter, Budgets(budgets), rule=rule))
        for step in decoded.steps:
            seen.update(step.drafted_by)
            seen["accepted"] += step.accepted
        return tuple(decoded.tokens)

    return outcomes(play), seen


#: Ends as the target's prompt does, so that the toy's opinion of the first tokens is that of :func:`augmented_law`.
PROMPT_READ = [2, 3, 0, 1, 2]


@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.parametrize("eta", ETAS)
@pytest.mark.parametrize("copy_from", [0, 1])
def test_the_whole_loop_gives_p_hat(
    name: str, eta: float, copy_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every token has the drafter's opinion: also where nothing is guessed, at the end and behind copies."""
    params, setting = PARAMS[name], AugmentedSettings(eta)
    guessing = Guessing(params, opinions=True, copy_from=copy_from)
    law, seen = in_the_loop(monkeypatch, params, guessing, Augmented(setting, params), [1, 0, 2])
    target = toy(vocab_size=SMALL)
    assert distance(law, augmented_law(target, near(target), params, setting)) < 1e-9
    assert seen["accepted"] > 0
    assert (seen[SUFFIX] > 0) == (copy_from > 0)
    if eta == 0:
        assert distance(law, plain_law(target, params, [1, 2])) < 1e-9


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN, SamplingParams(temperature=1.0, seed=8)])
def test_without_transfer_the_text_is_plain_decodings(sampling: SamplingParams) -> None:
    target = toy()
    plain = plain_decoding(target, PROMPT, max_tokens=60, sampling=sampling)
    wanted = Settings(StopConditions(60), sampling)
    for budgets in ([4], [9, 0, 2]):
        drafter = RagDrafter(near(target), READING, Guessing(sampling))
        text = run(decoding(target, PROMPT, wanted, drafter, Budgets(budgets), rule=Matching()))
        assert text.tokens == plain.tokens
        assert sum(step.accepted for step in text.steps) > 10


@pytest.mark.parametrize("residual", ["exact", "paper"])
@pytest.mark.parametrize("seed", range(5))
def test_one_seed_gives_one_text_whatever_is_guessed(seed: int, residual: Residual) -> None:
    """One, two, five or ten guesses a round, none, copies, or as many as a clock says."""
    target, params = toy(), replace(DRAWN, seed=seed)
    wanted = Settings(StopConditions(60), params)
    rule = Augmented(AugmentedSettings(10.0, residual), params)
    texts = set()
    for budgets, copy_from in (([1], 0), ([2], 0), ([5], 0), ([10], 0), ([9, 0, 2], 0), ([6, 1], 3)):
        drafter = RagDrafter(near(target), READING, Guessing(params, opinions=True, copy_from=copy_from))
        made = run(decoding(target, PROMPT, wanted, drafter, Budgets(budgets), rule=rule))
        assert sum(step.accepted for step in made.steps) > 5
        texts.add(tuple(made.tokens))
    schedule = ChainLength(ChainCosts(), most=10, most_copies=0, source=RAG)
    drafter = RagDrafter(near(target), READING, Guessing(params, opinions=True))
    texts.add(tuple(run(decoding(target, PROMPT, wanted, drafter, schedule, rule=rule)).tokens))
    assert len(texts) == 1
    assert texts != {tuple(plain_decoding(target, PROMPT, max_tokens=60, sampling=params).tokens)}


@pytest.mark.slow
def test_keyed_numbers_give_p_hat_and_accept_as_often_as_any_rule_can() -> None:
    """No dice: the first two tokens over many seeds, the second behind a kept guess or a rejected one."""
    target, rounds = toy(vocab_size=SMALL), 4000
    setting, plain = AugmentedSettings(5.0), PARAMS["plain"]
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for seed in range(rounds):
        params = replace(plain, seed=seed)
        drafter = RagDrafter(near(target), PROMPT_READ, Guessing(params, opinions=True))
        wanted, rule = Settings(StopConditions(2), params), Augmented(setting, params)
        made = run(decoding(target, [1, 2], wanted, drafter, Budgets([1]), rule=rule))
        counts[tuple(made.tokens)] += 1
        accepted += made.steps[0].accepted
    law = augmented_law(target, near(target), plain, setting, count=2)
    chi_square = sum(
        (counts[pair] - rounds * chance) ** 2 / (rounds * chance) for pair, chance in law.items()
    )
    assert chi_square < 37.7  # 15 degrees of freedom: exceeded once in a thousand
    q = warp(near(target).logits(PROMPT_READ), plain).dense(SMALL)
    first = augmented_law(target, near(target), plain, setting, count=1)
    share = sum(min(first.get((token,), 0.0), q[token]) for token in range(SMALL))
    assert accepted / rounds == pytest.approx(share, abs=4 * 0.5 / rounds**0.5)


class Alternating:
    """A grammar: even and odd tokens take turns; what follows a forbidden one is not defined."""

    def start(self, prompt: Sequence[int]) -> int:
        del prompt
        return 0

    def advance(self, state: int, token: int) -> int:
        assert token % 2 == state
        return 1 - state

    def apply(self, logits: NDArray[np.float32], state: int) -> NDArray[np.float32]:
        allowed = np.arange(len(logits)) % 2 == state
        return np.where(allowed, logits, np.float32(-np.inf))


PENALISED = replace(
    PARAMS["plain"], presence_penalty=0.7, frequency_penalty=0.2, repetition_penalty=1.3, logit_bias={1: -1.5}
)


@pytest.mark.parametrize(
    ("params", "processors"),
    [
        (PENALISED, ()),
        (replace(PARAMS["plain"], logit_bias={2: -np.inf}), ()),
        (replace(PENALISED, logit_bias={}), (Alternating(),)),
    ],
)
@pytest.mark.parametrize("copy_from", [0, 1])
def test_penalties_bans_and_grammars_change_both_opinions(
    params: SamplingParams,
    processors: tuple[LogitsProcessor, ...],
    copy_from: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """p and q are what is left behind them, by the target's own prompt and output; p-hat follows from these."""
    setting = AugmentedSettings(5.0)
    guessing = Guessing(params, opinions=True, copy_from=copy_from, processors=processors)
    law, seen = in_the_loop(monkeypatch, params, guessing, Augmented(setting, params), [1, 0, 2], processors)
    target = toy(vocab_size=SMALL)
    expected: Law = {(): 1.0}
    chain = build_processors(params, processors)
    for _ in range(TOKENS):
        longer: Law = defaultdict(float)
        for output, weight in expected.items():
            state = chain.start([1, 2])
            for token in output:
                state = chain.advance(state, token)
            logits = chain.apply(target.logits([1, 2, *output]), state)
            draft = chain.apply(near(target).logits([*PROMPT_READ, *output]), state)
            q = warp(draft, params).dense(SMALL)
            for token, prob in enumerate(slowly(logits.tolist(), q.tolist(), params, setting)):
                if prob:
                    longer[*output, token] += weight * prob
        expected = longer
    assert distance(law, expected) < 1e-9
    assert seen["accepted"] > 0 or copy_from  # a copy may be forbidden


def test_nothing_is_read_before_the_first_guess() -> None:
    model = toy(1)
    watch = Stopwatch(iter(range(100)).__next__)
    followed = Followed(RagDrafter(model, READING, Guessing(GREEDY), watch))
    assert (model.passes, watch.seconds) == (0, 0.0)
    followed.propose(1)
    assert model.passes > 0
    assert watch.seconds == 1
    followed.propose(1)
    assert watch.seconds == 1


def test_a_fresh_seed_gives_another_text_and_the_same_seed_the_same() -> None:
    def text(seed: int) -> list[int]:
        sampling = SamplingParams(temperature=1.0, seed=seed)
        drafter = RagDrafter(near(toy()), READING, Guessing(sampling, opinions=True))
        wanted = Settings(StopConditions(20), sampling)
        rule = Augmented(AugmentedSettings(5.0), sampling)
        return run(decoding(toy(), PROMPT, wanted, drafter, Budgets([3]), rule=rule)).tokens

    assert text(1) == text(1)
    assert text(1) != text(2)


# --- the number of guesses -----------------------------------------------------------------------------------


def observed(
    schedule: ChainLength, drafted: int, accepted: int, draft: float, verify: float, source: str = RAG
) -> None:
    tree = DraftTree.chain(list(range(drafted)), source)
    round = Round(tree, (), Verdict(tuple(range(accepted)), 0), (*range(accepted), 0), tree)
    proposing = draft * (drafted + 1 if source == RAG else 1)
    schedule.observe(round, Timed(1000, proposing, verify * (1 + 0.03 * drafted), proposing + verify))


def test_cheap_and_accepted_guesses_are_made_in_long_chains() -> None:
    lengths = {}
    for name, draft, share in (("cheap", 0.001, 1.0), ("dear", 0.05, 0.3), ("wrong", 0.001, 0.1)):
        schedule = ChainLength(ChainCosts(), most=10, most_copies=0, source=RAG)
        assert schedule.length == 10
        for _ in range(40):
            count = schedule.length
            observed(schedule, count, round(share * count), draft, 0.05)
        lengths[name] = schedule.length
    assert lengths["cheap"] >= 8
    assert lengths["dear"] == 1
    assert lengths["wrong"] <= 3


def test_copies_are_tried_as_long_as_they_pay_and_once_more_later() -> None:
    schedule = ChainLength(ChainCosts(), most=10, most_copies=20, source=RAG)
    assert schedule.budget(runs_passes=True) == 20
    for _ in range(10):
        observed(schedule, 4, 2, 0.03, 0.05)
    assert schedule.copies >= 5
    for _ in range(10):
        observed(schedule, 20, 20, 0.03, 0.05, SUFFIX)
    assert schedule.copies == 20
    for _ in range(30):
        observed(schedule, 10, 0, 0.03, 0.05, SUFFIX)
    assert schedule.copies == 0
    assert schedule.budget(runs_passes=True) == schedule.length
    for _ in range(100):
        observed(schedule, 4, 2, 0.03, 0.05)
    assert schedule.copies > 0


def test_nothing_is_left_out_of_a_proposal() -> None:
    schedule = ChainLength(ChainCosts(), most=4, most_copies=20, source=RAG)
    tree = DraftTree.chain([1, 2, 3], RAG)
    assert schedule.choose(tree, 100) is tree
    with pytest.raises(InputError, match="gamma"):
        ChainLength(ChainCosts(), most=0, most_copies=0, source=RAG)


def test_the_schedules_number_of_copies_is_kept_to() -> None:
    guessing = Guessing(DRAWN, opinions=True, copy_from=3, most_copies=lambda: allowed)
    for allowed in (2, 0):
        followed = Followed(RagDrafter(toy(1), [0, 1, 2, 3, 4, 5, 5, 4], guessing), [1, 2, 3])
        tree = followed.propose(6)
        assert tree.sources == ((SUFFIX,) * 2 if allowed else (RAG,) * 6)
