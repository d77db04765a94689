"""The protocol of suffix indexes, and the token ids they accept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specrag.engine import compiled
from specrag.errors import InputError

#: Token ids, as a list or as an array of integers of shape ``[tokens]``.
Tokens = Sequence[int] | NDArray[np.integer]
#: Stands at the border of two texts, in place of a token; equals no token.
BORDER = -1
#: The largest token id; the largest vocabularies have a few hundred thousand.
LARGEST_TOKEN = 2**24 - 2
#: Default limit for the length of a suffix that is looked up.
MAX_LENGTH = 64


@dataclass(frozen=True, slots=True)
class Match:
    """A suffix that occurs in an index, with at least one token of the same text after an occurrence.

    Attributes:
        length: tokens of the suffix; 0 if not even its last token occurs.
        place: where the index found it; meaningful only to that index, until it changes.
        count: how often it occurs with a token after it; ``None`` if unknown.
    """

    length: int
    place: int
    count: int | None = None


class SuffixIndex(Protocol):
    """Texts in which the suffix of a sequence can be looked up. No match reaches across the end of a text.

    A position is an index into all tokens of the index. A suffix *ends at* ``end`` if its last token stands
    at ``end - 1``: the token at ``end`` is the first guess at what follows.
    """

    def __len__(self) -> int:
        """Number of positions, including the borders of texts."""

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""

    def match(self, tail: Tokens, max_length: int = MAX_LENGTH) -> Match:
        """The longest suffix of ``tail``, of at most ``max_length`` tokens, that occurs."""

    def occurrences(self, match: Match, limit: int) -> NDArray[np.int64]:
        """At most ``limit`` distinct ends of ``match``, each with a token of its text after it."""

    def continuation(self, end: int, count: int) -> NDArray[np.int32]:
        """At most ``count`` tokens starting at ``end``, cut at the end of their text."""


def checked_tokens(field: str, tokens: Tokens) -> NDArray[np.int64]:
    """``tokens`` as an array, ``[tokens]``.

    Raises:
        InputError: they are not a list of token ids.
    """
    array = np.asarray(tokens)
    if array.size == 0:
        return np.empty(0, dtype=np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InputError(field, tokens, "give a list of token ids")
    array = array.astype(np.int64, copy=False)
    wrong = _first_outside(array, LARGEST_TOKEN)
    if wrong >= 0:
        raise InputError(field, int(array[wrong]), f"give token ids from 0 to {LARGEST_TOKEN}")
    return array


def last_tokens(tail: Tokens, max_length: int) -> NDArray[np.int64]:
    """The part of ``tail`` that a match of at most ``max_length`` tokens depends on.

    Raises:
        InputError: ``max_length`` is negative.
    """
    require_not_negative("max_length", max_length)
    return np.asarray(tail[max(0, len(tail) - max_length) :], dtype=np.int64)


def require_not_negative(field: str, value: int) -> None:
    """Check that a number is not negative.

    Raises:
        InputError: ``value`` is below zero.
    """
    if value < 0:
        raise InputError(field, value, "give 0 or more")


def until_border(tokens: NDArray[np.int32], end: int, count: int) -> NDArray[np.int32]:
    """A copy of at most ``count`` tokens starting at position ``end``, cut at the first border.

    Raises:
        InputError: ``end`` or ``count`` is negative.
    """
    require_not_negative("end", end)
    require_not_negative("count", count)
    return tokens[end : _border_from(tokens, end, min(end + count, len(tokens)))].copy()


@compiled
def _border_from(tokens: NDArray[np.int32], start: int, stop: int) -> int:
    for position in range(start, stop):
        if tokens[position] < 0:
            return position
    return max(start, stop)


@compiled
def _first_outside(array: NDArray[np.int64], largest: int) -> int:
    for i in range(len(array)):
        if array[i] < 0 or array[i] > largest:
            return i
    return -1
