"""The stride schedules: objectives against the process told round by round, OS3 against the best fixed stride."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrag.bench.stride_process import StrideProcess, best_stride
from specrag.errors import InputError
from specrag.speculation.schedule.cost_model import StrideCosts, passages_per_second
from specrag.speculation.schedule.strides import (
    OS3,
    WINDOW,
    FixedStride,
    SharedStrides,
    StrideRound,
    StrideSchedule,
    wilson_lower_bound,
)

Price = Callable[[int], float]


def constant(seconds: float) -> Price:
    return lambda _: seconds


#: b(s) as found in the world: an exact search reads the vectors once, a graph is walked for each query with something
#: in common, a server answers one query after the other.
SHAPES: dict[str, Callable[[float], Price]] = {
    "constant": constant,
    "graph": lambda b: lambda s: b * (0.7 + 0.3 * s),
    "one by one": lambda b: lambda s: b * s,
}
seconds_of_a = st.floats(0.01, 10)
chances = st.floats(0, 1)


def expected_rate(process: StrideProcess, strides: list[int]) -> float:
    """Passages a second of a policy that chose these strides, every outcome of each round enumerated."""
    passages = seconds = 0.0
    for stride in strides:
        for matched in range(stride + 1):
            chance = process.match**matched * (1 - process.match if matched < stride else 1)
            passages += chance * min(matched + 1, stride)
            seconds += chance * process.round_seconds(stride, matched)
    return passages / seconds


# -- the objective ----------------------------------------------------------------------------------------------


@given(seconds_of_a, seconds_of_a, st.floats(0, 1), chances, st.integers(1, 20), st.booleans())
@settings(max_examples=200, deadline=None)
def test_the_objective_is_the_rate_of_the_process(
    a: float, b: float, slope: float, match: float, stride: int, asynchronous: bool
) -> None:
    process = StrideProcess(a, lambda s: b * (1 + slope * s), match, asynchronous)
    prices = np.array([process.verified(s) for s in range(1, stride + 1)])
    rate = passages_per_second(match, a, prices, asynchronous)[-1]
    assert rate == pytest.approx(expected_rate(process, [stride]), rel=1e-9)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_objective_is_what_a_long_simulation_gives(asynchronous: bool) -> None:
    rng = random.Random(1)
    for b, match, stride in itertools.product((0.2, 1.0, 5.0), (0.0, 0.3, 0.8, 1.0), (1, 2, 5)):
        process = StrideProcess(1.0, SHAPES["graph"](b), match, asynchronous)
        run = process.run(FixedStride(stride), 4000, rng)
        prices = np.array([process.verified(s) for s in range(1, stride + 1)])
        rate = passages_per_second(match, 1.0, prices, asynchronous)[-1]
        assert run.passages / run.seconds == pytest.approx(rate, rel=0.06)


def test_a_stride_of_one_is_sequential_retrieval() -> None:
    """The example by which Algorithm 1 as printed does not give the paper's objective."""
    process = StrideProcess(1.0, constant(0.2), match=0.3)
    assert process.run(FixedStride(1), 100, random.Random(1)).passages_per_second == pytest.approx(1 / 1.2)
    assert passages_per_second(0.3, 1.0, np.array([0.2]), False)[0] == pytest.approx(1 / 1.2)


@given(seconds_of_a, seconds_of_a, st.integers(1, 12), st.integers(1, 8), st.integers(1, 12))
@settings(max_examples=200, deadline=None)
def test_a_wrong_step_ends_at_the_next_token(
    a: float, b: float, stride: int, tokens: int, matched: int
) -> None:
    at_once = StrideProcess(a, constant(b), 0.5, asynchronous=True)
    at_a_token = StrideProcess(a, constant(b), 0.5, asynchronous=True, tokens=tokens)
    late = at_a_token.round_seconds(stride, matched % stride) - at_once.round_seconds(
        stride, matched % stride
    )
    assert -1e-9 <= late <= a / tokens + 1e-9
    assert at_a_token.round_seconds(stride, stride) == at_once.round_seconds(stride, stride)


