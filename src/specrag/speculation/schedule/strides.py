"""Speculation strides: how many retrievals to guess before they are verified (RaLMSpec, section 4)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specrag.checks import check_whole
from specrag.errors import InputError
from specrag.speculation.schedule.cost_model import StrideCosts, passages_per_second

#: A larger stride gains little (3 % at a match rate of 0.95 and a search of 20 steps) and holds text back for long.
MAX_STRIDE = 16
#: Rounds that OS3 estimates the match rate from.
WINDOW = 5
#: What other requests saw is worth at most this many look-ups to a new request.
SHARED_WEIGHT = 20.0
#: Number of look-ups after which an observation's weight has fallen to about a third.
_SHARED_MEMORY = 200.0
#: Number of rounds whose median is used as a price.
_RECENT = 15
#: Rounds without guesses before anything is compared with their price.
_FIRST = 3
#: Look-ups needed before a match rate is trusted; until then each round makes one.
_ENOUGH = 8.0
#: Number of times that guessing is declined before it is tried again, doubled each time it did not pay, its maximum,
#: and the number of rounds of a try.
_PATIENCE, _MOST_PATIENCE, _PROBE = 8, 64, 4
#: Guesses save only searches and cost a look-up each: if searches take less than this share of the time, none is tried.
_WORTHWHILE = 0.1
#: Maximum number of rounds whose gain is summed, and the number from which it is trusted: where passes yield several
#: tokens, a few rounds yield most of them.
_MANY, _FEW = 60, 10
#: After this many rounds with guesses there is one without, so that its price stays current.
_RENEWED = 64
#: A round that took this many times the median was held up by something else.
_HELD_UP = 8.0
#: The largest stride directly after a pause.
_STALE = 3


@dataclass(frozen=True, slots=True)
class ChunkTime:
    """Timing of a chunk that ran with nothing beside it.

    Attributes:
        fresh: whether its passage's prompt had to be read first.
        seconds: of look-up, reading and decoding.
    """

    fresh: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class StrideRound:
    """Outcome and timing of a round of s queries.

    Attributes:
        stride: s, the queries verified in one search; 0 if nothing was guessed.
        matched: guesses that were right before the first wrong one, 0 to s; the s-th look-up counts, although
            without asynchronous verification nothing is decoded after it.
        speculation_seconds: of one speculation step (look-up and decoding), mean of the round, excluding steps that
            were cut short.
        verification_seconds: of the search for the s queries; without guesses, of all searches, one per token.
        fresh: for each guess, whether its passage's prompt had not been read yet; empty if guesses have none.
        chunks: those of the round that ran with nothing beside them.
        beside_seconds: from the search's start to the end of the decoding beside it, if there was any.
        alone: tokens that were searched for one after the other, in a round without guesses.
        look_up_seconds: the look-up's part of ``speculation_seconds``, if it is measured separately.

    Raises:
        InputError: such a round is impossible.
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
        check_whole("stride", self.stride, least=0)
        if not 0 <= self.matched <= self.stride:
            raise InputError("matched", self.matched, f"give a number from 0 to the stride, {self.stride}")


class StrideSchedule(Protocol):
    """Chooses strides for one request. It changes the time an output takes, never the output."""

    def next(self) -> int:
        """Queries in the next round; 1 is sequential retrieval with a look-up to learn from, 0 is without one."""

    def observe(self, round: StrideRound) -> None:
        """Learn what the last round gained and cost; its stride may be smaller than the one asked for."""


class FixedStride:
    """The same stride in every round; the paper takes 3.

    Args:
        stride: at least 1.
    """

    def __init__(self, stride: int) -> None:
        check_whole("stride", stride)
        self._stride = stride

    def next(self) -> int:
        return self._stride

    def observe(self, round: StrideRound) -> None:
        del round


@dataclass
class Matches:
    """Decayed counts of verified look-ups and of those that were right."""

    looked_up: float = 0.0
    matched: float = 0.0

    def add(self, looked_up: int, matched: int) -> None:
        """Add counts."""
        keep = (1.0 - 1.0 / _SHARED_MEMORY) ** looked_up
        self.looked_up = keep * self.looked_up + looked_up
        self.matched = keep * self.matched + matched

    def diluted(self, most: float) -> Matches:
        """The same share of right ones, weighted as at most this many look-ups."""
        weight = min(most, self.looked_up)
        return Matches(weight, self.matched / self.looked_up * weight if self.looked_up else 0.0)


