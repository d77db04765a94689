"""Whether guessing pays at all, and with which stride: OS3's objective beside the price of plain retrieval."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from numpy.typing import NDArray

from specrag.scheduling.stride import (
    MAX_STRIDE,
    SHARED_WEIGHT,
    SharedStrides,
    StrideRound,
    looked_up_in,
    wilson_lower_bound,
)
from specrag.scheduling.stride_cost import passages_per_second

#: Rounds whose median is a price.
_RECENT = 15
#: Rounds without guesses before anything is compared with their price.
_FIRST = 3
#: Look-ups from which a match rate is believed; until then one is made a round.
_ENOUGH = 8.0
#: So often guessing is declined before it is tried again, twice as often each time that it did not pay either; in so
#: many rounds.
_PATIENCE, _MOST_PATIENCE, _PROBE = 8, 64, 4
#: Guesses spare nothing but searches, and cost a look-up each: below this share of the time nothing is tried.
_WORTHWHILE = 0.1
#: Rounds whose gain is looked at together, and from which on it is believed: where passes give several tokens, few
#: rounds give most of them.
_MANY, _FEW = 60, 10
#: After so many rounds with guesses there is one without, so that its price does not grow old.
_RENEWED = 64
#: A round that took so many times the median was held up by something else.
_HELD_UP = 8.0
#: The largest stride right behind a pause.
_STALE = 3


@dataclass(frozen=True, slots=True)
class _Gain:
    """What a round gave and took: tokens, seconds, and seconds of them in which something was searched for."""

    tokens: int
    seconds: float
    searching: float


def _recent() -> deque[float]:
    return deque(maxlen=_RECENT)


@dataclass
class SharedWorth:
    """What all requests of a method learn together; it changes no output.

    Attributes:
        strides: costs of searches in rounds with guesses, and how many guesses were right.
        steps, look_ups: seconds of decoding a token in rounds with guesses, and of a look-up.
        alone: each round without guesses.
        rounds: each round with guesses.
        declined: rounds without guesses since some were made.
        guessing: rounds with guesses since there was one without.
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
    """The stride that promises the most verified tokens a second; 0 where one search after the other promises more.

    Looking up and keeping the cache are work that sequential retrieval does not have. Where a search is cheap, or costs
    as much in a batch as alone, nothing pays for it; OS3's smallest stride of 1 still does both.

    A price is the median of recent rounds, but where a pass may read several tokens (``joined``). The match rate is
    that of all that the request has seen, the older the less; a new request begins with what earlier ones saw. The
    stride is chosen by the lower end of Wilson's interval, as that of OS3 without a cap, since guesses behind a wrong
    one are in vain. Whether to guess at all is asked of the rate itself: by its lower end a few unlucky guesses would
    end it for a whole text. While nothing is guessed, a few rounds are tried from time to time. Guesses right behind a
    pause count for nothing: the cache knew nothing of the text's last tokens.

    Args:
        asynchronous: whether the last step of a round runs during its search.
        shared: what requests learn together; by default a request learns alone.
        joined: whether a pass may read several tokens, so that a stride of 1 may become a longer one. Rounds then
            differ too much to reckon with a step: whether to guess is asked of what the last rounds gave, with guesses
            and without.
    """

    def __init__(
        self, asynchronous: bool = False, shared: SharedWorth | None = None, *, joined: bool = False
    ) -> None:
        self._asynchronous = asynchronous
        self._joined = joined
        self._shared = shared or SharedWorth()
        self._matches = self._shared.strides.matches.diluted(SHARED_WEIGHT)
        self._stale = True
        self._probing = 0
        # A guess alone is verified as late as it would have been found without, unless it is read meanwhile.
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
        """The best stride of those that guess, and whether guessing pays; 1 while too little is known."""
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
        """Rounds without guesses."""
        return _without_slowest(self._shared.alone)


def _without_slowest(rounds: Iterable[_Gain]) -> _Gain:
    """All but one: the first round of a process may find nothing in memory, another waits for somebody else."""
    by_token = sorted(rounds, key=lambda round: round.seconds / round.tokens)
    return _sums(by_token[:-1])


def _sums(rounds: Iterable[_Gain]) -> _Gain:
    """What rounds gave and took together; one that was held up counts as long as it might have taken."""
    found = list(rounds)
    most = _HELD_UP * median(round.seconds for round in found) if found else 0.0
    shares = [min(1.0, most / round.seconds) if round.seconds else 1.0 for round in found]
    return _Gain(
        sum(round.tokens for round in found),
        sum(share * round.seconds for share, round in zip(shares, found, strict=True)),
        sum(share * round.searching for share, round in zip(shares, found, strict=True)),
    )
