"""Keyed random numbers: the same (seed, position, token) gives the same number, in whatever order they are asked for.

Plain decoding, any speculative decoding and any replay after a rollback therefore see the same noise at a
position, and can be compared token for token. No state is kept. Each token's number is computed independently,
so only tokens that survive the truncation of a distribution are computed.

The seed and the position are hashed (BLAKE2b) into two 64-bit key words. A token's 64 bits are two rounds of
the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014)
over the token and those words: wrapping 64-bit integer arithmetic, the same on every platform.
"""

from __future__ import annotations

import hashlib
import operator
import struct

import numpy as np
from numpy.typing import NDArray

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
_SECOND_FACTOR = np.uint64(0x94D049BB133111EB)


def keyed_uniform(seed: int, position: int, tokens: NDArray[np.integer]) -> NDArray[np.float64]:
    """Independent uniform numbers for the tokens at one position.

    Args:
        seed: any integer, of any size and sign.
        position: the absolute position in the sequence that the draw is for.
        tokens: token ids, any shape.

    Returns:
        float64 of the same shape, strictly between 0 and 1, multiples of 2**-53. The values are a contract:
        a new version of the package must not change them.
    """
    first_word, second_word = _key_words(seed, position)
    bits = np.array(tokens, dtype=np.uint64)
    with np.errstate(over="ignore"):
        bits *= _STEP
        bits += first_word
        _mix(bits)
        # The second word keeps keys with close first words from sharing a shifted stream.
        bits ^= second_word
        _mix(bits)
    # 52 bits and a half: exact in float64, and neither 0 nor 1.
    bits >>= np.uint64(12)
    uniform = bits.astype(np.float64)
    uniform += 0.5
    uniform *= 2.0**-52
    return uniform


def keyed_gumbel(seed: int, position: int, tokens: NDArray[np.integer]) -> NDArray[np.float64]:
    """Standard Gumbel noise, ``-log(-log(u))`` of ``keyed_uniform``; same arguments, same shape.

    The uniform numbers are equal on every platform; the logarithm may differ in its last bit.
    """
    noise = keyed_uniform(seed, position, tokens)
    np.log(noise, out=noise)
    np.negative(noise, out=noise)
    np.log(noise, out=noise)
    np.negative(noise, out=noise)
    return noise


def keyed_choice(seed: int, position: int, weights: NDArray[np.floating], stream: int = 0) -> int:
    """A token drawn in proportion to its weight: Gumbel-max with noise keyed by (seed, position, token).

    Args:
        seed, position: as for :func:`keyed_uniform`.
        weights: ``[V]``, not negative, not all 0; they need not sum to 1.
        stream: added to the token ids, so that draws for other purposes are independent at the same position.
    """
    tokens = np.flatnonzero(weights > 0)
    noise = keyed_gumbel(seed, position, tokens + stream)
    noise += np.log(weights[tokens])
    return int(tokens[np.argmax(noise)])


def _key_words(seed: int, position: int) -> tuple[np.uint64, np.uint64]:
    # Hexadecimal, since Python refuses to print very long integers in decimal.
    text = f"{operator.index(seed):x}/{operator.index(position):x}"
    first, second = struct.unpack("<QQ", hashlib.blake2b(text.encode("ascii"), digest_size=16).digest())
    return np.uint64(first), np.uint64(second)


def _mix(bits: NDArray[np.uint64]) -> None:
    """SplitMix64's finaliser, in place."""
    bits ^= bits >> np.uint64(30)
    bits *= _FIRST_FACTOR
    bits ^= bits >> np.uint64(27)
    bits *= _SECOND_FACTOR
    bits ^= bits >> np.uint64(31)
