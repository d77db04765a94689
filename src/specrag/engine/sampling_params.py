"""What a request says about how its tokens are drawn. Without numpy, so that a command line starts quickly."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real

from specrag.errors import InputError

_MAX_BIAS = 100.0


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
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InputError(name, value, remedy)
    try:
        return float(value)
    except OverflowError:
        raise InputError(name, value, remedy) from None


def _integer(name: str, value: object, remedy: str) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
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
