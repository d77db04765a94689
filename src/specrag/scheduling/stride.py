"""How many retrievals to speculate before they are verified: RaLMSpec's stride, fixed or chosen (OS3, section 4)."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from specrag.errors import InputError
from specrag.scheduling.stride_cost import StrideCosts, passages_per_second

#: A larger stride wins little (3 % at a match rate of 0.95 and a search of 20 steps) and keeps text back for long.
MAX_STRIDE = 16
#: What other requests saw is worth at most this many look-ups to a new one.
SHARED_WEIGHT = 20.0
#: Look-ups after which what was seen counts about a third.
_SHARED_MEMORY = 200.0


@dataclass(frozen=True, slots=True)
class ChunkTime:
    """What a chunk took that nothing ran beside.

    Attributes:
        fresh: whether its passage's prompt had to be read first.
        seconds: of look-up, reading and decoding.
    """

    fresh: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class StrideRound:
    """What a round of s queries gave and took.

    Attributes:
        stride: s, the queries verified in one search; 0 where nothing was guessed.
        matched: guesses that were right before the first wrong one, 0 to s; the s-th look-up counts, although
            nothing is decoded behind it without asynchronous verification.
        speculation_seconds: of one speculation step (look-up and decoding), mean of the round; without steps that
            were cut short.
        verification_seconds: of the search for the s queries; without guesses of all searches, one a token.
        fresh: for each guess, whether its passage's prompt had not been read yet; empty where guesses have none.
        chunks: those of the round that nothing ran beside.
        beside_seconds: from the search's start to the end of the decoding beside it, if there was any.
        alone: tokens that were searched for one after the other, in a round without guesses.
        look_up_seconds: the part of ``speculation_seconds`` that the look-up took, where it is told apart.

    Raises:
        InputError: there cannot be such a round.
    """

    stride: int
    matched: int
    speculation_seconds: float
    verification_seconds: float
    fresh: tuple[bool, ...] = ()
    chunks: tuple[ChunkTime, ...] = ()
    beside_seconds: float | None = None
    look_up_seconds: float = 0.0
    alone: int = 1

    def __post_init__(self) -> None:
        _check_whole("stride", self.stride, least=0)
        if not 0 <= self.matched <= self.stride:
            raise InputError("matched", self.matched, f"give a number from 0 to the stride, {self.stride}")


class StrideSchedule(Protocol):
    """Chooses strides for one request. It changes an output's time, never the output."""

    def next(self) -> int:
        """Queries in the next round; 1 is sequential retrieval with a look-up to learn from, 0 is without."""

    def observe(self, round: StrideRound) -> None:
        """Learn what the last round gave and took; its stride may be smaller than the one asked for."""


class FixedStride:
    """The same stride in every round; the paper takes 3.

    Args:
        stride: at least 1.
    """

    def __init__(self, stride: int) -> None:
        _check_whole("stride", stride)
        self._stride = stride

    def next(self) -> int:
        return self._stride

    def observe(self, round: StrideRound) -> None:
        del round


@dataclass
class Matches:
    """Verified look-ups and those of them that were right, the older the less."""

    looked_up: float = 0.0
    matched: float = 0.0

    def add(self, looked_up: int, matched: int) -> None:
        """Count some more."""
        keep = (1.0 - 1.0 / _SHARED_MEMORY) ** looked_up
        self.looked_up = keep * self.looked_up + looked_up
        self.matched = keep * self.matched + matched

    def diluted(self, most: float) -> Matches:
        """The same share of right ones among at most so many look-ups."""
        weight = min(most, self.looked_up)
        return Matches(weight, self.matched / self.looked_up * weight if self.looked_up else 0.0)


@dataclass
class SharedStrides:
    """What all requests of a method learn together; it changes no output.

    Attributes:
        costs: of steps and searches.
        matches: of guesses.
    """

    costs: StrideCosts = field(default_factory=StrideCosts)
    matches: Matches = field(default_factory=Matches)

    def observe(self, round: StrideRound) -> None:
        """Learn from a round of any request."""
        self.costs.observe(round.stride, round.speculation_seconds, round.verification_seconds)
        self.matches.add(looked_up_in(round), round.matched)


