"""The loop on the toy model: whatever is guessed, the output is plain decoding's, token for token."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrag.engine.executor import Executor, run
from specrag.engine.outputs import Outputs, Row
from specrag.engine.passes import Coroutine, Others, Pass, Segment, gather
from specrag.engine.processors import AllowedTokens, LogitsProcessor
from specrag.engine.sampling import log_softmax
from specrag.engine.sampling_params import SamplingParams
from specrag.engine.session import Session
from specrag.engine.stopping import StopConditions
from specrag.errors import Cancelled
from specrag.models.toy import ToyModel
from specrag.speculation.acceptance import Matching, View
from specrag.speculation.decode import TARGET, Settings, Speculation, decode
from specrag.speculation.drafters.base import ANY_DEPTH, NoDrafter
from specrag.speculation.schedule.base import Timed
from specrag.speculation.tree import ROOT, DraftTree, Verdict
from tests.speculation.guessing import (
    Budgets,
    Decoded,
    Expected,
    Letters,
    OracleDrafter,
    PruningBudgets,
    RandomDrafter,
    SilentDrafter,
    decoding,
    plain_decoding,
)

VOCAB = 7


def alternating(output: tuple[int, ...]) -> set[int]:
    """A grammar: what may follow depends on the place and on the token before."""
    return {0, 2, 4, 6} if len(output) % 2 else {1, 3, 5, (output[-1] + 1) % VOCAB if output else 0}


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    sampling: SamplingParams
    max_tokens: int
    stop_tokens: frozenset[int]
    stop_strings: tuple[str, ...]
    processors: tuple[LogitsProcessor, ...]
    log_probs: int | None

    def expected(self, model: ToyModel) -> Expected:
        return plain_decoding(
            model,
            self.prompt,
            max_tokens=self.max_tokens,
            sampling=self.sampling,
            stop_tokens=self.stop_tokens,
            stop_strings=self.stop_strings,
            processors=self.processors,
        )

    @property
    def settings(self) -> Settings:
        stop = StopConditions(self.max_tokens, self.stop_tokens, self.stop_strings)
        return Settings(stop, self.sampling, self.log_probs, self.processors)


tokens = st.integers(0, VOCAB - 1)
samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.5]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.7, -0.5]),
    logit_bias=st.sampled_from([{}, {}, {2: 1.5, 3: -math.inf}]),
    seed=st.integers(-5, 5),
)
requests = st.builds(
    Request,
    prompt=st.lists(tokens, min_size=1, max_size=8),
    sampling=samplings,
    max_tokens=st.sampled_from([1, 2, 7, 25, 60]),
    stop_tokens=st.sets(tokens, max_size=1).map(frozenset),
    stop_strings=st.lists(st.lists(tokens, min_size=1, max_size=3).map(Letters.of), max_size=2).map(tuple),
    processors=st.sampled_from([(), (), (AllowedTokens(alternating),)]),
    log_probs=st.sampled_from([None, 0, 3]),
)
budgets = st.lists(st.integers(0, 9), min_size=1, max_size=4)


def text_of(request: Request, seed: int) -> Letters:
    """Characters that come late delay a stop string, so they are tried without one."""
    return Letters(lag=0 if request.stop_strings else seed % 3)


def check(decoded: Decoded, expected: Expected, request: Request, schedule: Budgets) -> None:
    assert decoded.tokens == expected.tokens
    assert decoded.text == expected.text
    assert decoded.reason == expected.reason
    assert decoded.final_tokens == [*request.prompt, *expected.tokens]
    assert [step.finish_reason for step in decoded.steps] == [None] * (len(decoded.steps) - 1) + [
        decoded.reason
    ]
    assert [(len(round.tree), len(round.verdict.path)) for round, _ in schedule.told] == [
        (step.drafted, step.accepted) for step in decoded.steps
    ]
    # A round begins behind the tokens of the rounds before it, and the schedule is told so in time.
    lengths = [len(request.prompt)]
    for step in decoded.steps:
        lengths.append(lengths[-1] + len(step.tokens))
    assert schedule.contexts == lengths[:-1]
    assert [timed.context for _, timed in schedule.told] == lengths[:-1]
    described = [token for step in decoded.steps for token in step.tokens]
    if request.log_probs is None:
        assert all(token.log_prob is None and token.alternatives == () for token in described)
    else:
        assert [token.log_prob for token in described] == pytest.approx(expected.log_probs, abs=1e-5)
        assert all(len(token.alternatives) == request.log_probs for token in described)


def check_rounds(decoded: Decoded, drafter: RandomDrafter, schedule: Budgets) -> None:
    """Drafter and schedule were told what really happened, and the sources are the drafter's own."""
    assert [list(round.tokens) for round in drafter.rounds] == [
        [token.token for token in step.tokens] for step in decoded.steps
    ]
    assert all(mine is theirs for mine, (theirs, _) in zip(drafter.rounds, schedule.told, strict=True))
    assert set(schedule.asked) == {drafter.runs_passes}
    assert drafter.closed == 1
    trees = iter(drafter.proposed)
    for round, step in zip(drafter.rounds, decoded.steps, strict=True):
        if len(round.proposed):
            assert round.proposed is next(tree for tree in trees if len(tree))
        assert paths(round.tree) <= paths(round.proposed)
        if not isinstance(schedule, PruningBudgets):
            assert round.tree is round.proposed
        assert len(round.rows) == 1 + len(round.tree)
        path, bonus = round.verdict.path, round.verdict.bonus
        assert step.accepted == len(path) <= step.drafted == len(round.tree)
        assert dict(step.drafted_by) == Counter(round.tree.sources)
        assert list(round.tokens) == [round.tree.tokens[n] for n in path] + ([] if bonus is None else [bonus])
        wanted = [round.tree.sources[n] for n in path] + ([] if bonus is None else [TARGET])
        assert [token.source for token in step.tokens] == wanted
        assert not any(token.relaxed for token in step.tokens)


