"""Inner products of many vectors with few queries, in float32: what a search reads all its vectors for.

A library's matrix product packs both sides first, which for a handful of queries costs more than the product itself
(200,000 vectors of 384 numbers, two Zen 4 cores: 25 to 29 ms for two to seven queries, here 10 to 12; 8 for one either
way). So a few queries at once cost hardly more than one, and that is what verifying several guesses together lives on.
It also wakes no thread of a library's own, which would wait for its next work on a processor that the model needs.
"""

from __future__ import annotations

import numpy as np

from specrag.engine.compiling import reordered
from specrag.retrieval.scoring import Floats


@reordered
def inner_products(vectors: Floats, queries: Floats, out: Floats) -> None:
    """All inner products, each summed in any order.

    Four vectors and four queries at a time: sixteen sums for eight numbers read is what keeps a core busy.

    Args:
        vectors: [vectors, dimension], finite.
        queries: [queries, dimension], finite.
        out: [vectors, queries].
    """
    rows, size = vectors.shape
    count = queries.shape[0]
    row = 0
    while row + 4 <= rows:
        place = 0
        while place + 4 <= count:
            a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = np.float32(0.0)
            c0 = c1 = c2 = c3 = d0 = d1 = d2 = d3 = np.float32(0.0)
            for i in range(size):
                q0, q1 = queries[place, i], queries[place + 1, i]
                q2, q3 = queries[place + 2, i], queries[place + 3, i]
                a, b, c, d = vectors[row, i], vectors[row + 1, i], vectors[row + 2, i], vectors[row + 3, i]
                a0 += q0 * a
                a1 += q1 * a
                a2 += q2 * a
                a3 += q3 * a
                b0 += q0 * b
                b1 += q1 * b
                b2 += q2 * b
                b3 += q3 * b
                c0 += q0 * c
                c1 += q1 * c
                c2 += q2 * c
                c3 += q3 * c
                d0 += q0 * d
                d1 += q1 * d
                d2 += q2 * d
                d3 += q3 * d
            out[row, place], out[row, place + 1], out[row, place + 2], out[row, place + 3] = a0, a1, a2, a3
            out[row + 1, place], out[row + 1, place + 1] = b0, b1
            out[row + 1, place + 2], out[row + 1, place + 3] = b2, b3
            out[row + 2, place], out[row + 2, place + 1] = c0, c1
            out[row + 2, place + 2], out[row + 2, place + 3] = c2, c3
            out[row + 3, place], out[row + 3, place + 1] = d0, d1
            out[row + 3, place + 2], out[row + 3, place + 3] = d2, d3
            place += 4
        while place + 2 <= count:
            a0 = a1 = b0 = b1 = c0 = c1 = d0 = d1 = np.float32(0.0)
            for i in range(size):
                q0, q1 = queries[place, i], queries[place + 1, i]
                a, b, c, d = vectors[row, i], vectors[row + 1, i], vectors[row + 2, i], vectors[row + 3, i]
                a0 += q0 * a
                a1 += q1 * a
                b0 += q0 * b
                b1 += q1 * b
                c0 += q0 * c
                c1 += q1 * c
                d0 += q0 * d
                d1 += q1 * d
            out[row, place], out[row, place + 1] = a0, a1
            out[row + 1, place], out[row + 1, place + 1] = b0, b1
            out[row + 2, place], out[row + 2, place + 1] = c0, c1
            out[row + 3, place], out[row + 3, place + 1] = d0, d1
            place += 2
        if place < count:
            a0 = b0 = c0 = d0 = np.float32(0.0)
            for i in range(size):
                q0 = queries[place, i]
                a0 += q0 * vectors[row, i]
                b0 += q0 * vectors[row + 1, i]
                c0 += q0 * vectors[row + 2, i]
                d0 += q0 * vectors[row + 3, i]
            out[row, place], out[row + 1, place], out[row + 2, place], out[row + 3, place] = a0, b0, c0, d0
        row += 4
    while row < rows:
        for place in range(count):
            a0 = np.float32(0.0)
            for i in range(size):
                a0 += queries[place, i] * vectors[row, i]
            out[row, place] = a0
        row += 1
