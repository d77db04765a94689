"""The score of a (query, passage) pair: one kernel, whatever index found the passage.

Search libraries pick their arithmetic by the size of the batch, so that the same pair gets other last bits in
a batch than alone. Here every published score comes from one of three functions of the pair alone:

- :func:`dense_score`: the inner product, summed in float64 in a fixed order over eight lanes;
- :func:`sparse_score`: the sum of the BM25 weights of the query's terms, in the order of their texts;
- :func:`hybrid_score`: a weighted sum of the two scores above.

They are compiled without fast-math, so that IEEE 754 fixes each bit: neither vectorisation nor the number of
pairs can change it. An index finds candidates by faster arithmetic whose error is bounded, and ranks
them with these functions: the ``rank_*`` loops. All of them release the interpreter lock.

The loops stand in this file because a compiled function is kept on disk until *its own file* changes, with
the kernel compiled into it.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from specrag.engine import compiled, fastmath

Floats: TypeAlias = npt.NDArray[np.float32]
Doubles: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int32]
Longs: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]

# Passages whose sparse sums are held at a time: 128 KiB of float64, which stays in the second-level cache.
SPARSE_BLOCK = 16384


@compiled
def dense_score(query: Floats, passage: Floats) -> np.float32:
    """Inner product of two float32 vectors of one length.

    Products are exact in float64. Lane ``j`` sums the elements ``i`` with ``i % 8 == j`` up to the last
    whole eight, lane 0 also those behind it, in ascending order; then ``((0 + 4) + (2 + 6)) + ((1 + 5) +
    (3 + 7))``; then one rounding to float32.
    """
    whole = query.shape[0] - query.shape[0] % 8
    lane0 = lane1 = lane2 = lane3 = lane4 = lane5 = lane6 = lane7 = 0.0
    for i in range(0, whole, 8):
        lane0 += np.float64(query[i]) * np.float64(passage[i])
        lane1 += np.float64(query[i + 1]) * np.float64(passage[i + 1])
        lane2 += np.float64(query[i + 2]) * np.float64(passage[i + 2])
        lane3 += np.float64(query[i + 3]) * np.float64(passage[i + 3])
        lane4 += np.float64(query[i + 4]) * np.float64(passage[i + 4])
        lane5 += np.float64(query[i + 5]) * np.float64(passage[i + 5])
        lane6 += np.float64(query[i + 6]) * np.float64(passage[i + 6])
        lane7 += np.float64(query[i + 7]) * np.float64(passage[i + 7])
    for i in range(whole, query.shape[0]):
        lane0 += np.float64(query[i]) * np.float64(passage[i])
    return np.float32(((lane0 + lane4) + (lane2 + lane6)) + ((lane1 + lane5) + (lane3 + lane7)))


@compiled
def sparse_score(terms: Ints, starts: Longs, postings: Ints, weights: Floats, row: int) -> np.float32:
    """Sum of the weights that one passage has for the query's terms; 0 if it has none of them.

    Summed in float64 in the order of ``terms`` (that of their texts; a term that the query repeats counts each time),
    rounded once to float32.

    Args:
        terms: int32 [terms of the query].
        starts, postings, weights: the rows with a weight for term ``t`` are
            ``postings[starts[t] : starts[t + 1]]``, ascending; their weights stand at the same places.
        row: the passage's.
    """
    total = 0.0
    for term in terms:
        low, high = starts[term], starts[term + 1]
        while low < high:
            middle = (low + high) // 2
            if postings[middle] < row:
                low = middle + 1
            else:
                high = middle
        if low < starts[term + 1] and postings[low] == row:
            total += np.float64(weights[low])
    return np.float32(total)


@compiled
def hybrid_score(dense: np.float32, sparse: np.float32, bound: float, weight: float) -> np.float32:
    """``weight * dense + (1 - weight) * sparse / bound``, computed in float64 and rounded once.

    ``bound`` is the sum over the query's terms of the largest weight that any passage has for the term
    (:func:`sparse_bound`): no passage can score more, so that the sparse part lies between 0 and 1. It is a
    constant of the query and the corpus, so that the score remains a function of the pair. With a bound of 0
    (no known term) the sparse part is 0.
    """
    part = np.float64(sparse) / bound if bound > 0.0 else 0.0
    return np.float32(weight * np.float64(dense) + (1.0 - weight) * part)


@compiled
def sparse_bound(terms: Ints, largest: Floats) -> float:
    """Sum of ``largest[term]`` over the query's terms, in their order, in float64."""
    total = 0.0
    for term in terms:
        total += np.float64(largest[term])
    return total


