"""Whether two methods differ on the same questions, or only by the luck of which questions were asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specrag.errors import InputError

# Resampled indices held in memory at a time.
_CHUNK = 1_000_000


@dataclass(frozen=True, slots=True)
class BootstrapResult:
    """The outcome of a paired bootstrap.

    Args:
        difference: mean of ``a`` less mean of ``b``.
        low: lower end of the difference's 95 % percentile interval.
        high: upper end.
        p_value: two-sided, for the hypothesis that the true difference is 0.
    """

    difference: float
    low: float
    high: float
    p_value: float


def paired_bootstrap(
    a: Sequence[float], b: Sequence[float], *, samples: int = 10_000, seed: int = 0
) -> BootstrapResult:
    """Compares the scores of two methods on the same questions.

    Draws questions with replacement and looks how the mean of the per-question differences scatters (Efron
    and Tibshirani, "An introduction to the bootstrap", 1993, chapters 13 and 16). The p-value is the share of
    resampled differences, centred on 0, that are at least as large as the one observed, with one added to
    numerator and denominator so that it is never 0.

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
    observed = float(differences.mean())
    means = _resampled_means(differences, samples, seed)
    # Equal sums in another order may differ in their last bits and must count as equal.
    slack = 1e-12 * float(np.abs(differences).max())
    extreme = int((np.abs(means - observed) >= abs(observed) - slack).sum())
    low, high = np.percentile(means, [2.5, 97.5])
    return BootstrapResult(observed, float(low), float(high), (extreme + 1) / (samples + 1))


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
