"""From logits to a token: truncation, and the keyed draw.

The order is that of transformers' generation: logits processors (``processors.py``), temperature, top-k,
top-p, min-p, draw. Everything here is a pure function of one row of logits, computed in float64, so that a
row's token does not depend on what else is in the pass.

Ties: equal logits are ordered by token id, smaller first. At the border of top-k and top-p the smaller ids
survive (transformers keeps all ties at top-k's border, and leaves those at top-p's to its sort). Greedy
choice and draw take the smallest id among equals.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specrag.engine.draws import keyed_gumbel
from specrag.engine.sampling_params import SamplingParams
from specrag.errors import InputError

# First try for top-p: no more than a thousand tokens can each hold this share of the mass.
_LIKELY_SHARE = 1e-3


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """The tokens that can follow, and how likely each is; all others have probability 0.

    Args:
        tokens: int64 ``[n]``, ascending ids.
        log_probs: float64 ``[n]``, natural logarithms of probabilities that sum to 1.
    """

    tokens: NDArray[np.int64]
    log_probs: NDArray[np.float64]

    def dense(self, vocab_size: int) -> NDArray[np.float64]:
        """Probabilities over the whole vocabulary, float64 ``[vocab_size]``."""
        probs = np.zeros(vocab_size, dtype=np.float64)
        probs[self.tokens] = np.exp(self.log_probs)
        return probs


def warp(logits: NDArray[np.floating], params: SamplingParams) -> Distribution:
    """The logits' distribution after temperature, top-k, top-p and min-p, in this order.

    Args:
        logits: one row, ``[V]``, already processed; ``-inf`` means banned.
        params: at temperature 0 the result is the likeliest token with probability 1.

    Raises:
        InputError: the logits hold NaN or infinity, or leave no token.
    """
    likeliest = _argmax(logits)
    if params.greedy:
        return Distribution(np.array([likeliest], dtype=np.int64), np.zeros(1, dtype=np.float64))
    highest = logits[likeliest]
    if 0 < params.top_k < len(logits):
        # The temperature does not change the order, so only the survivors need scaling.
        tokens = _top_k(logits, params.top_k)
        logits = logits[tokens]
    else:
        tokens = np.arange(len(logits), dtype=np.int64)
    scores = np.subtract(logits, highest, dtype=np.float64)
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to -inf, as it should
        scores /= params.temperature
    if params.top_p < 1:
        kept = _top_p(scores, params.top_p)
        tokens, scores = tokens[kept], scores[kept]
    # The likeliest token always survives and its score is 0.
    survives = scores > -math.inf if params.min_p == 0 else scores >= math.log(params.min_p)
    if not survives.all():
        tokens, scores = tokens[survives], scores[survives]
    scores -= math.log(np.exp(scores).sum())
    return Distribution(tokens, scores)


def draw(distribution: Distribution, seed: int, position: int) -> int:
    """Draw the token for a position: Gumbel-max with noise keyed by (seed, position, token).

    Tokens follow ``distribution``; the outcome depends on the arguments only.
    """
    noise = keyed_gumbel(seed, position, distribution.tokens)
    noise += distribution.log_probs
    return int(distribution.tokens[np.argmax(noise)])


def choose(logits: NDArray[np.floating], params: SamplingParams, position: int) -> int:
    """The next token for one row of processed logits ``[V]``; ``draw(warp(...))``, or the argmax if greedy.

    Raises:
        InputError: the logits hold NaN or infinity, or leave no token.
    """
    if params.greedy:
        return _argmax(logits)
    return draw(warp(logits, params), params.seed, position)


def log_softmax(logits: NDArray[np.floating]) -> NDArray[np.float64]:
    """Log-probabilities in nats at temperature 1, float64 ``[V]``; ``-inf`` stays ``-inf``."""
    scores: NDArray[np.float64] = np.subtract(logits, logits[_argmax(logits)], dtype=np.float64)
    scores -= math.log(np.exp(scores).sum())
    return scores


def _argmax(logits: NDArray[np.floating]) -> int:
    if logits.ndim != 1 or not len(logits):
        raise InputError("logits", logits.shape, "give one row of the vocabulary's size")
    # argmax returns the first of equals, or the first NaN if there is one, so this one check covers all values.
    best = int(np.argmax(logits))
    value = float(logits[best])
    if not math.isfinite(value):
        nothing_left = value == -math.inf
        remedy = "allow at least one token" if nothing_left else "check the model's weights and dtype"
        raise InputError("logits", value, remedy)
    return best


def _top_k(logits: NDArray[np.floating], k: int) -> NDArray[np.int64]:
    """Ascending indices of the ``k`` best."""
    return _best(logits, k, np.partition(logits, len(logits) - k)[len(logits) - k])


def _top_p(scores: NDArray[np.float64], top_p: float) -> NDArray[np.int64]:
    """Ascending indices of the fewest best that hold ``top_p`` of the mass; ``scores`` are at most 0.

    Sorts only tokens above a threshold. Tokens that each hold less than ``(1 - top_p) / n`` together hold less than
    ``1 - top_p``, so the second threshold always leaves enough.
    """
    weights = np.exp(scores)
    total = float(weights.sum())
    falling = np.empty(0, dtype=np.float64)
    masses = falling
    for share in (_LIKELY_SHARE, (1 - top_p) / (2 * len(scores))):
        falling = np.sort(scores[weights >= share * total])[::-1]
        masses = np.cumsum(np.exp(falling))
        if len(masses) and masses[-1] >= top_p * total:
            break
    # Rounding may leave the last sum a little short; then all of them are kept.
    count = min(int(np.searchsorted(masses, top_p * total)) + 1, len(falling))
    return _best(scores, count, falling[count - 1])


def _best(scores: NDArray[np.floating], count: int, border: np.floating) -> NDArray[np.int64]:
    """Ascending indices of the ``count`` best, the least of which is ``border``; smaller ids win ties."""
    above = scores > border
    ties = np.flatnonzero(scores == border)
    above[ties[: count - np.count_nonzero(above)]] = True
    return np.flatnonzero(above)