@compiled
def dense_scores(query: Floats, vectors: Floats, rows: Longs, out: Floats) -> None:
    """:func:`dense_score` of one query with these ``rows`` of ``vectors``, into ``out``."""
    for i in range(rows.shape[0]):
        out[i] = dense_score(query, vectors[rows[i]])


@compiled
def sparse_scores(
    terms: Ints, starts: Longs, postings: Ints, weights: Floats, rows: Longs, out: Floats
) -> None:
    """:func:`sparse_score` of one query with the passages of ``rows``, into ``out``."""
    for i in range(rows.shape[0]):
        out[i] = sparse_score(terms, starts, postings, weights, rows[i])


@compiled
def hybrid_scores(dense: Floats, sparse: Floats, bound: float, weight: float, out: Floats) -> None:
    """:func:`hybrid_score` for each place of two lists of scores of one query, into ``out``."""
    for i in range(out.shape[0]):
        out[i] = hybrid_score(dense[i], sparse[i], bound, weight)


@compiled
def _worse(score: np.float32, passage: int, other_score: np.float32, other: int) -> bool:
    """Whether the first of two entries ranks behind the second: by score, ties by id."""
    return bool(score < other_score or (score == other_score and passage > other))


@compiled
def _offer(scores: Floats, ids: Longs, size: int, score: np.float32, passage: int) -> int:
    """Put an entry into a heap of the best ``len(scores)``, the worst on top; the heap's new size."""
    if size < scores.shape[0]:
        place = size
        while place > 0:
            parent = (place - 1) // 2
            if not _worse(score, passage, scores[parent], ids[parent]):
                break
            scores[place], ids[place] = scores[parent], ids[parent]
            place = parent
        scores[place], ids[place] = score, passage
        return size + 1
    if not _worse(scores[0], ids[0], score, passage):
        return size
    place = 0
    while 2 * place + 1 < size:
        child = 2 * place + 1
        if child + 1 < size and _worse(scores[child + 1], ids[child + 1], scores[child], ids[child]):
            child += 1
        if not _worse(scores[child], ids[child], score, passage):
            break
        scores[place], ids[place] = scores[child], ids[child]
        place = child
    scores[place], ids[place] = score, passage
    return size


@compiled
def _threshold(scores: Floats, size: int, slack: float) -> float:
    """An approximate score below this cannot belong to an entry that enters the heap."""
    if size < scores.shape[0]:
        return -np.inf
    return np.float64(scores[0]) - slack


@compiled
def rank_dense(
    queries: Floats,
    vectors: Floats,
    ids: Longs,
    approximate: Floats,
    slack: Doubles,
    best_scores: Floats,
    best_ids: Longs,
    sizes: Longs,
) -> None:
    """Offer a block of passages to the heaps of a group of queries.

    A passage is scored by the kernel only if its approximate score, which errs by at most ``slack``, says
    that it might be among the best so far. The best only get better, so none is missed.

    Args:
        queries: [queries, dimension].
        vectors: of the block, [block, dimension].
        ids: of the block's passages, int64 [block].
        approximate: [block, queries]; not a number for what may not be returned.
        slack: float64 [queries].
        best_scores, best_ids: the heaps, [queries, k], changed in place.
        sizes: entries in each heap, int64 [queries], changed in place.
    """
    count = queries.shape[0]
    thresholds = np.empty(count)
    for query in range(count):
        thresholds[query] = _threshold(best_scores[query], sizes[query], slack[query])
    for row in range(ids.shape[0]):
        for query in range(count):
            if approximate[row, query] >= thresholds[query]:
                score = dense_score(queries[query], vectors[row])
                sizes[query] = _offer(best_scores[query], best_ids[query], sizes[query], score, ids[row])
                thresholds[query] = _threshold(best_scores[query], sizes[query], slack[query])


@compiled
def _add_postings(
    terms: Ints,
    cursors: Longs,
    starts: Longs,
    postings: Ints,
    weights: Floats,
    first: int,
    end: int,
    totals: Doubles,
) -> None:
    """Sum the weights of the passages ``first`` to ``end - 1`` into ``totals``, in the kernel's order.

    ``cursors``, one a term, stand at the first posting not yet summed and move on.
    """
    for i in range(terms.shape[0]):
        cursor, stop = cursors[i], starts[terms[i] + 1]
        while cursor < stop and postings[cursor] < first:
            cursor += 1
        while cursor < stop and postings[cursor] < end:
            totals[postings[cursor] - first] += np.float64(weights[cursor])
            cursor += 1
        cursors[i] = cursor


