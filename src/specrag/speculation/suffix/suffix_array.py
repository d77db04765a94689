"""All places of a corpus, in the order of the tokens before them, read backwards."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydivsufsort import divsufsort

from specrag.engine.compiling import compiled

Ints = NDArray[np.int32]


def continued_positions(tokens: Ints) -> Ints:
    """The positions that a token of the same text follows, ordered by the tokens up to them, newest first.

    So the places where a string ends stand side by side, and those nearest to a longer one too. A position
    at the end of a text is left out: nothing could be guessed there.

    Args:
        tokens: ``[positions]``, with a negative number at the border of two texts, first and last included.
    """
    units, width = _packed(tokens)
    return _whole_tokens(divsufsort(units), tokens, width)


def _packed(tokens: Ints) -> tuple[NDArray[np.uint8], int]:
    """``tokens`` backwards as bytes whose order is that of the tokens, and how many bytes a token takes.

    The sort knows bytes only and costs by the byte, so tokens are numbered anew: the n different ones that
    occur from 1 to n, a border 0.
    """
    found = np.flatnonzero(np.bincount(tokens[tokens >= 0])).astype(np.int32)
    width = 1 if len(found) < 1 << 8 else 2 if len(found) < 1 << 16 else 3
    numbers = np.zeros(int(found[-1]) + 2, dtype=np.uint32)  # the last entry, for -1, stays 0
    numbers[found] = np.arange(1, len(found) + 1, dtype=np.uint32)
    large = numbers[tokens[::-1]].astype(">u4").view(np.uint8).reshape(-1, 4)
    return np.ascontiguousarray(large[:, 4 - width :]).reshape(-1), width


@compiled
def _whole_tokens(order: NDArray[np.signedinteger], tokens: Ints, width: int) -> Ints:
    """Keep, of the sorted byte positions, those where a token begins and another follows it in its text."""
    kept = np.empty(len(tokens), dtype=np.int32)
    count = 0
    for start in order:
        if start % width == 0:
            position = len(tokens) - 1 - start // width
            if tokens[position] >= 0 and tokens[position + 1] >= 0:
                kept[count] = position
                count += 1
    return kept[:count].copy()
