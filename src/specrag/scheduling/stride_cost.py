"""What a stride is worth: RaLMSpec's objective, and the seconds in it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

#: Steps whose median is the price of one, and searches of each stride whose median is the price of it.
_RECENT = 5
#: Searches that make the price of a stride known.
_KNOWN = 3
#: A search is forgotten after this many others: the store may get busier, and a stride that once looked dear
#: gets another chance.
_MEMORY = 128


def passages_per_second(
    match: float, step: float, verification: NDArray[np.float64], asynchronous: bool
) -> NDArray[np.float64]:
    """Expected verified passages a second for the strides 1, 2, ..., float64 [strides] (RaLMSpec, section 4).

    A round of s queries verifies ``1 + match + ... + match^(s - 1)`` passages. It takes ``s a + b(s)``: s - 1
    speculative steps, the search, and a step with a passage known to be right. Asynchronously the last step
    runs during the search: if all guesses match, which has the chance ``match^s``, the round takes ``(s - 1) a +
    max(a, b(s))``; else that step is stopped at once and made again.

    Args:
        match: the chance that a guess is right, independent of the others, 0 to 1.
        step: a, seconds of a look-up and the decoding behind it.
        verification: b, seconds of one search for 1, 2, ... queries, float64 [strides].
        asynchronous: whether the last step runs during the search.
    """
    strides = np.arange(1, len(verification) + 1)
    verified = np.cumsum(match ** (strides - 1.0))
    seconds = strides * step + verification
    if asynchronous:
        seconds = seconds - match**strides * np.minimum(step, verification)
    return np.asarray(verified / seconds)


@dataclass(slots=True)
class _Searches:
    """The last searches of one stride, and the number of the latest among those of all strides."""

    seconds: deque[float]
    latest: int = 0


class StrideCosts:
    """Seconds of a speculation step and of a search by the number of its queries, from the recent ones.

    A step costs the median of the last few. A search costs ``b0 + b1 s``, both at least 0: the line of Theil
    (1950) and Sen (1968), the median of the slopes between all pairs of points, through the median of each
    stride's last searches. A pause of the machine moves neither. While searches of one stride only are known, they
    are taken for constant, so that others are tried and found out.

    :class:`~specrag.scheduling.cost_model.CostModel`, the price of a pass, does not serve here. It has hundreds of
    passes to learn from and mistrusts every one that costs more than half again what it expected; this must believe
    the second search of a request, where a store that answers one query after the other first shows.
    """

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=_RECENT)
        self._searches: dict[int, _Searches] = {}
        self._count = 0

    @property
    def measured(self) -> bool:
        """Whether a step and a search were seen."""
        return bool(self._steps) and bool(self._searches)

    def observe(self, stride: int, step: float, verification: float) -> None:
        """Learn from a round.

        Args:
            stride: queries of its search.
            step, verification: seconds; one that is not above 0 and finite is ignored.
        """
        if 0 < step < np.inf:
            self._steps.append(step)
        if 0 < verification < np.inf:
            self._count += 1
            own = self._searches.setdefault(stride, _Searches(deque(maxlen=_RECENT)))
            own.seconds.append(verification)
            own.latest = self._count

    def step(self) -> float:
        """a; to be asked for when :attr:`measured` only, as the other."""
        return median(self._steps)

    def verification(self, most: int) -> NDArray[np.float64]:
        """B for 1 to ``most`` queries, float64 [most]."""
        self._forget()
        strides = np.array(list(self._searches), dtype=np.float64)
        seconds = np.array([median(own.seconds) for own in self._searches.values()])
        first, second = np.triu_indices(len(strides), 1)
        slopes = (seconds[second] - seconds[first]) / (strides[second] - strides[first])
        slope = max(float(np.median(slopes)), 0.0) if len(slopes) else 0.0
        constant = float(np.median(seconds - slope * strides))
        if constant < 0.0:
            constant, slope = 0.0, float(np.median(seconds / strides))
        return constant + slope * np.arange(1.0, most + 1.0)

    def verification_by_stride(self, most: int) -> NDArray[np.float64]:
        """B for 1 to twice the largest known stride, but at most ``most`` queries, float64 [strides].

        Straight lines between the known strides, never falling, and the last of them beyond: a store whose searches
        cost what reading its vectors costs, up to some number of queries, and what computing with them costs from
        there on, has no single line. A stride is known from its third search on: by one or two, a pause of the machine
        could rule it out until it is forgotten.
        """
        self._forget()
        known = {stride: own for stride, own in self._searches.items() if len(own.seconds) >= _KNOWN}
        seen = sorted(known or self._searches)
        seconds = np.maximum.accumulate([median(self._searches[stride].seconds) for stride in seen])
        strides = np.arange(1.0, min(2 * seen[-1], most) + 1.0)
        slope = (seconds[-1] - seconds[-2]) / (seen[-1] - seen[-2]) if len(seen) > 1 else 0.0
        return np.asarray(
            np.interp(strides, seen, seconds) + slope * np.maximum(strides - seen[-1], 0.0), dtype=np.float64
        )

    def _forget(self) -> None:
        oldest = self._count - _MEMORY
        self._searches = {stride: own for stride, own in self._searches.items() if own.latest > oldest}