@given(seconds_of_a, st.floats(0.01, 1), chances)
@settings(max_examples=100, deadline=None)
def test_a_search_that_hides_behind_a_step_wants_a_stride_of_one(
    a: float, share: float, match: float
) -> None:
    """RaLMSpec, section 3: with b at most a, asynchronous verification is best at s = 1."""
    best = best_stride(a, constant(share * a), match, asynchronous=True, most=32)
    assert best.stride == 1 or match > 0.999
    expected = (a + share * a) / (a + (1 - match) * share * a)
    assert best.passages_per_second * (a + share * a) == pytest.approx(expected)


def test_the_best_stride_is_the_best_of_all() -> None:
    for shape, b, match, asynchronous in itertools.product(
        SHAPES, (0.2, 1.0, 5.0, 20.0), (0.0, 0.6, 0.95), (False, True)
    ):
        process = StrideProcess(1.0, SHAPES[shape](b), match, asynchronous)
        best = best_stride(1.0, process.verification, match, asynchronous, 24)
        rates = [expected_rate(process, [stride]) for stride in range(1, 25)]
        assert best.passages_per_second == pytest.approx(max(rates))
        assert rates[best.stride - 1] == pytest.approx(max(rates))
        if match == 0.0 or (shape == "one by one" and not asynchronous):
            assert best.stride == 1
    assert best_stride(1.0, SHAPES["constant"](5.0), 0.95, False, 32).stride > 10


# -- what it costs ----------------------------------------------------------------------------------------------


def priced(price: Price, strides: list[int], noise: float = 0.0) -> StrideCosts:
    rng = random.Random(1)
    costs = StrideCosts()
    for stride in strides:
        costs.observe(stride, 1.0, price(stride) * math.exp(rng.gauss(0, noise)))
    return costs


@pytest.mark.parametrize("shape", SHAPES)
def test_two_strides_tell_the_price_of_all(shape: str) -> None:
    price = SHAPES[shape](3.0)
    expected = [price(stride) for stride in range(1, 17)]
    np.testing.assert_allclose(priced(price, [1, 4]).verification(16), expected)
    noisy = priced(price, [1, 4, 2, 1, 6, 3, 1, 8] * 4, noise=0.1).verification(16)
    np.testing.assert_allclose(noisy, expected, rtol=0.25)


def test_one_stride_is_taken_for_constant() -> None:
    np.testing.assert_allclose(priced(SHAPES["one by one"](2.0), [3, 3]).verification(4), 6.0)


def test_a_search_never_has_a_negative_price() -> None:
    costs = priced(lambda s: 10.0 / s, [1, 2, 5, 9])
    assert np.all(np.diff(costs.verification(32)) >= 0)
    assert np.all(costs.verification(32) > 0)
    rising = priced(lambda s: 0.1 * s**2, [1, 2, 5, 9]).verification(32)
    assert np.all(rising > 0)


def test_a_pause_of_the_machine_is_no_price() -> None:
    costs = priced(SHAPES["graph"](1.0), [1, 2, 4, 8] * 3)
    costs.observe(4, 50.0, 100.0)
    np.testing.assert_allclose(costs.verification(8), [0.7 + 0.3 * s for s in range(1, 9)])
    assert costs.step() == 1.0


def test_a_store_that_gets_slower_is_noticed() -> None:
    costs = priced(constant(1.0), [1, 4] * 8)
    for stride in (1, 4) * 3:
        costs.observe(stride, 2.0, 6.0)
    np.testing.assert_allclose(costs.verification(8), 6.0)
    assert costs.step() == 2.0


def test_seconds_that_are_none_are_ignored() -> None:
    costs = StrideCosts()
    for wrong in (0.0, -1.0, math.nan, math.inf):
        costs.observe(2, wrong, wrong)
        assert not costs.measured
        schedule = OS3()
        schedule.observe(StrideRound(1, 1, wrong, wrong))
        assert schedule.next() == 1
    costs.observe(2, 1.0, 3.0)
    assert costs.measured
    costs.observe(2, math.nan, math.nan)
    assert costs.step() == 1.0
    np.testing.assert_allclose(costs.verification(3), 3.0)


# -- the match rate ---------------------------------------------------------------------------------------------


