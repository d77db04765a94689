"""Medians, ratios and intervals against values known by hand and by theory."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrag.bench.statistics import (
    Interval,
    PairedTimes,
    geometric_mean,
    median_interval,
    never_slower,
    overall_speedup,
)
from specrag.errors import InputError

seconds = st.floats(min_value=1e-4, max_value=1e3)
paired = st.lists(st.tuples(seconds, seconds), min_size=1, max_size=6).map(
    lambda pairs: PairedTimes([a for a, _ in pairs], [b for _, b in pairs])
)


def test_median_of_known_samples() -> None:
    assert median_interval([3.0, 1.0, 2.0]).value == 2.0
    assert median_interval([4.0, 1.0, 2.0, 3.0]).value == 2.5
    assert median_interval([5.0]) == Interval(5.0, 5.0, 5.0)


def test_median_interval_covers_the_true_median_about_as_often_as_it_says() -> None:
    generator = random.Random(7)
    runs = [median_interval([generator.gauss(10, 1) for _ in range(25)], resamples=400) for _ in range(200)]
    covered = sum(interval.low <= 10 <= interval.high for interval in runs) / len(runs)
    assert 0.90 <= covered <= 0.99
    # Theory: the standard error of a median of 25 normal values is 1.2533 / 5.
    width = sum(interval.high - interval.low for interval in runs) / len(runs)
    assert width == pytest.approx(2 * 1.96 * 1.2533 / 5, rel=0.2)


def test_the_bootstrap_is_seeded() -> None:
    samples = [1.0, 2.0, 4.0, 8.0, 9.0]
    assert median_interval(samples, seed=3) == median_interval(samples, seed=3)


def test_geometric_mean() -> None:
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
    assert geometric_mean([2.0, 0.5]) == pytest.approx(1.0)


def test_the_speedup_of_a_row_is_the_ratio_of_the_medians() -> None:
    speedup = overall_speedup([PairedTimes([2.0, 2.0, 100.0], [1.0, 1.0, 1.0])])
    assert speedup.value == 2.0
    assert speedup.low == 2.0
    assert speedup.high > 2.0


def test_pairing_takes_out_what_slows_both_methods_down() -> None:
    slow = [1.0, 1.5, 2.0, 3.0, 1.2]
    together = overall_speedup([PairedTimes([2 * t for t in slow], slow)])
    assert (together.low, together.high) == pytest.approx((2.0, 2.0))


def test_overall_is_the_geometric_mean_of_the_rows() -> None:
    rows = [PairedTimes([2.0], [1.0]), PairedTimes([8.0], [1.0])]
    speedup = overall_speedup(rows)
    assert speedup.value == pytest.approx(4.0)
    # Of two rows the bootstrap draws one of them twice half of the time, so its ends are the rows themselves.
    assert (speedup.low, speedup.high) == pytest.approx((2.0, 8.0))


@given(st.lists(paired, min_size=1, max_size=5))
def test_a_method_against_itself_is_exactly_1_and_swapping_inverts(rows: list[PairedTimes]) -> None:
    same = overall_speedup([PairedTimes(row.method, row.method) for row in rows], resamples=50)
    assert (same.low, same.value, same.high) == pytest.approx((1.0, 1.0, 1.0))
    there = overall_speedup(rows, resamples=50)
    back = overall_speedup([PairedTimes(row.method, row.baseline) for row in rows], resamples=50)
    assert there.value * back.value == pytest.approx(1.0)
    assert there.low <= there.value <= there.high


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [
        (Interval(0.97, 0.9, 1.0), True),
        (Interval(0.969, 0.9, 1.2), False),
        (Interval(0.99, 0.98, 0.999), False),
        (Interval(1.5, 1.4, 1.6), True),
    ],
)
def test_never_slower(interval: Interval, verdict: bool) -> None:
    assert never_slower(interval) is verdict


def test_bad_samples_are_named() -> None:
    with pytest.raises(InputError, match="samples"):
        median_interval([])
    with pytest.raises(InputError, match="rows"):
        overall_speedup([])
    with pytest.raises(InputError, match="repeats"):
        PairedTimes([1.0], [1.0, 2.0])
    with pytest.raises(InputError, match="seconds"):
        PairedTimes([1.0], [0.0])
    with pytest.raises(InputError, match="values"):
        geometric_mean([1.0, -1.0])
