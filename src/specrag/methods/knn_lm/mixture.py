"""kNN-LM's distribution: a language model's, interpolated with that of its neighbours' next tokens.

Khandelwal et al., "Generalization through memorization: nearest neighbor language models" (2020), equations 2 and 3,
with the temperature of He et al., "Efficient nearest neighbor language models" (2021).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specrag.engine import Logits
from specrag.errors import InputError

#: Maximum number of neighbours, as in the paper.
MOST_NEIGHBOURS = 1024


@dataclass(frozen=True, slots=True)
class Mixture:
    """How much the neighbours count.

    Args:
        k: neighbours, 1 to 1,024.
        weight: of the neighbours' distribution, 0 to 1 (lambda).
        temperature: divides the squared distances; above 0. The keys are not normalised, so the best value depends on
            the model: ``specrag perplexity`` finds it.
        reach: squared distance of the nearest neighbour at which the neighbours count e times less; ``None``: they
            count the same at any distance, as in the paper. A text from another domain benefits more with it (Drozdov
            et al. 2022, "You can't pick your neighbors, or can you?", make the weight depend on the distance too, in
            steps).

    Raises:
        InputError: a value is out of range.
    """

    k: int = MOST_NEIGHBOURS
    weight: float = 0.25
    temperature: float = 1.0
    reach: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.k, bool) or not isinstance(self.k, int) or not 1 <= self.k <= MOST_NEIGHBOURS:
            raise InputError("k", self.k, f"give a whole number from 1 to {MOST_NEIGHBOURS:,}")
        if not _is_number(self.weight) or not 0.0 <= self.weight <= 1.0:
            raise InputError("lambda", self.weight, "give a number from 0 (the model alone) to 1")
        if not _is_number(self.temperature) or not 0.0 < self.temperature < math.inf:
            raise InputError("knn_temperature", self.temperature, "give a number above 0")
        if self.reach is not None and (not _is_number(self.reach) or not 0.0 < self.reach < math.inf):
            raise InputError("reach", self.reach, "give a squared distance above 0, or leave it out")

    def weights_at(self, nearest: NDArray[np.floating]) -> NDArray[np.float64]:
        """The neighbours' weights for these squared distances of the nearest neighbour."""
        if self.reach is None:
            return np.full(nearest.shape, float(self.weight))
        weights: NDArray[np.float64] = self.weight * np.exp(-nearest.astype(np.float64) / self.reach)
        return weights


@dataclass(frozen=True, slots=True, eq=False)
class NeighbourTokens:
    """The neighbours' distribution over the tokens that follow them.

    Args:
        tokens: int64 [n], ascending, without duplicates.
        log_probs: float64 [n].
    """

    tokens: NDArray[np.int64]
    log_probs: NDArray[np.float64]


def neighbour_tokens(
    values: NDArray[np.int64], distances: NDArray[np.float32], temperature: float
) -> NeighbourTokens:
    """``p(token) ~ sum of exp(-distance / temperature)`` over the neighbours that the token follows.

    Args:
        values: the neighbours' next tokens, int64 [n], by ascending distance.
        distances: squared, float32 [n].
        temperature: see :class:`Mixture`.
    """
    if not len(values):
        return NeighbourTokens(np.empty(0, dtype=np.int64), np.empty(0))
    scores = -(distances.astype(np.float64) - np.float64(distances[0])) / temperature
    weights = np.exp(scores)
    tokens, places = np.unique(values, return_inverse=True)
    sums = np.bincount(places, weights=weights, minlength=len(tokens))
    with np.errstate(divide="ignore"):  # the farthest neighbours may have a weight of 0
        return NeighbourTokens(tokens, np.log(sums) - math.log(float(weights.sum())))


def normaliser(logits: Logits) -> float:
    """``log(sum(exp(logits)))`` of a row, in float64."""
    highest = float(logits.max())
    return highest + math.log(float(np.exp(logits.astype(np.float64) - highest).sum()))


def mix(logits: Logits, log_sum: float, neighbours: NeighbourTokens, weight: float) -> Logits:
    """Logits of ``weight * p_kNN + (1 - weight) * p_LM``, float32 [vocab_size].

    They are the logarithm of the mixture plus ``log_sum``: with a weight of 0 they are the model's own logits, so
    that penalties act as in plain decoding. Without neighbours they are the model's own too.

    Args:
        logits: the model's, float32 [vocab_size]; not written to.
        log_sum: their :func:`normaliser`.
        neighbours: what follows them.
        weight: of the neighbours (lambda).
    """
    if not len(neighbours.tokens) or weight == 0.0:
        return logits
    own = math.log1p(-weight) if weight < 1.0 else -math.inf
    mixed: Logits = logits + np.float32(own)
    at = neighbours.tokens
    model = logits[at].astype(np.float64) + own
    mixed[at] = np.logaddexp(model, neighbours.log_probs + (math.log(weight) + log_sum)).astype(np.float32)
    return mixed


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