def paths(tree: DraftTree) -> set[tuple[tuple[int, str], ...]]:
    """Every node as the tokens and sources from the root to it."""
    found: dict[int, tuple[tuple[int, str], ...]] = {ROOT: ()}
    for node, parent in enumerate(tree.parents):
        found[node] = (*found[parent], (tree.tokens[node], tree.sources[node]))
    return set(found.values())


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 50),
    st.lists(
        st.tuples(requests, budgets, st.integers(0, 10**6), st.integers(0, 3), st.booleans()),
        min_size=1,
        max_size=4,
    ),
    st.randoms(use_true_random=False),
    st.sampled_from([1, 8, 1024]),
)
def test_the_output_is_plain_decodings(
    table: int, cases: list[tuple[Request, list[int], int, int, bool]], shuffler: object, max_rows: int
) -> None:
    """Several requests at once, in any order, with any drafters, budgets, random pruning and packing."""
    model = ToyModel(VOCAB, order=3, scale=2.0, seed=table, context_length=48)
    shuffler.shuffle(cases)  # type: ignore[attr-defined]
    expected = [request.expected(model) for request, *_ in cases]
    drafters: list[RandomDrafter] = []
    for (_, _, seed, kind, _), truth in zip(cases, expected, strict=True):
        make = (RandomDrafter, RandomDrafter, OracleDrafter, SilentDrafter)[kind]
        drafters.append(make(seed, VOCAB, truth.tokens, runs_passes=seed % 2 == 1))
    schedules = [
        PruningBudgets(plan, seed) if prunes else Budgets(plan) for _, plan, seed, _, prunes in cases
    ]
    executor = Executor(max_rows=max_rows)
    try:
        results = executor.run(
            executor.submit(
                gather(
                    [
                        decoding(
                            model,
                            case[0].prompt,
                            case[0].settings,
                            drafter,
                            schedule,
                            text_of(case[0], case[2]),
                        )
                        for case, drafter, schedule in zip(cases, drafters, schedules, strict=True)
                    ]
                )
            )
        )
        assert executor._tasks == []
    finally:
        executor.close()
    for case, decoded, truth, drafter, schedule in zip(
        cases, results, expected, drafters, schedules, strict=True
    ):
        check(decoded, truth, case[0], schedule)
        check_rounds(decoded, drafter, schedule)


