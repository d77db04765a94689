"""The suffix array of a static corpus: construction and binary search."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydivsufsort import divsufsort

from specrag.engine import compiled

Ints = NDArray[np.int32]
Tail = NDArray[np.int64]


def continued_positions(tokens: Ints) -> Ints:
    """The positions that a token of the same text follows, ordered by the tokens up to them, newest first.

    The places where a string ends are therefore adjacent, and so are those nearest to a longer string. Positions at
    the end of a text are left out: nothing could be guessed there.

    Args:
        tokens: ``[positions]``, with a negative number at the border of two texts and at both ends.
    """
    units, width = _packed(tokens)
    return _whole_tokens(divsufsort(units), tokens, width)


def _packed(tokens: Ints) -> tuple[NDArray[np.uint8], int]:
    """``tokens`` reversed, as bytes that sort like the tokens, and the number of bytes per token.

    The sort handles only bytes and its cost grows with their number, so tokens are renumbered: the n different ones
    that occur from 1 to n, a border as 0.
    """
    found = np.flatnonzero(np.bincount(tokens[tokens >= 0])).astype(np.int32)
    width = 1 if len(found) < 1 << 8 else 2 if len(found) < 1 << 16 else 3
    numbers = np.zeros(int(found[-1]) + 2, dtype=np.uint32)  # the last entry, for -1, stays 0
    numbers[found] = np.arange(1, len(found) + 1, dtype=np.uint32)
    large = numbers[tokens[::-1]].astype(">u4").view(np.uint8).reshape(-1, 4)
    return np.ascontiguousarray(large[:, 4 - width :]).reshape(-1), width


@compiled
def _whole_tokens(order: NDArray[np.signedinteger], tokens: Ints, width: int) -> Ints:
    """Of the sorted byte positions, keep those where a token begins that another follows in its text."""
    kept = np.empty(len(tokens), dtype=np.int32)
    count = 0
    for start in order:
        if start % width == 0:
            position = len(tokens) - 1 - start // width
            if tokens[position] >= 0 and tokens[position + 1] >= 0:
                kept[count] = position
                count += 1
    return kept[:count].copy()


@compiled
def _common(tokens: Ints, position: int, tail: Tail, known: int, most: int) -> int:
    """How many tokens up to ``position`` equal the last ones of ``tail``; at least ``known``, at most ``most``."""
    last = len(tail) - 1
    while known < most and tokens[position - known] == tail[last - known]:
        known += 1
    return known


@compiled
def longest(tokens: Ints, positions: Ints, tail: Tail) -> tuple[int, int]:
    """The length of the longest suffix of ``tail`` that occurs, and the rank of a position where it ends."""
    last = len(tail) - 1
    usable = 0  # a negative number is not a token and must match nothing, least of all a border
    while usable <= last and tail[last - usable] >= 0:
        usable += 1
    low = 0
    high = len(positions)
    before = 0  # tokens in common with the position ranked low - 1, and with the one ranked high
    behind = 0
    while low < high:
        middle = (low + high) >> 1
        position = positions[middle]
        # What both ends have in common with the tail, everything between them has too.
        common = _common(tokens, position, tail, min(before, behind), usable)
        if common == usable or tokens[position - common] > tail[last - common]:
            high = middle
            behind = common
        else:
            low = middle + 1
            before = common
    if behind >= before:
        return behind, low
    return before, low - 1


@compiled
def interval(tokens: Ints, positions: Ints, tail: Tail, length: int, rank: int) -> tuple[int, int]:
    """The first rank, and the rank after the last, of all positions where the last ``length`` tokens of ``tail`` end.

    Args:
        rank: one of these ranks; the search widens from there, so that a few occurrences cost a few steps.
    """
    low = rank
    step = 1
    while low - step >= 0 and _common(tokens, positions[low - step], tail, 0, length) == length:
        low -= step
        step *= 2
    outside = max(low - step, -1)
    while low - outside > 1:
        middle = (low + outside) >> 1
        if _common(tokens, positions[middle], tail, 0, length) == length:
            low = middle
        else:
            outside = middle
    high = rank
    step = 1
    while high + step < len(positions) and _common(tokens, positions[high + step], tail, 0, length) == length:
        high += step
        step *= 2
    outside = min(high + step, len(positions))
    while outside - high > 1:
        middle = (high + outside) >> 1
        if _common(tokens, positions[middle], tail, 0, length) == length:
            high = middle
        else:
            outside = middle
    return low, outside


@compiled
def spread_ends(positions: Ints, low: int, count: int, ends: NDArray[np.int64]) -> None:
    """Fill ``ends`` from evenly spaced ranks among the ``count`` ranks that start at ``low``."""
    chosen = len(ends)
    for i in range(chosen):
        ends[i] = positions[low + (2 * i + 1) * count // (2 * chosen)] + 1
