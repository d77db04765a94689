"""The cost model of all schedules: seconds of passes and of searches, learned while decoding.

:class:`CostModel` prices passes by rows and context, for tokens and chains; :class:`StrideCosts` prices searches by the
number of queries, and the decoding between them, for strides and guesses of passages.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Generic, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from specrag.engine import Others, SessionModel, compiled

#: A pass with nothing else in it.
ALONE = Others()
#: Before any measurement, relative to a pass of one row with an empty context: the constant, a row, a thousand tokens
#: of context, and a row after a thousand tokens. Typical of a CPU with a model of 0.1 to 2 billion weights; a wrong
#: guess costs a few rounds.
_PRIOR = np.array([1.0, 0.03, 0.1, 0.02])
_PRIOR_DEVIATION = np.array([0.3, 0.03, 0.1, 0.03])
#: Relative deviation of a measured pass.
_NOISE = 0.1
#: Weight that an observation keeps with each new one: the machine may get busier.
_MEMORY = 0.98
#: A residual is clipped to this share of the prediction: a pause of the machine is not a price.
_LARGEST_RESIDUAL = 0.5
#: Minimum price of a further row, as a share of the base: if rows were free, a schedule would ask for them endlessly.
_LEAST_ROW = 0.002
#: The last steps, and the last searches of each stride, whose median is the price.
_RECENT = 5
#: Searches needed to consider the price of a stride known.
_KNOWN = 3
#: A search is forgotten after this many others: the store may get busier, and a stride that once looked expensive
#: gets another chance.
_SEARCH_MEMORY = 128


class CostModel:
    """Seconds of a pass: ``w0 + w1 rows + w2 context + w3 rows context``, by recursive least squares.

    In a pass of several sessions rows and contexts are summed over all of them; ``rows context`` is the sum of the
    products of each session.

    The model is linear in the rows, since a pass that reads the weights once grows with the arithmetic of its rows
    (measured: docs/results/records/engine-smollm2.jsonl.gz). Shared by all requests of a model; it changes no output.
    """

    def __init__(self) -> None:
        self._weights = _PRIOR.copy()
        self._covariance = np.diag(_PRIOR_DEVIATION**2)
        self._unit = 0.0  # seconds of a pass of one row; 0 before the first measurement

    @property
    def measured(self) -> bool:
        """Whether any pass was seen; before that, seconds are relative."""
        return self._unit > 0

    def observe(
        self, rows: int, context: int, seconds: float, others: Others = ALONE, *, mixed: bool = False
    ) -> None:
        """Learn what a pass took.

        A row of a prompt costs less than one of a guess (two Xeon cores with matrix tiles, SmolLM2: 0.4 against 0.7
        ms), and a few hundred of them outweigh all passes without. So passes with prompts only tell how fast the
        machine is, until a pass without prompts is seen.

        Args:
            rows: rows of one session.
            context: tokens in front of them.
            seconds: the wall-clock time of the pass; ignored unless positive.
            others: what else was in the pass.
            mixed: whether some of the others read prompts.
        """
        if not seconds > 0 or (mixed and self.measured):
            return
        if not self.measured:
            self._unit = seconds / float(_features(rows, context, others) @ self._weights)
            return
        products = rows * context + others.row_context
        _learn(
            self._weights,
            self._covariance,
            float(rows + others.rows),
            (context + others.context) / 1000,
            products / 1000,
            seconds / self._unit,
        )

    def seconds(
        self, rows: int | NDArray[np.int64], context: int, others: Others = ALONE
    ) -> NDArray[np.float64]:
        """Expected seconds of passes.

        Args:
            rows: rows of one session, one number or several.
            context: tokens in front of them.
            others: what else is in each pass.
        """
        line = self.line(context, others)
        return np.asarray(line.base + line.row * np.asarray(rows), dtype=np.float64)

    def line(self, context: int, others: Others = ALONE) -> Line:
        """Expected seconds of a pass as a function of the rows of one session after ``context`` tokens.

        Args:
            context: tokens in front of them.
            others: what else is in the pass.
        """
        base, row = _line(self._weights, context, others.rows, others.context, others.row_context)
        unit = self._unit or 1.0
        return Line(base * unit, row * unit)


class Line(NamedTuple):
    """Seconds of a pass: ``base + row * rows``."""

    base: float
    row: float


@compiled
def _line(
    weights: NDArray[np.float64], context: int, rows: int, other_context: int, row_context: int
) -> tuple[float, float]:
    """:meth:`CostModel.line` in units of a pass of one row."""
    constant, row, thousand, both = weights
    behind = context / 1000
    base = constant + thousand * behind
    base += row * rows + (thousand * other_context + both * row_context) / 1000
    base = max(base, 0.1)
    return base, max(row + both * behind, _LEAST_ROW * base)


@compiled
def _learn(
    weights: NDArray[np.float64],
    covariance: NDArray[np.float64],
    rows: float,
    context: float,
    products: float,
    seen: float,
) -> None:
    """One step of recursive least squares, in place: a pass of these features took ``seen`` units."""
    size = len(weights)
    features = np.array((1.0, rows, context, products))
    told, spread = _told(covariance, features)
    predicted = 0.0
    for i in range(size):
        predicted += features[i] * weights[i]
    limit = _LARGEST_RESIDUAL * predicted
    residual = min(max(seen - predicted, -limit), limit)
    spread += (_NOISE * predicted) ** 2
    for i in range(size):
        weights[i] += told[i] / spread * residual
        for j in range(size):
            covariance[i, j] -= told[i] * told[j] / spread
    # Forget, but only what the next such pass will tell again: passes of one size say nothing about the price of a row,
    # and if that were forgotten too, their noise would make it drift.
    told, spread = _told(covariance, features)
    for i in range(size):
        for j in range(size):
            covariance[i, j] += (1 / _MEMORY - 1) * told[i] * told[j] / spread


@compiled
def _told(
    covariance: NDArray[np.float64], features: NDArray[np.float64]
) -> tuple[NDArray[np.float64], float]:
    """``covariance @ features``, and the variance of the prediction."""
    told = np.zeros_like(features)
    spread = 0.0
    for i in range(len(features)):
        for j in range(len(features)):
            told[i] += covariance[i, j] * features[j]
        spread += features[i] * told[i]
    return told, spread


def _features(rows: int, context: int, others: Others) -> NDArray[np.float64]:
    products = rows * context + others.row_context
    return np.array([1.0, rows + others.rows, (context + others.context) / 1000, products / 1000])


def passages_per_second(
    match: float, step: float, verification: NDArray[np.float64], asynchronous: bool
) -> NDArray[np.float64]:
    """Expected verified passages per second for the strides 1, 2, ..., float64 [strides] (RaLMSpec, section 4).

    A round of s queries verifies ``1 + match + ... + match^(s - 1)`` passages. It takes ``s a + b(s)``: s - 1
    speculative steps, the search, and a step with a passage known to be right. Asynchronously the last step
    runs during the search: if all guesses match, which has the chance ``match^s``, the round takes ``(s - 1) a +
    max(a, b(s))``; otherwise that step is stopped at once and repeated.

    Args:
        match: the chance that a guess is right, independent of the others, 0 to 1.
        step: a, seconds of a look-up and the decoding after it.
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
    """The last searches of one stride, and the number of the latest one in the count over all strides."""

    seconds: deque[float]
    latest: int = 0


