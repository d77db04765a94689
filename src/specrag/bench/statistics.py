"""Medians, ratios and differences with their 95 % intervals, by a seeded bootstrap.

Pure functions of seconds, or of scores on the same questions. A speed-up is baseline / method, so above 1 the method
is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specrag.errors import InputError

CONFIDENCE = 0.95
RESAMPLES = 2000
NEVER_SLOWER_MEDIAN = 0.97
NEVER_SLOWER_HIGH = 1.0

# Resampled indices held in memory at a time.
_CHUNK = 1_000_000

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A figure with the ends of its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class PairedTimes:
    """One row's times: repeat i of the baseline ran beside repeat i of the method.

    Args:
        baseline, method: seconds (or seconds per token), one per repeat, equally many, above 0.
    """

    baseline: Sequence[float]
    method: Sequence[float]

    def __post_init__(self) -> None:
        if not self.baseline or len(self.baseline) != len(self.method):
            remedy = "give equally many times for both methods, at least one"
            raise InputError("repeats", (len(self.baseline), len(self.method)), remedy)
        if min(*self.baseline, *self.method) <= 0:
            raise InputError("seconds", min(*self.baseline, *self.method), "give times above 0")


def median_interval(samples: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """The median of ``samples`` with its percentile bootstrap interval.

    One sample has no spread: its interval is the point itself.

    Raises:
        InputError: there are no samples.
    """
    if not samples:
        raise InputError("samples", list(samples), "give at least one")
    values = np.asarray(samples, dtype=np.float64)
    picks = np.random.default_rng(seed).integers(len(values), size=(resamples, len(values)))
    return _interval(float(np.median(values)), np.median(values[picks], axis=1))


def geometric_mean(values: Sequence[float]) -> float:
    """The geometric mean of positive values, the right mean for ratios.

    Raises:
        InputError: there are none, or one is not above 0.
    """
    if not values or min(values) <= 0:
        raise InputError("values", list(values), "give at least one value, all above 0")
    return float(np.exp(np.mean(np.log(values))))


def overall_speedup(rows: Sequence[PairedTimes], *, seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """Geometric mean over rows of the ratio of medians.

    The bootstrap draws rows, and repeats within each row for both methods together, so that the interval covers both
    the spread between prompts and the noise of the timing.

    Raises:
        InputError: there are no rows.
    """
    if not rows:
        raise InputError("rows", list(rows), "give at least one row that both methods finished")
    generator = np.random.default_rng(seed)
    logs = np.log(np.stack([_resampled_ratios(row, generator, resamples) for row in rows]))  # [rows, draws]
    picks = generator.integers(len(rows), size=(len(rows), resamples))
    means = np.exp(np.take_along_axis(logs, picks, axis=0).mean(axis=0))
    return _interval(geometric_mean([_median_ratio(row) for row in rows]), means)


def never_slower(speedup: Interval) -> bool:
    """The project's verdict: the speed-up is at least 0.97 and its upper limit at least 1."""
    return speedup.value >= NEVER_SLOWER_MEDIAN and speedup.high >= NEVER_SLOWER_HIGH


def _median_ratio(times: PairedTimes) -> float:
    return float(np.median(times.baseline) / np.median(times.method))


def _resampled_ratios(times: PairedTimes, generator: np.random.Generator, resamples: int) -> Floats:
    """Ratios of medians for ``resamples`` draws of the repeats, [resamples]."""
    baseline = np.asarray(times.baseline, dtype=np.float64)
    method = np.asarray(times.method, dtype=np.float64)
    picks = generator.integers(len(baseline), size=(resamples, len(baseline)))
    ratios: Floats = np.median(baseline[picks], axis=1) / np.median(method[picks], axis=1)
    return ratios


def _interval(value: float, draws: Floats) -> Interval:
    """Percentile interval, widened to include the value itself, which a skewed bootstrap of few draws can miss."""
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(draws, [tail, 1 - tail])
    return Interval(value, min(value, float(low)), max(value, float(high)))


@dataclass(frozen=True, slots=True)
class BootstrapResult:
    """The outcome of a paired bootstrap.

    Args:
        difference: mean of ``a`` less mean of ``b``.
        low: lower end of the difference's 95 % percentile interval.
        high: upper end.
    """

    difference: float
    low: float
    high: float


def paired_bootstrap(
    a: Sequence[float], b: Sequence[float], *, samples: int = 10_000, seed: int = 0
) -> BootstrapResult:
    """Compare the scores of two methods on the same questions.

    Draws questions with replacement to find the spread of the mean per-question difference (Efron and
    Tibshirani, "An introduction to the bootstrap", 1993, chapter 13).

    Args:
        a: the first method's score on each question.
        b: the second method's, in the same order.
        samples: how often to resample.
        seed: equal seeds give equal results.

    Raises:
        InputError: the lengths differ, there are no scores, a score is not finite, or ``samples`` is below 1.
    """
    first, second = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if first.ndim != 1 or first.shape != second.shape:
        raise InputError("b", second.shape, f"give one score for each of the {len(a)} questions of a")
    if not len(first):
        raise InputError("a", a, "give the score of at least one question")
    differences = first - second
    broken = np.flatnonzero(~np.isfinite(differences))
    if len(broken):
        where = f"a[{broken[0]}] - b[{broken[0]}]"
        raise InputError(where, float(differences[broken[0]]), "give finite scores")
    if samples < 1:
        raise InputError("samples", samples, "give an integer from 1 upwards")
    low, high = np.percentile(_resampled_means(differences, samples, seed), [2.5, 97.5])
    return BootstrapResult(float(differences.mean()), float(low), float(high))


def _resampled_means(differences: np.ndarray, samples: int, seed: int) -> np.ndarray:
    """The mean of each resample, float64 ``[samples]``."""
    generator = np.random.default_rng(seed)
    n = len(differences)
    rows = max(1, _CHUNK // n)
    means = np.empty(samples, dtype=np.float64)
    for begin in range(0, samples, rows):
        end = min(begin + rows, samples)
        means[begin:end] = differences[generator.integers(0, n, size=(end - begin, n))].mean(axis=1)
    return means
