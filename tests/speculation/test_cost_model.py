"""What a pass costs, as it is learned from passes."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrag.engine.passes import Others
from specrag.speculation.schedule.cost_model import CostModel
from tests.speculation.machines import crowd, machine, packed, taught


def test_the_cost_model_finds_a_machine() -> None:
    model = taught()
    for rows, context in itertools.product((1, 4, 16, 60), (100, 1000, 4000)):
        assert model.seconds(rows, context) == pytest.approx(machine(rows, context), rel=0.1)


def test_the_cost_model_needs_a_few_passes_only() -> None:
    """After five passes the price of a tree is known within a quarter."""
    model = CostModel()
    assert not model.measured
    for rows in (1, 9, 5, 17, 9):
        model.observe(rows, 300, machine(rows, 300))
    assert model.measured
    for rows in (1, 5, 17):
        assert model.seconds(rows, 300) == pytest.approx(machine(rows, 300), rel=0.25)


def test_a_pause_of_the_machine_is_no_price() -> None:
    model = taught()
    model.observe(9, 500, 10.0)
    assert model.seconds(9, 500) == pytest.approx(machine(9, 500), rel=0.2)


def test_the_cost_model_follows_a_machine_that_gets_slower() -> None:
    model = taught(rounds=300)
    rng = random.Random(2)
    for _ in range(300):
        rows = rng.choice((1, 5, 17))
        model.observe(rows, 500, 2 * machine(rows, 500))
    assert model.seconds(9, 500) == pytest.approx(2 * machine(9, 500), rel=0.15)


def test_passes_of_one_size_do_not_carry_off_the_price_of_a_row() -> None:
    """They say nothing of it; their noise must not either."""
    model, rng = taught(), random.Random(3)
    fifteen = Others(15, 15, 15 * 300, 15 * 300)
    lowest, highest = 1e9, 0.0
    for _ in range(3000):
        model.observe(1, 300, packed(1, 300, fifteen) * rng.gauss(1, 0.15), fifteen)
        row = float(np.diff(model.seconds(np.array([1, 2]), 300, fifteen))[0])
        lowest, highest = min(lowest, row), max(highest, row)
    price = packed(2, 300, fifteen) - packed(1, 300, fifteen)
    assert price / 4 < lowest <= highest < 4 * price


@given(
    st.lists(
        st.tuples(st.integers(1, 100), st.integers(0, 30000), st.floats(1e-6, 10)), min_size=1, max_size=60
    )
)
@settings(max_examples=60, deadline=None)
def test_passes_never_become_free(observed: list[tuple[int, int, float]]) -> None:
    """Whatever was measured, more rows cost more, and everything is finite."""
    model = CostModel()
    for rows, context, seconds in observed:
        model.observe(rows, context, seconds)
    prices = model.seconds(np.arange(1, 62), 500)
    assert np.all(np.isfinite(prices))
    assert np.all(prices > 0)
    assert np.all(np.diff(prices) > 0)


@pytest.mark.parametrize("marked", [True, False])
def test_prompts_in_a_pass_do_not_make_guesses_cheap(marked: bool) -> None:
    """A prompt's row costs a third of a guess's here. Unless they are marked, such passes carry the price off."""
    rng, model = random.Random(1), CostModel()
    for number in range(300):
        writers, prompt = rng.randint(7, 12), 400 * (number % 8 == 7)
        seconds = (0.020 + 0.0009 * (1 + writers) + 0.0003 * prompt) * rng.gauss(1, 0.05)
        beside = Others(8 + bool(prompt), writers + prompt, 800, 100 * writers)
        model.observe(1, 100, seconds, beside, mixed=marked and prompt > 0)
    one, nine = model.seconds(np.array([1, 9]), 100, Others(7, 7, 700, 700)).tolist()
    price = (nine - one) / 8
    assert price == pytest.approx(0.0009, rel=0.2) if marked else price < 0.0005


def test_seconds_that_are_none_are_ignored() -> None:
    model = CostModel()
    model.observe(1, 0, 0.0)
    model.observe(1, 0, float("nan"))
    assert not model.measured


def test_the_cost_model_finds_what_other_requests_add() -> None:
    rng = random.Random(5)
    model = CostModel()
    for _ in range(200):
        others = crowd(rng.choice((0, 1, 3, 7, 15)), rows=rng.choice((1, 4, 9)))
        rows, context = rng.choice((1, 2, 9, 17)), rng.choice((100, 1000))
        model.observe(rows, context, packed(rows, context, others) * rng.gauss(1, 0.05), others)
    for count in (0, 4, 12):
        others = crowd(count)
        assert model.seconds(5, 500, others) == pytest.approx(packed(5, 500, others), rel=0.1)