@given(st.integers(0, 200), st.integers(1, 200), st.floats(0.2, 3))
def test_the_bound_is_wilsons(successes: int, more: int, deviations: float) -> None:
    """The chance at which the share seen lies that many standard errors above it."""
    trials = successes + more
    bound = wilson_lower_bound(successes, trials, deviations)
    assert 0 <= bound <= successes / trials
    distance = deviations * math.sqrt(bound * (1 - bound) / trials)
    assert successes / trials - bound == pytest.approx(distance, abs=1e-9)
    assert wilson_lower_bound(trials, trials) == pytest.approx(trials / (trials + 1))


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Strides and how many of each matched."""
    strides = draw(st.lists(st.integers(1, 16), max_size=12))
    return [(stride, draw(st.integers(0, stride))) for stride in strides]


@given(histories(), st.booleans(), st.sampled_from([0.1, 1.0, 5.0, 20.0]), st.booleans())
@settings(max_examples=200, deadline=None)
def test_os3_takes_the_best_stride_for_the_estimate(
    history: list[tuple[int, int]], asynchronous: bool, b: float, capped: bool
) -> None:
    """The paper's estimator over the window, capped at 0.6, or its lower bound."""
    schedule = OS3(asynchronous, 0.6 if capped else None)
    for stride, matched in history:
        schedule.observe(StrideRound(stride, matched, 1.0, b))
    recent = history[-WINDOW:]
    right = sum(matched for _, matched in recent)
    wrong = sum(matched < stride for stride, matched in recent)
    if not recent:
        assert schedule.next() == 1
        return
    rate = min(right / (right + wrong), 0.6) if capped else wilson_lower_bound(right, right + wrong)
    best = best_stride(1.0, constant(b), rate, asynchronous, most=16)
    rates = passages_per_second(rate, 1.0, np.full(16, b), asynchronous)
    assert rates[schedule.next() - 1] == pytest.approx(best.passages_per_second)


def rounds_of(schedule: StrideSchedule, matches: list[bool], price: Price, a: float = 1.0) -> list[int]:
    """Drive a schedule over what the guesses would be, one after the other; the strides it chose."""
    strides = []
    left = list(matches)
    while left:
        stride = min(schedule.next(), len(left))
        matched = left[:stride].index(False) if False in left[:stride] else stride
        del left[: min(matched + 1, stride)]
        strides.append(stride)
        schedule.observe(StrideRound(stride, matched, a, price(stride)))
    return strides


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("max_match", [0.6, None])
def test_it_climbs_falls_back_and_climbs_again(max_match: float | None, asynchronous: bool) -> None:
    schedule = OS3(asynchronous, max_match=max_match)
    price = SHAPES["constant"](5.0)
    strides = rounds_of(schedule, [True] * 100, price)
    assert strides[0] == 1
    assert strides[1] > 1
    top = max(strides)
    assert top == 16 if max_match is None else 3 <= top <= 6
    falling = rounds_of(schedule, [False] * 20, price)
    assert falling[5:] == [1] * 15  # one window later nothing is guessed any more
    assert max(rounds_of(schedule, [True] * 100, price)) == top


def test_little_evidence_gives_no_huge_stride() -> None:
    for right in range(1, 4):
        schedule = OS3(max_match=None)
        for _ in range(right):
            schedule.observe(StrideRound(1, 1, 1.0, 20.0))
        assert schedule.next() == best_stride(1.0, constant(20.0), right / (right + 1), False, 16).stride
        assert schedule.next() <= 4 * right


def test_a_store_that_answers_one_by_one_is_found_out_at_once() -> None:
    """Where a batch saves nothing, one round of a larger stride is tried and hardly another."""
    strides = rounds_of(OS3(max_match=None), [True] * 60, SHAPES["one by one"](5.0))
    assert sum(stride > 1 for stride in strides) <= 2


def test_a_stride_that_looked_dear_gets_another_chance() -> None:
    schedule = OS3(max_match=None)
    schedule.observe(StrideRound(1, 1, 1.0, 5.0))
    schedule.observe(StrideRound(4, 4, 1.0, 500.0))  # a pause, in the only search of a larger stride
    strides = rounds_of(schedule, [True] * 400, SHAPES["constant"](5.0))
    assert strides[:10] == [1] * 10
    assert strides[-5:-1] == [16] * 4


