"""Whether guessing pays at all, and with which stride: OS3's objective beside the price of plain retrieval."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

import numpy as np

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
#: So often guessing is declined before it is tried again, in so many rounds.
_PATIENCE, _PROBE = 64, 4
#: The largest stride right behind a pause.
_STALE = 3


def _recent() -> deque[float]:
    return deque(maxlen=_RECENT)


@dataclass
class SharedWorth:
    """What all requests of a method learn together; it changes no output.

    Attributes:
        strides: costs of searches in rounds with guesses, and how many guesses were right.
        steps, look_ups: seconds of decoding a token, with or without guesses, and of a look-up.
        alone: seconds of the search of a round without guesses.
        declined: rounds without guesses since some were made.
    """

    strides: SharedStrides = field(default_factory=SharedStrides)
    steps: deque[float] = field(default_factory=_recent)
    look_ups: deque[float] = field(default_factory=_recent)
    alone: deque[float] = field(default_factory=_recent)
    declined: int = 0


class CostAwareStride:
    """The stride that promises the most verified tokens a second; 0 where one search after the other promises more.

    Looking up and keeping the cache are work that sequential retrieval does not have. Where a search is cheap, or costs
    as much in a batch as alone, nothing pays for it; OS3's smallest stride of 1 still does both.

    A price is the median of recent rounds. The match rate is the lower end of Wilson's interval, as OS3's without a
    cap, of all that the request has seen, the older the less; a new request begins with what earlier ones saw. While
    nothing is guessed, a few rounds are tried from time to time. Guesses right behind a pause count for nothing: the
    cache knew nothing of the text's last tokens.

    Args:
        asynchronous: whether the last step of a round runs during its search.
        shared: what requests learn together; by default a request learns alone.
    """

    def __init__(self, asynchronous: bool = False, shared: SharedWorth | None = None) -> None:
        self._asynchronous = asynchronous
        self._shared = shared or SharedWorth()
        self._matches = self._shared.strides.matches.diluted(SHARED_WEIGHT)
        self._stale = True
        self._probing = 0

    def next(self) -> int:
        shared = self._shared
        if len(shared.alone) < _FIRST:
            return 0
        stride, pays = self._best()
        if not pays and not self._probing:
            shared.declined += 1
            if shared.declined < _PATIENCE:
                return 0
            self._probing = _PROBE
        return min(stride, _STALE) if self._stale else stride

    def observe(self, round: StrideRound) -> None:
        shared = self._shared
        shared.steps.append(round.speculation_seconds - round.look_up_seconds)
        if round.stride == 0:
            shared.alone.append(round.verification_seconds)
            self._stale = True
            return
        shared.look_ups.append(round.look_up_seconds)
        shared.declined = 0
        self._probing = max(self._probing - 1, 0)
        if self._stale:
            self._stale = False
            shared.strides.costs.observe(round.stride, round.speculation_seconds, round.verification_seconds)
        else:
            shared.strides.observe(round)
            self._matches.add(looked_up_in(round), round.matched)

    def _best(self) -> tuple[int, bool]:
        """The best stride of those that guess, and whether it pays; 1 while too little is known."""
        shared, seen = self._shared, self._matches
        if seen.looked_up < _ENOUGH or not shared.strides.costs.measured:
            return 1, True
        match = wilson_lower_bound(seen.matched, seen.looked_up)
        step = median(shared.steps)
        search = shared.strides.costs.verification_by_stride(MAX_STRIDE)
        rates = passages_per_second(match, step + median(shared.look_ups), search, self._asynchronous)
        best = int(np.argmax(rates))
        return best + 1, float(rates[best]) * (step + median(shared.alone)) > 1.0