def test_a_pruned_tree_is_still_often_right() -> None:
    """The random pruning above takes away much and leaves much, so that it tests both."""
    model = ToyModel(VOCAB, order=3, scale=2.0, seed=1)
    sampling = SamplingParams(temperature=0.7, seed=2)
    truth = plain_decoding(model, [1, 2], max_tokens=60, sampling=sampling)
    drafter, schedule = RandomDrafter(3, VOCAB, truth.tokens), PruningBudgets([9], 4)
    decoded = run(decoding(model, [1, 2], Settings(StopConditions(60), sampling), drafter, schedule))
    assert decoded.tokens == truth.tokens
    assert schedule.pruned > 20
    assert sum(step.accepted for step in decoded.steps) > 10
    check_rounds(decoded, drafter, schedule)


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=1.0, top_k=3, seed=3)])
@pytest.mark.parametrize("log_probs", [None, 1])
def test_a_drafter_gets_what_it_reads(sampling: SamplingParams, log_probs: int | None) -> None:
    """In the prompt's rows and in every row of every tree, beside what the draw and the caller need."""
    model = ToyModel(VOCAB, order=3, seed=4)
    wanted = Outputs(entropy=True, top_k=2, logits=True)
    drafter = RandomDrafter(1, VOCAB, outputs=wanted)
    prompt = [1, 2, 5]
    asked = Settings(StopConditions(30), sampling, log_probs)
    decoded = run(decoding(model, prompt, asked, drafter, Budgets([5])))
    truth = plain_decoding(model, prompt, max_tokens=30, sampling=sampling)
    assert decoded.tokens == truth.tokens
    assert len(drafter.prompt_rows) == 2
    behind = [(prompt[:1], drafter.prompt_rows[0]), (prompt[:2], drafter.prompt_rows[1])]
    done = list(prompt)
    for round in drafter.rounds:
        contexts = [done]
        for node, parent in enumerate(round.tree.parents):
            contexts.append([*contexts[parent + 1], round.tree.tokens[node]])
        behind += zip(contexts, round.rows, strict=True)
        done = [*done, *round.tokens]
    for context, row in behind:
        logits = model.logits(context)
        assert row.logits is not None
        assert np.array_equal(row.logits, logits)
        log_prob = log_softmax(logits)
        assert row.entropy == pytest.approx(-(np.exp(log_prob) * log_prob).sum())
        assert row.top_tokens is not None
        assert row.top_tokens[:2].tolist() == np.argsort(-logits, kind="stable")[:2].tolist()


def test_a_greedy_row_returns_no_more_than_is_read() -> None:
    """A row without logits costs no copy of them."""
    model = ToyModel(VOCAB, order=3, seed=4)
    drafter = RandomDrafter(1, VOCAB)
    run(decoding(model, [1, 2], Settings(StopConditions(20)), drafter, Budgets([4])))
    rows = [row for round in drafter.rounds for row in round.rows]
    assert all(row.argmax is not None for row in rows)
    assert all(row.logits is None and row.top_tokens is None and row.entropy is None for row in rows)


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=1.0, seed=3)])
def test_a_drafter_that_is_always_right_saves_passes(sampling: SamplingParams) -> None:
    model = ToyModel(VOCAB, order=3, seed=4)
    truth = plain_decoding(model, [1, 2], max_tokens=40, sampling=sampling)
    drafter = OracleDrafter(0, VOCAB, truth.tokens)
    # One pass feeds the prompt; then each round of 1 + 7 tokens is one pass.
    decoded = run(decoding(model, [1, 2], Settings(StopConditions(40), sampling), drafter, Budgets([7])))
    assert decoded.tokens == truth.tokens
    assert len(decoded.steps) == 5
    assert model.passes == 1 + 5
    assert [step.accepted for step in decoded.steps] == [7] * 5
    assert {t.source for step in decoded.steps for t in step.tokens[:-1]} == {"oracle"}
    assert len(decoded.tokens) / len(decoded.steps) == 8


def test_plain_decoding_is_one_pass_and_one_row_a_token() -> None:
    model = ToyModel(VOCAB, order=3, seed=4)
    decoded = run(decoding(model, [1, 2, 3], Settings(StopConditions(20)), NoDrafter(), Budgets([0])))
    assert len(decoded.tokens) == len(decoded.steps) == 20
    assert (model.passes, model.rows) == (1 + 20, 2 + 20)


def long_output(max_tokens: int = 30) -> tuple[ToyModel, list[int], list[int]]:
    model = ToyModel(VOCAB, order=3, scale=1.0, seed=8)
    sampling = SamplingParams(temperature=1.0)
    return model, [1], plain_decoding(model, [1], max_tokens=max_tokens, sampling=sampling).tokens