class StrideCosts:
    """Seconds of a speculation step, and of a search by the number of its queries, from recent ones.

    A step costs the median of the last few. A search costs ``b0 + b1 s``, both at least 0: the line of Theil
    (1950) and Sen (1968), the median of the slopes between all pairs of points, through the median of each
    stride's last searches. A pause of the machine moves neither. While searches of only one stride are known, the cost
    is taken as constant, so that other strides are tried and measured.

    :class:`CostModel`, the price of a pass, is unsuitable here. It has hundreds of passes to learn from and distrusts
    every one that costs more than 1.5 times what it expected; this one must believe the second search of a request,
    which is the first to show that a store answers one query after the other.
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
            step, verification: seconds; a value that is not positive and finite is ignored.
        """
        if 0 < step < np.inf:
            self._steps.append(step)
        if 0 < verification < np.inf:
            self._count += 1
            own = self._searches.setdefault(stride, _Searches(deque(maxlen=_RECENT)))
            own.seconds.append(verification)
            own.latest = self._count

    def step(self) -> float:
        """The seconds a of a step; call it only when :attr:`measured`, like the other methods."""
        return median(self._steps)

    def verification(self, most: int) -> NDArray[np.float64]:
        """The seconds b of a search for 1 to ``most`` queries, float64 [most]."""
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
        """The seconds b for 1 to ``most`` queries, at most twice the largest known stride, float64 [strides].

        Straight lines between the known strides, never falling, with the last line extended beyond them: a store whose
        searches cost as much as reading its vectors up to some number of queries, and as much as computing with them
        from there on, has no single line. A stride counts as known from its third search on: after one or two, a pause
        of the machine could rule it out until it is forgotten.
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
        oldest = self._count - _SEARCH_MEMORY
        self._searches = {stride: own for stride, own in self._searches.items() if own.latest > oldest}


Learned = TypeVar("Learned")


class ByModel(Generic[Learned]):
    """What requests learn together, one object per loaded model: another device or dtype has other prices.

    A model's weights may be wrapped again for each call, as a borrowed ``transformers`` module is, and may be moved
    between calls. So what is learned belongs to the weights, their device and their dtype.

    Args:
        make: makes the object for a model that was not seen before. It is forgotten with the model.
    """

    def __init__(self, make: Callable[[], Learned]) -> None:
        self._make = make
        self._learned: WeakKeyDictionary[object, dict[str, Learned]] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def of(self, model: SessionModel) -> Learned:
        """What was learned about ``model``."""
        weights = getattr(model, "module", model)
        placed = f"{getattr(model, 'device', None)} {getattr(model, 'dtype', None)}"
        with self._lock:
            known = self._learned.setdefault(weights, {})
            if placed not in known:
                known[placed] = self._make()
            return known[placed]
