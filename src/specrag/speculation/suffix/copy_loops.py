"""Copying behind earlier occurrences, as a compiled loop."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from specrag.engine.compiling import compiled

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


@compiled
def copy_behind(tokens: Ints, ends: Longs, most: int, copies: Ints, matched: Longs, firsts: Longs) -> None:
    """Read what stands around some positions of a text that grows.

    Args:
        tokens: the text so far, a negative number at the end of each part.
        ends: positions inside it.
        most: how many tokens in front of a position to compare with the newest ones.
        copies: filled, ``[ends, length]``: what follows each position, -1 behind the end of its part. Behind the newest
            token a copy goes on with what it copied itself, as a repetition does.
        matched: filled: how many tokens in front of each position agree with the newest ones.
        firsts: filled: the first of the ends with the same copy.
    """
    newest = len(tokens)
    length = copies.shape[1]
    for row in range(len(ends)):
        end = ends[row]
        ended = False
        for step in range(length):
            # The way from a position to the newest token is the period of the repetition.
            token = tokens[end + step % (newest - end)]
            ended = ended or token < 0
            copies[row, step] = -1 if ended else token
        agree = 0
        while agree < min(most, end):
            token = tokens[end - 1 - agree]
            if token < 0 or token != tokens[newest - 1 - agree]:
                break
            agree += 1
        matched[row] = agree
        firsts[row] = row
        for other in range(row):
            if firsts[other] == other and np.array_equal(copies[other], copies[row]):
                firsts[row] = other
                break