@compiled
def rank_sparse(  # noqa: PLR0913 - a compiled loop takes arrays, no objects
    terms: Ints,
    starts: Longs,
    postings: Ints,
    weights: Floats,
    passages: int,
    allowed: Bools,
    ids: Longs,
    best_scores: Floats,
    best_ids: Longs,
) -> int:
    """Rank all passages that have one of the query's terms; returns the heap's size.

    The sums equal :func:`sparse_score` to the bit: the same summands in the same order.

    Args:
        terms, starts, postings, weights: as in :func:`sparse_score`.
        passages: the number of rows.
        allowed: bool [rows], or empty: all are.
        ids: the passage of each row, int64 [rows], or empty: its number.
        best_scores, best_ids: an empty heap, [k], filled in place.
    """
    totals = np.zeros(min(passages, SPARSE_BLOCK))
    cursors = starts[terms].copy()
    size = 0
    for first in range(0, passages, SPARSE_BLOCK):
        end = min(first + SPARSE_BLOCK, passages)
        totals[:] = 0.0
        _add_postings(terms, cursors, starts, postings, weights, first, end, totals)
        for row in range(end - first):
            if totals[row] > 0.0 and (allowed.shape[0] == 0 or allowed[first + row]):
                score = np.float32(totals[row])
                if size < best_scores.shape[0] or score >= best_scores[0]:
                    passage = ids[first + row] if ids.shape[0] else first + row
                    size = _offer(best_scores, best_ids, size, score, passage)
    return size


@compiled
def rank_hybrid(  # noqa: PLR0913 - a compiled loop takes arrays, no objects
    queries: Floats,
    vectors: Floats,
    ids: Longs,
    approximate: Floats,
    slack: Doubles,
    best_scores: Floats,
    best_ids: Longs,
    sizes: Longs,
    terms: Ints,
    offsets: Longs,
    cursors: Longs,
    starts: Longs,
    postings: Ints,
    weights: Floats,
    rows: Longs,
    first: int,
    end: int,
    bounds: Doubles,
    weight: float,
) -> None:
    """:func:`rank_dense` for the hybrid score; the sparse part is summed on the way.

    Args:
        queries, vectors, ids, approximate, slack, best_scores, best_ids, sizes: as in :func:`rank_dense`;
            ``slack`` is :func:`hybrid_slack`.
        terms: of all queries, one after the other; those of query ``i`` are
            ``terms[offsets[i] : offsets[i + 1]]``.
        cursors: int64 [terms], the first postings not yet summed, changed in place.
        starts, postings, weights: as in :func:`sparse_score`.
        rows: of the block, ascending, int64 [block]: by these the postings name passages.
        first, end: the block lies in this range of rows.
        bounds: :func:`sparse_bound` of each query, float64 [queries].
        weight: of the dense part.
    """
    totals = np.empty(end - first)
    for query in range(queries.shape[0]):
        totals[:] = 0.0
        own = slice(offsets[query], offsets[query + 1])
        _add_postings(terms[own], cursors[own], starts, postings, weights, first, end, totals)
        bound = bounds[query]
        share = (1.0 - weight) / bound if bound > 0.0 else 0.0
        threshold = _threshold(best_scores[query], sizes[query], slack[query])
        for row in range(ids.shape[0]):
            sparse = np.float32(totals[rows[row] - first])
            if weight * approximate[row, query] + share * sparse >= threshold:
                dense = dense_score(queries[query], vectors[row])
                score = hybrid_score(dense, sparse, bound, weight)
                sizes[query] = _offer(best_scores[query], best_ids[query], sizes[query], score, ids[row])
                threshold = _threshold(best_scores[query], sizes[query], slack[query])


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


def _has_few_registers() -> bool:
    """Whether vectors have sixteen registers, as in x86 without AVX-512, and not thirty-two."""
    from llvmlite.binding import get_host_cpu_features  # type: ignore[import-untyped]

    features = get_host_cpu_features()
    return bool(features.get("avx2")) and not features.get("avx512f")


# Sixteen sums with what they read would then be stored and read again: four by two take a fifth less time.
_PAIRS_ONLY = _has_few_registers()


@fastmath
def inner_products(vectors: Floats, queries: Floats, out: Floats) -> None:  # noqa: C901, PLR0915 - an unrolled loop
    """All inner products, each summed in any order.

    Four vectors and four queries at a time: sixteen sums for eight numbers read is what keeps a core busy. Two queries
    where there are no registers for so many sums.

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
        while not _PAIRS_ONLY and place + 4 <= count:
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
