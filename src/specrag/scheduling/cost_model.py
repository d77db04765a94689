"""What a pass costs: seconds by rows and context, fitted while decoding."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specrag.engine.compiling import compiled
from specrag.engine.passes import Others

#: A pass with nothing else in it.
ALONE = Others()
#: Relative to a pass of one row behind an empty context, before anything was measured: the constant, a row, a
#: thousand tokens of context, and a row behind a thousand tokens. Typical of a CPU with a model of 0.1 to 2
#: billion weights; a wrong guess costs a few rounds.
_PRIOR = np.array([1.0, 0.03, 0.1, 0.02])
_PRIOR_DEVIATION = np.array([0.3, 0.03, 0.1, 0.03])
#: Relative deviation of a measured pass.
_NOISE = 0.1
#: Weight that an observation keeps at each new one: the machine may get busier.
_MEMORY = 0.98
#: A residual counts as at most this share of the prediction: a pause of the machine is no price.
_LARGEST_RESIDUAL = 0.5
#: A further row is never free, or a schedule would ask for rows without end.
_LEAST_ROW = 0.002


class CostModel:
    """Seconds of a pass: ``w0 + w1 rows + w2 context + w3 rows context``, by recursive least squares.

    In a pass of several sessions rows and contexts are sums over all of them, ``rows context`` the sum of each
    session's product.

    Linear in the rows, since a pass that reads the weights once grows by the arithmetic of its rows (measured:
    docs/results/engine.md). Shared by all requests of a model; it changes no output.
    """

    def __init__(self) -> None:
        self._weights = _PRIOR.copy()
        self._covariance = np.diag(_PRIOR_DEVIATION**2)
        self._unit = 0.0  # seconds of a pass of one row; 0 before the first measurement

    @property
    def measured(self) -> bool:
        """Whether any pass was seen; before that the seconds are relative."""
        return self._unit > 0

    def observe(
        self, rows: int, context: int, seconds: float, others: Others = ALONE, *, mixed: bool = False
    ) -> None:
        """Learn what a pass took.

        A row of a prompt costs less than one of a guess (two Xeon cores with matrix tiles, SmolLM2: 0.4 against 0.7
        ms), and a few hundred of them outweigh all passes without. So passes with prompts tell only how fast the
        machine is, until another is seen.

        Args:
            rows: rows of one session.
            context: tokens in front of them.
            seconds: the wall-clock time of the pass; not positive values are ignored.
            others: what was in the pass besides.
            mixed: whether some of the others read prompts.
        """
        if not seconds > 0 or (mixed and self.measured):
            return
        features = _features(rows, context, others)
        if not self.measured:
            self._unit = seconds / float(features @ self._weights)
            return
        _learn(self._weights, self._covariance, features, seconds / self._unit)

    def seconds(
        self, rows: int | NDArray[np.int64], context: int, others: Others = ALONE
    ) -> NDArray[np.float64]:
        """Expected seconds of passes.

        Args:
            rows: rows of one session, one number or several.
            context: tokens in front of them.
            others: what is in each pass besides.
        """
        constant, row, thousand, both = self._weights.tolist()
        behind = context / 1000
        base = constant + thousand * behind
        base += row * others.rows + (thousand * others.context + both * others.row_context) / 1000
        base = max(base, 0.1)
        slope = max(row + both * behind, _LEAST_ROW * base)
        return np.asarray((base + slope * np.asarray(rows)) * (self._unit or 1.0), dtype=np.float64)


@compiled
def _learn(
    weights: NDArray[np.float64], covariance: NDArray[np.float64], features: NDArray[np.float64], seen: float
) -> None:
    """One step of recursive least squares, in place: a pass of ``features`` took ``seen`` units."""
    size = len(weights)
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
    # Forgetting, but only of what the next such pass tells again: passes of one size say nothing of a row's price, and
    # if that were forgotten too, their noise would carry it off.
    told, spread = _told(covariance, features)
    for i in range(size):
        for j in range(size):
            covariance[i, j] += (1 / _MEMORY - 1) * told[i] * told[j] / spread


@compiled
def _told(
    covariance: NDArray[np.float64], features: NDArray[np.float64]
) -> tuple[NDArray[np.float64], float]:
    """``covariance @ features``, and the variance of what they predict."""
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