class OS3:
    """The stride that promises the most verified passages a second (RaLMSpec, section 4).

    The match rate of the last rounds is the share of right guesses among all that were looked up until the first
    wrong one: ``sum(M) / (sum(M) + sum(M < s))`` (appendix A.2). With the seconds of a step and of a search it
    goes into the paper's objective, whose best stride is found by trying all. A request starts with a stride of 1.
    At a stride of 1 there still is one look-up a round to learn from, so that the stride grows again when guesses
    get better.

    With a cap the estimate is the paper's. It cannot tell a rate of 0.95 from 0.6. Without a cap a lower confidence
    bound takes the estimate's place: that of Wilson (1927) at one standard error (84 % one-sided), so that
    n right guesses out of n count as a rate of ``n / (n + 1)``. What earlier requests saw then stands for the rounds
    that the window still lacks, so that a request need not start with a stride of 1.

    Args:
        asynchronous: whether the last step of a round runs during its search.
        window: rounds that the match rate is estimated from.
        max_match: the cap, above 0 and below 1; ``None`` for the confidence bound.
        max_stride: the largest stride.
        shared: what requests learn together; by default a request learns alone.

    Raises:
        InputError: a value is out of its range.
    """

    def __init__(
        self,
        asynchronous: bool = False,
        window: int = 5,
        max_match: float | None = 0.6,
        max_stride: int = MAX_STRIDE,
        shared: SharedStrides | None = None,
    ) -> None:
        _check_whole("window", window)
        _check_whole("max_stride", max_stride)
        if max_match is not None and not 0 < max_match < 1:
            raise InputError("max_match", max_match, "give a number between 0 and 1, or none for no cap")
        self._asynchronous = asynchronous
        self._max_match = max_match
        self._max_stride = max_stride
        self._shared = shared or SharedStrides()
        self._window = window
        self._rounds: deque[StrideRound] = deque(maxlen=window)
        # As it was before the request, so that its own rounds do not count twice.
        self._before = self._shared.matches.diluted(SHARED_WEIGHT)

    def next(self) -> int:
        match, costs = self._match(), self._shared.costs
        if not match or not costs.measured:
            return 1
        seconds = costs.verification(self._max_stride)
        rates = passages_per_second(match, costs.step(), seconds, self._asynchronous)
        return int(np.argmax(rates)) + 1

    def observe(self, round: StrideRound) -> None:
        self._rounds.append(round)
        self._shared.observe(round)

    def _match(self) -> float:
        """The chance to reckon with; 0 without evidence."""
        matched = float(sum(round.matched for round in self._rounds))
        looked_up = float(sum(map(looked_up_in, self._rounds)))
        if self._max_match is not None:
            return min(matched / looked_up, self._max_match) if looked_up else 0.0
        lacking = 1.0 - len(self._rounds) / self._window
        matched += lacking * self._before.matched
        looked_up += lacking * self._before.looked_up
        return wilson_lower_bound(matched, looked_up) if looked_up else 0.0


def wilson_lower_bound(successes: float, trials: float, deviations: float = 1.0) -> float:
    """Lower end of Wilson's score interval for a chance (JASA 22, 1927), 0 to 1.

    Args:
        successes: 0 to ``trials``; need not be whole.
        trials: above 0.
        deviations: standard errors below the share of successes.
    """
    share, extra = successes / trials, deviations**2 / trials
    spread = math.sqrt(extra * share * (1.0 - share) + extra**2 / 4)
    return max((share + extra / 2 - spread) / (1.0 + extra), 0.0)


def looked_up_in(round: StrideRound) -> int:
    """Look-ups up to the first wrong one: what lies behind it was looked up with a wrong text."""
    return round.matched + (round.matched < round.stride)


def _check_whole(name: str, value: int, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(name, value, f"give a whole number of at least {least}")