@dataclass
class SharedStrides:
    """Costs and match rate that all requests of a method learn together; they change no output.

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
    """The stride that promises the most verified passages per second (RaLMSpec, section 4).

    The match rate of the last rounds is the share of right guesses among all that were looked up until the first
    wrong one: ``sum(M) / (sum(M) + sum(M < s))`` (appendix A.2). Together with the seconds of a step and of a search it
    enters the paper's objective, whose best stride is found by trying all. A request starts with a stride of 1.
    Even a stride of 1 makes one look-up per round to learn from, so the stride grows again when guesses improve.

    With a cap the estimate is the paper's. It cannot tell a rate of 0.95 from 0.6. Without a cap a lower confidence
    bound replaces the estimate: that of Wilson (1927) at one standard error (84 % one-sided), so that
    n right guesses out of n count as a rate of ``n / (n + 1)``. What earlier requests saw then stands in for the rounds
    still missing from the window, so that a request need not start with a stride of 1.

    Args:
        asynchronous: whether the last step of a round runs during its search.
        max_match: the cap, above 0 and below 1; ``None`` for the confidence bound.
        shared: what requests learn together; by default a request learns alone.

    Raises:
        InputError: a value is out of range.
    """

    def __init__(
        self,
        asynchronous: bool = False,
        max_match: float | None = 0.6,
        shared: SharedStrides | None = None,
    ) -> None:
        if max_match is not None and not 0 < max_match < 1:
            raise InputError("max_match", max_match, "give a number between 0 and 1, or none for no cap")
        self._asynchronous = asynchronous
        self._max_match = max_match
        self._shared = shared or SharedStrides()
        self._rounds: deque[StrideRound] = deque(maxlen=WINDOW)
        # The state before the request, so that its own rounds do not count twice.
        self._before = self._shared.matches.diluted(SHARED_WEIGHT)

    def next(self) -> int:
        match, costs = self._match(), self._shared.costs
        if not match or not costs.measured:
            return 1
        seconds = costs.verification(MAX_STRIDE)
        rates = passages_per_second(match, costs.step(), seconds, self._asynchronous)
        return int(np.argmax(rates)) + 1

    def observe(self, round: StrideRound) -> None:
        self._rounds.append(round)
        self._shared.observe(round)

    def _match(self) -> float:
        """The estimated chance of a right guess; 0 without evidence."""
        matched = float(sum(round.matched for round in self._rounds))
        looked_up = float(sum(map(looked_up_in, self._rounds)))
        if self._max_match is not None:
            return min(matched / looked_up, self._max_match) if looked_up else 0.0
        lacking = 1.0 - len(self._rounds) / WINDOW
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
    """Look-ups up to and including the first wrong one: those after it were made with a wrong text."""
    return round.matched + (round.matched < round.stride)


@dataclass(frozen=True, slots=True)
class _Gain:
    """What a round gained and cost: tokens, seconds, and the part of the seconds spent searching."""

    tokens: int
    seconds: float
    searching: float


def _recent() -> deque[float]:
    return deque(maxlen=_RECENT)


@dataclass
class SharedStrideStats:
    """What all requests of a method learn about rounds with and without guesses; it changes no output.

    Attributes:
        strides: costs of searches in rounds with guesses, and how many guesses were right.
        steps, look_ups: seconds of decoding a token in rounds with guesses, and of a look-up.
        alone: each round without guesses.
        rounds: each round with guesses.
        declined: rounds without guesses since the last guesses.
        guessing: rounds with guesses since the last one without.
        patience: rounds without guesses before they are tried again.
    """

    strides: SharedStrides = field(default_factory=SharedStrides)
    steps: deque[float] = field(default_factory=_recent)
    look_ups: deque[float] = field(default_factory=_recent)
    alone: deque[_Gain] = field(default_factory=lambda: deque(maxlen=_MANY))
    rounds: deque[_Gain] = field(default_factory=lambda: deque(maxlen=_MANY))
    declined: int = 0
    guessing: int = 0
    patience: int = _PATIENCE


class CostAwareStride:
    """The stride that promises the most verified tokens per second; 0 if one search after the other promises more.

    Look-ups and maintaining the cache are work that sequential retrieval does not have. If a search is cheap, or costs
    as much in a batch as alone, nothing pays for that work; OS3 does it even at its smallest stride of 1.

    A price is the median of recent rounds, except where a pass may read several tokens (``joined``). The match rate
    covers all that the request has seen, with older look-ups counting less; a new request begins with what earlier
    ones saw. The stride is chosen by the lower end of Wilson's interval, like that of OS3 without a cap, since guesses
    after a wrong one are wasted. Whether to guess at all depends on the rate itself: judged by its lower end, a few
    unlucky guesses would end guessing for a whole text. While nothing is guessed, a few rounds are tried from time to
    time. Guesses directly after a pause do not count: the cache knew nothing of the text's last tokens.

    Args:
        asynchronous: whether the last step of a round runs during its search.
        shared: what requests learn together; by default a request learns alone.
        joined: whether a pass may read several tokens, so that a stride of 1 may become a longer one. Rounds then
            differ too much to calculate with a typical step: whether to guess is decided by what the last rounds
            yielded with guesses and without.
    """

    def __init__(
        self, asynchronous: bool = False, shared: SharedStrideStats | None = None, *, joined: bool = False
    ) -> None:
        self._asynchronous = asynchronous
        self._joined = joined
        self._shared = shared or SharedStrideStats()
        self._matches = self._shared.strides.matches.diluted(SHARED_WEIGHT)
        self._stale = True
        self._probing = 0
        # A single guess is verified no earlier than its result would be found without it, unless it is read meanwhile.
        self._smallest = 1 if asynchronous or joined else 2

    def next(self) -> int:
        shared = self._shared
        if len(shared.alone) < _FIRST or (self._joined and shared.guessing >= _RENEWED):
            return 0
        alone = self._alone()
        if alone.searching < _WORTHWHILE * alone.seconds:
            return 0
        stride, pays = self._best()
        if pays:
            shared.patience = _PATIENCE
        elif not self._probing:
            shared.declined += 1
            if shared.declined < shared.patience:
                return 0
            shared.patience = min(2 * shared.patience, _MOST_PATIENCE)
            self._probing = _PROBE
        return min(stride, _STALE) if self._stale else stride

    def observe(self, round: StrideRound) -> None:
        shared = self._shared
        if round.stride == 0:
            seconds = round.alone * round.speculation_seconds + round.verification_seconds
            shared.alone.append(_Gain(round.alone, seconds, round.verification_seconds))
            shared.guessing = 0
            self._stale = True
            return
        shared.steps.append(round.speculation_seconds - round.look_up_seconds)
        shared.look_ups.append(round.look_up_seconds)
        shared.declined = 0
        shared.guessing += 1
        self._probing = max(self._probing - 1, 0)
        if self._stale:
            self._stale = False
            shared.strides.costs.observe(round.stride, round.speculation_seconds, round.verification_seconds)
        else:
            shared.strides.observe(round)
            verified = min(round.matched + 1, round.stride)
            seconds = round.stride * round.speculation_seconds + round.verification_seconds
            if self._asynchronous and verified == round.matched:  # the last guess was read meanwhile
                seconds -= min(round.speculation_seconds, round.verification_seconds)
            shared.rounds.append(_Gain(verified, seconds, round.verification_seconds))
            self._matches.add(looked_up_in(round), round.matched)

    def _best(self) -> tuple[int, bool]:
        """The best stride among those that guess, and whether guessing pays; 1 while too little is known."""
        shared, seen = self._shared, self._matches
        if seen.looked_up < _ENOUGH or not shared.strides.costs.measured:
            return 1, True
        step = median(shared.steps)
        search = shared.strides.costs.verification_by_stride(MAX_STRIDE)

        def rates(match: float) -> NDArray[np.float64]:
            return passages_per_second(match, step + median(shared.look_ups), search, self._asynchronous)

        best = int(np.argmax(rates(wilson_lower_bound(seen.matched, seen.looked_up)))) + 1
        if self._joined:
            alone, lately = self._alone(), _without_slowest(shared.rounds)
            faster = lately.tokens * alone.seconds > alone.tokens * lately.seconds
            return best, faster or len(shared.rounds) < _FEW
        hoped = float(rates(seen.matched / seen.looked_up)[self._smallest - 1 :].max(initial=0.0))
        pays = hoped * (step + median(round.searching for round in list(shared.alone)[-_RECENT:])) > 1.0
        return max(best, self._smallest) if pays else best, pays

    def _alone(self) -> _Gain:
        """The sum of the rounds without guesses."""
        return _without_slowest(self._shared.alone)


def _without_slowest(rounds: Iterable[_Gain]) -> _Gain:
    """The sum of all but the slowest: a process's first round may find nothing in memory, others may be held up."""
    by_token = sorted(rounds, key=lambda round: round.seconds / round.tokens)
    return _sums(by_token[:-1])


def _sums(rounds: Iterable[_Gain]) -> _Gain:
    """What rounds gained and cost together; a round that was held up counts as ``_HELD_UP`` times the median."""
    found = list(rounds)
    most = _HELD_UP * median(round.seconds for round in found) if found else 0.0
    shares = [min(1.0, most / round.seconds) if round.seconds else 1.0 for round in found]
    return _Gain(
        sum(round.tokens for round in found),
        sum(share * round.seconds for share, round in zip(shares, found, strict=True)),
        sum(share * round.searching for share, round in zip(shares, found, strict=True)),
    )
