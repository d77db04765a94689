"""The schedule that may guess nothing: hardly ever slower than plain retrieval, and fast where guessing pays."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from specrag.speculation.schedule.cost_model import StrideCosts, passages_per_second
from specrag.speculation.schedule.strides import CostAwareStride, SharedStrideStats, StrideRound

#: Seconds of a pass, of a look-up, and of what keeping the cache adds to a round's search.
STEP, LOOK_UP, KEEPING = 0.012, 0.001, 0.0005


class World:
    """Tokens one after the other, with the prices of a real request.

    Args:
        search: seconds of a search for so many queries.
        match: the chance that a guess is right.
        noise: relative spread of every price.
    """

    def __init__(
        self, search: Callable[[int], float], match: float, noise: float = 0.05, seed: int = 0
    ) -> None:
        self._search = search
        self._match = match
        self._noise = noise
        self._random = random.Random(seed)
        self.strides: list[int] = []

    def _spread(self, seconds: float) -> float:
        return seconds * self._random.uniform(1 - self._noise, 1 + self._noise)

    def request(self, schedule: CostAwareStride, tokens: int) -> float:
        """Seconds of one request."""
        total = 0.0
        while tokens > 0:
            stride = schedule.next()
            self.strides.append(stride)
            step = self._spread(STEP)
            if stride == 0:
                search, matched, look_up, written = self._spread(self._search(1)), 0, 0.0, 1
            else:
                matched = 0
                while matched < stride and self._random.random() < self._match:
                    matched += 1
                look_up, written = self._spread(LOOK_UP), min(matched + 1, stride)
                search = self._spread(self._search(stride) + KEEPING)
            total += max(stride, 1) * (step + look_up) + search
            schedule.observe(StrideRound(stride, matched, step + look_up, search, look_up_seconds=look_up))
            tokens -= written
        return total

    def speedup(self, requests: int = 10, tokens: int = 200) -> float:
        shared = SharedStrideStats()
        seconds = sum(self.request(CostAwareStride(shared=shared), tokens) for _ in range(requests))
        return requests * tokens * (STEP + self._search(1)) / seconds

    def best(self) -> float:
        """The speed-up of the best fixed stride, or of none."""
        search = np.array([self._search(stride) + KEEPING for stride in range(1, 17)])
        rates = passages_per_second(self._match, STEP + LOOK_UP, search, asynchronous=False)
        return max(float(rates.max()) * (STEP + self._search(1)), 1.0)


def constant(seconds: float) -> Callable[[int], float]:
    return lambda _: seconds


def memory_then_arithmetic(queries: int) -> float:
    """As an exact search here: four queries cost what reading the keys costs, more cost their products."""
    return 0.040 + 0.002 * queries + 0.008 * max(queries - 4, 0)


@pytest.mark.parametrize("match", [0.0, 0.3, 0.6, 0.85, 0.98])
@pytest.mark.parametrize(
    "search",
    [
        pytest.param(lambda queries: 0.0005 * queries, id="cheap"),
        pytest.param(lambda queries: 0.003 * queries, id="one by one"),
        pytest.param(constant(0.012), id="constant"),
        pytest.param(memory_then_arithmetic, id="memory, then arithmetic"),
        pytest.param(constant(0.3), id="dear"),
    ],
)
def test_it_is_never_slower_and_close_to_the_best(search: Callable[[int], float], match: float) -> None:
    world = World(search, match)
    reached = world.speedup()
    assert reached > 0.97
    assert reached > 0.85 * world.best(), world.best()


def test_guessing_stops_where_it_does_not_pay_and_is_tried_again() -> None:
    world = World(lambda queries: 0.003 * queries, 0.95)
    world.speedup()
    late = world.strides[200:]
    assert late.count(0) > 0.9 * len(late)
    assert any(late)


def test_a_pause_that_looks_like_a_price_rules_nothing_out() -> None:
    """The first search of two queries took a hundred times as long."""
    costs = StrideCosts()
    for _ in range(3):
        costs.observe(1, STEP, 0.040)
    costs.observe(2, STEP, 4.0)
    assert costs.verification_by_stride(16).tolist() == [0.040, 0.040]
    for seconds in (0.042, 0.041):
        costs.observe(2, STEP, seconds)
    assert costs.verification_by_stride(16).tolist() == pytest.approx([0.040, 0.042, 0.044, 0.046])


def test_a_change_of_prices_is_noticed() -> None:
    shared = SharedStrideStats()
    cheap, dear = World(lambda queries: 0.0005 * queries, 0.95), World(constant(0.1), 0.95)
    for _ in range(10):
        cheap.request(CostAwareStride(shared=shared), 100)
    for _ in range(10):
        dear.request(CostAwareStride(shared=shared), 100)
    assert np.mean(dear.strides[-30:]) > 3


def test_a_new_request_begins_with_what_earlier_ones_saw() -> None:
    shared = SharedStrideStats()
    world = World(constant(0.1), 0.95)
    for _ in range(5):
        world.request(CostAwareStride(shared=shared), 100)
    schedule = CostAwareStride(shared=shared)
    assert schedule.next() == 3  # its own cache is empty
    schedule.observe(StrideRound(3, 3, STEP, 0.1))
    assert schedule.next() > 3


@pytest.mark.parametrize(
    ("search", "matched", "pays"), [(STEP, 0.3, True), (STEP, 0.0, False), (0.0001, 0.3, False)]
)
def test_passes_of_several_tokens_are_weighed_by_what_their_rounds_gave(
    search: float, matched: float, pays: bool
) -> None:
    """Most rounds read a token and guess it wrongly; some find eight in what was read, whether they guess or not."""
    shared = SharedStrideStats()
    draws = random.Random(0)
    strides = []
    for _ in range(10):
        schedule = CostAwareStride(shared=shared, joined=True)
        for _ in range(60):
            stride = schedule.next()
            strides.append(stride)
            read = 8 if draws.random() < matched else max(stride, 1)
            step = 1.4 * STEP / read
            if stride == 0:
                schedule.observe(StrideRound(0, 0, step, read * search, alone=read))
                continue
            right = read if read == 8 else 0
            seconds = search * (1 + 0.1 * read)
            schedule.observe(StrideRound(read, right, step + LOOK_UP, seconds, look_up_seconds=LOOK_UP))
    declined = np.mean(np.array(strides[-200:]) == 0)
    assert (declined < 0.1) if pays else (declined > 0.8)
    if search < 0.1 * STEP:
        assert not any(strides), "guesses spare searches, and searches cost nothing"


def test_a_stall_does_not_end_guessing_and_a_cold_start_does_not_keep_it_up() -> None:
    def declined(
        match: float, fixed: float, slope: float, *stalls: int, cold: float = 0.0, seed: int = 0
    ) -> float:
        draws, shared, strides = random.Random(seed), SharedStrideStats(), []
        schedule = CostAwareStride(shared=shared, joined=True)
        for number in range(600):
            if number % 60 == 0:
                schedule = CostAwareStride(shared=shared, joined=True)
            stride = schedule.next()
            strides.append(stride)
            late = 60.0 if number in stalls else cold if number == 0 else 0.0
            if stride == 0:
                schedule.observe(StrideRound(0, 0, 0.03, fixed + slope + late))
                continue
            right = 0
            while right < stride and draws.random() < match:
                right += 1
            seconds = fixed + slope * stride + late
            schedule.observe(StrideRound(stride, right, 0.036, seconds, look_up_seconds=0.006))
        return float(np.mean(np.array(strides[300:]) == 0))

    assert declined(0.8, 0.06, 0.002) < 0.1
    found = [declined(0.8, 0.06, 0.002, stall, seed=seed) for seed in range(3) for stall in range(0, 300, 20)]
    assert max(found) < 0.1
    assert max(declined(0.8, 0.06, 0.002, stall, stall + 9) for stall in range(100, 300, 20)) < 0.1
    # Among the very first rounds it costs a fifth of the rounds for a while, and no more.
    assert max(declined(0.8, 0.06, 0.002, stall) for stall in range(4, 20, 3)) < 0.3
    assert declined(0.3, 0.0, 0.03) > 0.8
    assert declined(0.3, 0.0, 0.03, cold=2.0) > 0.8


def test_what_is_read_during_a_search_is_not_counted_twice() -> None:
    shared, draws, strides = SharedStrideStats(), random.Random(0), []
    schedule = CostAwareStride(True, shared, joined=True)
    for _ in range(400):
        stride = schedule.next()
        strides.append(stride)
        if stride == 0:
            schedule.observe(StrideRound(0, 0, 0.05, 0.05))
            continue
        right = 0
        while right < stride and draws.random() < 0.95:
            right += 1
        schedule.observe(StrideRound(stride, right, 0.051, 0.05 * stride, look_up_seconds=0.001))
    assert np.mean(np.array(strides[200:]) == 0) < 0.1