@pytest.mark.parametrize("place", range(12))
@pytest.mark.parametrize("how", ["token", "string", "max_tokens", "context"])
def test_the_end_may_come_at_every_place_of_an_accepted_run(place: int, how: str) -> None:
    model, prompt, output = long_output()
    conditions: dict[str, Callable[[], StopConditions]] = {
        "token": lambda: StopConditions(30, frozenset([output[place]])),
        "string": lambda: StopConditions(
            30, stop_strings=(Letters.of(output[max(place - 1, 0) : place + 2]),)
        ),
        "max_tokens": lambda: StopConditions(place + 1),
        "context": lambda: StopConditions(30),
    }
    stop = conditions[how]()
    sampling = SamplingParams(temperature=1.0)
    if how == "context":
        short = ToyModel(VOCAB, order=3, scale=1.0, seed=8, context_length=place + 1)
        model = short
    truth = plain_decoding(
        model,
        prompt,
        max_tokens=stop.max_tokens,
        sampling=sampling,
        stop_tokens=stop.stop_tokens,
        stop_strings=stop.stop_strings,
    )
    # The drafter knows the text beyond its end.
    drafter = OracleDrafter(0, VOCAB, output)
    decoded = run(decoding(model, prompt, Settings(stop, sampling), drafter, Budgets([6])))
    assert (decoded.tokens, decoded.text, decoded.reason) == (truth.tokens, truth.text, truth.reason)
    assert decoded.final_tokens == prompt + truth.tokens
    assert drafter.rounds[-1].tokens == tuple(t.token for t in decoded.steps[-1].tokens)
    if how == "context":
        assert decoded.reason == "length"
        assert len(decoded.final_tokens) == model.context_length + 1


def test_a_session_goes_on_after_its_end() -> None:
    """A cut inside an accepted run leaves the cache as if the rest had never been guessed."""
    model, prompt, output = long_output()
    sampling = SamplingParams(temperature=1.0)
    drafter = OracleDrafter(0, VOCAB, output)
    first = run(decoding(model, prompt, Settings(StopConditions(10), sampling), drafter, Budgets([4])))
    assert first.session.tokens == prompt + output[:10]
    rest = decode(
        first.session,
        Settings(StopConditions(20), sampling),
        Letters(),
        Speculation(RandomDrafter(5, VOCAB), Matching(), Budgets([5])),
        lambda: 0.0,
    )
    run(rest)
    assert first.session.tokens == prompt + output


@pytest.mark.parametrize("how", ["the text ends", "the request is cancelled", "the coroutine is closed"])
def test_the_drafter_is_closed_at_the_end(how: str) -> None:
    session = Session(ToyModel(VOCAB, seed=2))
    run(session.extend([1, 2, 3]))
    drafter = RandomDrafter(1, VOCAB)
    speculation = Speculation(drafter, Matching(), Budgets([3]))
    loop = decode(session, Settings(StopConditions(20)), Letters(), speculation, lambda: 0.0)
    if how == "the text ends":
        run(loop)
    else:
        assert isinstance(next(loop), Pass)
        assert not drafter.closed
        if how == "the coroutine is closed":
            loop.close()
        else:
            with pytest.raises(Cancelled):
                loop.throw(Cancelled("enough"))
    assert drafter.closed == 1


def test_log_probabilities_are_the_models_own_whatever_the_sampling() -> None:
    model = ToyModel(VOCAB, order=3, seed=2)
    sampling = SamplingParams(temperature=2.0, top_k=2, repetition_penalty=1.7, logit_bias={1: 3.0})
    settings_ = Settings(StopConditions(30), sampling, log_probs=2)
    decoded = run(decoding(model, [4, 5], settings_, RandomDrafter(1, VOCAB), Budgets([4])))
    tokens_ = [4, 5]
    for token in (token for step in decoded.steps for token in step.tokens):
        logits = model.logits(tokens_).astype(np.float64)
        log_probs = logits - np.logaddexp.reduce(logits)
        assert token.log_prob == pytest.approx(log_probs[token.token], abs=1e-5)
        best = np.argsort(-log_probs, kind="stable")[:2]
        assert [other.token for other in token.alternatives] == best.tolist()
        assert [other.log_prob for other in token.alternatives] == pytest.approx(log_probs[best], abs=1e-5)
        tokens_.append(token.token)


class SlowDrafter(OracleDrafter):
    """Takes ten seconds to start and three to propose."""

    ticks: Clock

    def start(self, session: Session, rows: Sequence[Row]) -> Coroutine[None]:
        self.ticks.now += 10
        yield from super().start(session, rows)

    def propose(self, session: Session, budget: int, depth: int = ANY_DEPTH) -> Coroutine[DraftTree]:
        self.ticks.now += 3
        return (yield from super().propose(session, budget, depth))


