"""Speculative retrieval as a random process: its best stride, and a simulation of it round by round.

Each passage matches with the same probability, independently; a step and a verification take known seconds. The
results are modelled, not measured: a bound to print beside measured figures, and a check of the schedules.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from specrag.checks import check_whole
from specrag.errors import InputError
from specrag.speculation.schedule import StrideRound, StrideSchedule, passages_per_second


@dataclass(frozen=True, slots=True)
class BestStride:
    """The stride that verifies the most passages per second.

    Attributes:
        stride: the smallest of the best strides.
        passages_per_second: with this stride.
    """

    stride: int
    passages_per_second: float


def best_stride(
    step: float,
    verification: Callable[[int], float],
    match: float,
    asynchronous: bool,
    most: int,
) -> BestStride:
    """Evaluate every stride with the objective of RaLMSpec, section 4.

    Args:
        step: a, seconds of a speculation step.
        verification: b, seconds of one search for this many queries.
        match: probability that a guess is right, 0 to 1.
        asynchronous: whether the last step runs during the verification.
        most: the largest stride to try.

    Raises:
        InputError: the seconds are not positive, ``match`` is not a probability, or ``most`` is not at least 1.
    """
    process = StrideProcess(step, verification, match, asynchronous)
    check_whole("most", most)
    seconds = np.array([process.verified(stride) for stride in range(1, most + 1)])
    rates = passages_per_second(match, step, seconds, asynchronous)
    best = int(np.argmax(rates))
    return BestStride(best + 1, float(rates[best]))


@dataclass(frozen=True, slots=True)
class Simulated:
    """The result of a simulated request.

    Attributes:
        passages: verified passages.
        seconds: simulated, not measured.
        rounds: in order.
    """

    passages: int
    seconds: float
    rounds: tuple[StrideRound, ...]

    @property
    def passages_per_second(self) -> float:
        return self.passages / self.seconds


@dataclass(frozen=True, slots=True)
class StrideProcess:
    """The process that a stride schedule drives.

    Args:
        step, verification, match, asynchronous: as for :func:`best_stride`.
        tokens: passes of the model per step; decoding that turns out wrong stops at the end of a pass. ``None``: it
            stops at once, as in the paper's objective.
    """

    step: float
    verification: Callable[[int], float]
    match: float
    asynchronous: bool = False
    tokens: int | None = None

    def __post_init__(self) -> None:
        if not (self.step > 0 and math.isfinite(self.step)):
            raise InputError("step", self.step, "give seconds above 0")
        if not 0 <= self.match <= 1:
            raise InputError("match", self.match, "give a chance from 0 to 1")

    def verified(self, queries: int) -> float:
        """Seconds of one search for this many queries."""
        seconds = float(self.verification(queries))
        if not (seconds > 0 and math.isfinite(seconds)):
            raise InputError("verification", seconds, "give seconds above 0")
        return seconds

    def round_seconds(self, stride: int, matched: int) -> float:
        """Seconds that a round lasts, followed along its timeline."""
        clock = 0.0
        for _ in range(stride - 1):
            clock += self.step
        searched = clock + self.verified(stride)
        if not self.asynchronous:
            return searched + self.step  # with a passage known to be right
        decoded = clock + self.step
        if matched == stride:
            return max(searched, decoded)
        if self.tokens is None or searched >= decoded:
            return searched + self.step
        a_pass = self.step / self.tokens
        while clock < searched:
            clock += a_pass
        return clock + self.step

    def run(self, schedule: StrideSchedule, passages: int, rng: random.Random) -> Simulated:
        """Simulate until this many passages are verified; the last stride is cut to those left."""
        rounds: list[StrideRound] = []
        done, seconds = 0, 0.0
        while done < passages:
            stride = min(schedule.next(), passages - done)
            matched = 0
            while matched < stride and rng.random() < self.match:
                matched += 1
            done += min(matched + 1, stride)
            seconds += self.round_seconds(stride, matched)
            rounds.append(StrideRound(stride, matched, self.step, self.verified(stride)))
            schedule.observe(rounds[-1])
        return Simulated(done, seconds, tuple(rounds))
