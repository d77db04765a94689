"""From logits to a token: parameters, truncation, and the keyed draw.

The order is that of transformers' generation: logits processors (``processors.py``), temperature, top-k,
top-p, min-p, draw. Everything here is a pure function of one row of logits, computed in float64, so that a
row's token does not depend on what else is in the pass.

Ties: equal logits are ordered by token id, smaller first. At the border of top-k and top-p the smaller ids
survive (transformers keeps all ties at top-k's border, and leaves those at top-p's to its sort). Greedy
choice and draw take the smallest id among equals.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specrag.engine.draws import keyed_gumbel
from specrag.errors import InputError

_MAX_BIAS = 100.0

# First try for top-p: no more than a thousand tokens can each hold this share of the mass.
_LIKELY_SHARE = 1e-3


class TokenBias(Mapping[int, float]):
    """An immutable, hashable mapping from token id to a number added to that token's logit."""

    __slots__ = ("_by_token",)

    def __init__(self, by_token: Mapping[int, float]) -> None:
        self._by_token = dict(by_token)

    def __getitem__(self, token: int) -> float:
        return self._by_token[token]

    def __iter__(self) -> Iterator[int]:
        return iter(self._by_token)

    def __len__(self) -> int:
        return len(self._by_token)

    def __hash__(self) -> int:
        return hash(frozenset(self._by_token.items()))

    def __repr__(self) -> str:
        return repr(self._by_token)


_NO_BIAS = TokenBias({})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen from the logits. Immutable, hashable, picklable.

    Args:
        temperature: divides the logits; 0 is greedy, and top-k, top-p and min-p then have no effect.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens that holds this mass; in (0, 1], 1 keeps all.
        min_p: keep tokens with at least this share of the likeliest token's probability; in [0, 1], 0 keeps all.
        repetition_penalty: divides positive and multiplies negative logits of every token in prompt or output
            (Keskar et al., "CTRL", 2019, section 4.1); from 0.01 to 100, 1 is off.
        presence_penalty: subtracted once from the logit of every token in the output; from -2 to 2.
        frequency_penalty: subtracted once for each occurrence of the token in the output; from -2 to 2.
        logit_bias: token id -> number added to its logit, from -100 to 100; ``-inf`` bans the token.
        seed: any integer; equal seeds give equal text.

    Raises:
        InputError: a value is of the wrong type or out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default=_NO_BIAS)
    seed: int = 0

    def __post_init__(self) -> None:
        self._store_number("temperature", 0.0, math.inf, "give a number from 0 (greedy) upwards")
        self._store_number("top_p", 0.0, 1.0, "give a number above 0 and up to 1 (off)")
        if self.top_p == 0:
            raise InputError("top_p", self.top_p, "give a number above 0 and up to 1 (off)")
        self._store_number("min_p", 0.0, 1.0, "give a number from 0 (off) to 1")
        self._store_number("repetition_penalty", 0.01, 100.0, "give a number from 0.01 to 100, 1 is off")
        self._store_number("presence_penalty", -2.0, 2.0, "give a number from -2 to 2")
        self._store_number("frequency_penalty", -2.0, 2.0, "give a number from -2 to 2")
        self._store("top_k", _integer("top_k", self.top_k, "give an integer from 0 (off) upwards"))
        if self.top_k < 0:
            raise InputError("top_k", self.top_k, "give an integer from 0 (off) upwards")
        self._store("seed", _integer("seed", self.seed, "give an integer"))
        self._store("logit_bias", _checked_bias(self.logit_bias))

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken and nothing is drawn."""
        return self.temperature == 0

    def _store_number(self, name: str, low: float, high: float, remedy: str) -> None:
        value: object = getattr(self, name)
        number = _number(name, value, remedy)
        if not math.isfinite(number) or not low <= number <= high:
            raise InputError(name, value, remedy)
        self._store(name, number)

    def _store(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def _number(name: str, value: object, remedy: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise InputError(name, value, remedy)
    try:
        return float(value)
    except OverflowError:
        raise InputError(name, value, remedy) from None


def _integer(name: str, value: object, remedy: str) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise InputError(name, value, remedy)
    return int(value)


def _checked_bias(bias: object) -> TokenBias:
    if not isinstance(bias, Mapping):
        raise InputError("logit_bias", bias, "give a mapping from token id to a number")
    checked: dict[int, float] = {}
    for raw_token, raw_value in bias.items():
        token = _integer("logit_bias", raw_token, "give integers as token ids")
        if token < 0:
            raise InputError("logit_bias", token, "give token ids from 0 upwards")
        remedy = f"give token {token} a number from -100 to 100, or -inf to ban it"
        value = _number("logit_bias", raw_value, remedy)
        if not (-_MAX_BIAS <= value <= _MAX_BIAS or value == -math.inf):
            raise InputError("logit_bias", raw_value, remedy)
        checked[token] = value
    return TokenBias(checked)


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