@dataclass
class Clock:
    """Stands still but where it is moved on."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def test_seconds_are_the_clocks() -> None:
    """Proposal, pass and judgement are told apart; the drafter's start is in the first step's time."""
    clock = Clock()

    class SlowModel(ToyModel):
        def forward(self, segments: Sequence[Segment]) -> list[list[Row]]:
            clock.now += 5
            return super().forward(segments)

    class SlowRule(Matching):
        def judge(self, tree: DraftTree, target: View) -> Verdict:
            clock.now += 0.5
            return super().judge(tree, target)

    model = SlowModel(VOCAB, seed=2)
    truth = plain_decoding(model, [4, 5], max_tokens=8, sampling=SamplingParams())
    drafter = SlowDrafter(0, VOCAB, truth.tokens)
    drafter.ticks = clock
    schedule = Budgets([1, 0])
    decoded = run(
        decoding(
            model,
            [4, 5],
            Settings(StopConditions(8)),
            drafter,
            schedule,
            clock=clock,
            rule=SlowRule(),
        )
    )
    assert decoded.tokens == truth.tokens
    # Rounds of two tokens and of one, in turn; the last proposal is cut to what may still come.
    assert [len(step.tokens) for step in decoded.steps] == [2, 1, 2, 1, 2]
    assert [step.seconds for step in decoded.steps] == [18.5, 5.5, 8.5, 5.5, 8.5]
    assert all(timed.others == Others() and timed.computing >= 0 for _, timed in schedule.told)
    assert [replace(timed, report=None) for _, timed in schedule.told] == [
        Timed(2, 3, 5, 8.5),
        Timed(4, 0, 5, 5.5),
        Timed(5, 3, 5, 8.5),
        Timed(7, 0, 5, 5.5),
        Timed(8, 3, 5, 8.5),
    ]


@pytest.mark.parametrize(
    ("max_tokens", "context_length", "wanted"), [(1, 99, []), (4, 99, [3]), (99, 9, [6]), (99, 3, [])]
)
def test_no_more_is_proposed_than_may_still_come(
    max_tokens: int, context_length: int, wanted: list[int]
) -> None:
    """A bonus token follows every tree, so that the last token is never guessed."""
    model = ToyModel(VOCAB, order=3, seed=4, context_length=context_length)

    class Asked(SilentDrafter):
        def propose(self, session: Session, budget: int, depth: int = ANY_DEPTH) -> Coroutine[DraftTree]:
            assert budget == 50
            asked.append(depth)
            return (yield from super().propose(session, budget, depth))

    asked: list[int] = []
    run(decoding(model, [1, 2, 3], Settings(StopConditions(max_tokens)), Asked(0, VOCAB), Budgets([50])))
    assert asked[:1] == wanted
    assert asked == list(range(len(asked), 0, -1))


@pytest.mark.parametrize(("max_tokens", "context_length"), [(2, 99), (99, 4)])
def test_near_the_end_a_tree_is_as_wide_as_its_budget(max_tokens: int, context_length: int) -> None:
    """One guess may still come, and five tokens are guessed at it."""
    model = ToyModel(VOCAB, order=3, seed=4, context_length=context_length)

    class Wide(NoDrafter):
        def propose(self, session: Session, budget: int, depth: int = ANY_DEPTH) -> Coroutine[DraftTree]:
            yield from ()
            assert depth == 1
            return DraftTree(
                tuple(range(min(budget, 5))), (ROOT,) * min(budget, 5), ("wide",) * min(budget, 5)
            )

    decoded = run(decoding(model, [1, 2, 3], Settings(StopConditions(max_tokens)), Wide(), Budgets([50])))
    assert decoded.steps[0].drafted == 5
    truth = plain_decoding(model, [1, 2, 3], max_tokens=max_tokens, sampling=SamplingParams())
    assert decoded.tokens == truth.tokens


def test_a_stop_token_leaves_no_text_behind() -> None:
    """Characters that a stop token would complete are not shown."""
    model, prompt, output = long_output()
    stop = StopConditions(30, frozenset([output[6]]))
    sampling = SamplingParams(temperature=1.0)
    end = output.index(output[6])
    decoded = run(
        decoding(model, prompt, Settings(stop, sampling), NoDrafter(), Budgets([0]), Letters(lag=2))
    )
    assert decoded.text == Letters.of(output[:end])
