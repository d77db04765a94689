"""How far fast float32 arithmetic can lie from the kernel of ``scoring.py``."""

from __future__ import annotations

import numpy as np

from specrag.engine.compiling import compiled
from specrag.retrieval.scoring import Doubles, Floats

UNIT_ROUNDOFF = 2.0**-24  # of float32
SMALLEST_NORMAL = 2.0**-126
# Lengths up to here keep every inner product far from the largest float32, so that none overflows.
LONGEST = 2.0**60


def dense_slack(query_norms: Doubles, largest_norm: float, dimension: int) -> Doubles:
    """How far a float32 inner product, summed in any order, can lie from :func:`dense_score`.

    A sum of n products in precision u, in any order and with or without fused multiply-add, errs by at most
    ``g(n) * sum |q_i v_i| <= g(n) * |q| * |v|`` with ``g(n) = n u / (1 - n u)`` (Higham, Accuracy and
    Stability of Numerical Algorithms, section 3.1). The kernel's own error is one rounding; ``n + 2`` covers
    both. The last summand covers underflow, also where a library flushes small numbers to zero.

    Args:
        query_norms: Euclidean lengths of the queries, float64 [queries].
        largest_norm: of the passages' vectors.
        dimension: n.
    """
    roundings = (dimension + 2) * UNIT_ROUNDOFF
    relative = 1.000001 * roundings / (1.0 - roundings)
    return relative * query_norms * largest_norm + 4 * dimension * SMALLEST_NORMAL


def hybrid_slack(query_norms: Doubles, largest_norm: float, dimension: int, weight: float) -> Doubles:
    """The same for :func:`hybrid_score` with an approximate dense part: its last rounding comes on top."""
    size = weight * query_norms * largest_norm + (1.0 - weight)
    return weight * dense_slack(query_norms, largest_norm, dimension) + 4 * UNIT_ROUNDOFF * size


@compiled
def largest_norm(vectors: Floats) -> float:
    """The greatest Euclidean length of the rows; infinite or not a number if an element is."""
    largest = 0.0
    for row in range(vectors.shape[0]):
        total = 0.0
        for element in vectors[row]:
            total += np.float64(element) * np.float64(element)
        if not total <= largest:
            largest = total
        if not total < np.inf:
            return np.float64(total)
    return float(np.sqrt(largest))