# -- what it reaches --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_os3_comes_close_to_the_best_fixed_stride(asynchronous: bool) -> None:
    """From the first round on, warming up included; the cap sees no rate above 0.6."""
    for shape, b, match in itertools.product(SHAPES, (0.2, 1.0, 5.0, 20.0), (0.0, 0.3, 0.6, 0.8, 0.95)):
        process = StrideProcess(1.0, SHAPES[shape](b), match, asynchronous)
        best = best_stride(1.0, process.verification, match, asynchronous, most=32)
        for max_match in (None, 0.6):
            run = process.run(OS3(asynchronous, max_match=max_match), 600, random.Random(1))
            rate = expected_rate(process, [round.stride for round in run.rounds])
            if max_match is None or match <= 0.6:
                assert rate >= 0.9 * best.passages_per_second, (shape, b, match, max_match)
            assert rate * (1 + b) >= 0.96, (shape, b, match, max_match)  # of sequential retrieval


def test_requests_that_learn_together_need_no_warming_up() -> None:
    """Requests of 32 retrievals, noise and pauses in every time: 0.9 of the best stride's rate on the mean."""
    shares = []
    noise = random.Random(2)
    for shape, b, match in itertools.product(SHAPES, (1.0, 5.0), (0.3, 0.8, 0.95)):
        exact = StrideProcess(1.0, SHAPES[shape](b), match)
        noisy = StrideProcess(1.0, with_noise(exact.verification, noise), match)
        best = max(request_rate(exact, exact, partial(FixedStride, s)) for s in (1, 2, 3, 4, 6, 8, 16, 32))
        shared = SharedStrides()
        rate = request_rate(noisy, exact, partial(OS3, max_match=None, shared=shared))
        assert rate * (1 + b) >= 0.96, (shape, b, match)
        shares.append(rate / best)
    assert np.mean(shares) >= 0.95
    assert min(shares) >= 0.85


def with_noise(price: Price, rng: random.Random) -> Price:
    def noisy(stride: int) -> float:
        return price(stride) * math.exp(rng.gauss(0, 0.1)) * (5 if rng.random() < 0.02 else 1)

    return noisy


def request_rate(driven: StrideProcess, true: StrideProcess, make: Callable[[], StrideSchedule]) -> float:
    """Passages a second over forty requests of 32 retrievals each."""
    rng = random.Random(3)
    seconds = 0.0
    for _ in range(40):
        run = driven.run(make(), 32, rng)
        seconds += sum(true.round_seconds(round.stride, round.matched) for round in run.rounds)
    return 40 * 32 / seconds


def test_a_request_starts_with_what_others_saw_and_leaves_it_soon() -> None:
    shared = SharedStrides()
    price = SHAPES["constant"](5.0)
    rounds_of(OS3(max_match=None, shared=shared), [True] * 100, price)
    assert OS3(max_match=0.6, shared=shared).next() == 1  # the paper's starts anew
    schedule = OS3(max_match=None, shared=shared)
    strides = rounds_of(schedule, [False] * 12, price)
    assert strides[0] > 4
    assert strides[5:] == [1] * 7


# -- bad input --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [0, -1, 2.5, True, None])
def test_what_is_no_number_of_queries_is_refused(wrong: object) -> None:
    with pytest.raises(InputError, match=r"^stride: "):
        FixedStride(wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"^stride: "):
        StrideRound(wrong or -1, 0, 1.0, 1.0)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"^most: "):
        best_stride(1.0, constant(1.0), 0.5, False, wrong)  # type: ignore[arg-type]


def test_what_is_no_chance_and_no_time_is_refused() -> None:
    for chance in (0.0, 1.0, -0.1, 1.5, math.nan):
        with pytest.raises(InputError, match=r"^max_match: "):
            OS3(max_match=chance)
    for matched in (-1, 4):
        with pytest.raises(InputError, match=r"^matched: "):
            StrideRound(3, matched, 1.0, 1.0)
    for seconds in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(InputError, match=r"^step: "):
            best_stride(seconds, constant(1.0), 0.5, False, 4)
        with pytest.raises(InputError, match=r"^verification: "):
            best_stride(1.0, constant(seconds), 0.5, False, 4)
    for match in (-0.1, 1.1, math.nan):
        with pytest.raises(InputError, match=r"^match: "):
            best_stride(1.0, constant(1.0), match, False, 4)


def test_a_fixed_stride_stays() -> None:
    assert rounds_of(FixedStride(3), [True, False] * 6, constant(1.0))[:-1] == [3] * 5
