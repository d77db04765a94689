"""Squared distances between a query and the keys of a kNN-LM datastore: one kernel, and the scan of all keys.

The distance that counts is :func:`squared_distance`, a function of the pair alone, as for passages (``scoring.py``).
The scan finds the keys worth measuring: a dot product in float32, in whatever order is fastest, errs by a known amount,
and the kernel measures only keys that still have a chance. A group of queries reads the keys once.

Keys are half-precision floats, passed as their 16 bits, since the compiler's own type for them does not compute on a
CPU. The loops are in this file for the reason that ``scoring.py`` gives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from specrag.engine import compiled
from specrag.retrieval.index import UNIT_ROUNDOFF, Doubles, Floats, Longs, inner_products

#: Half-precision numbers as their bits.
Halves: TypeAlias = npt.NDArray[np.uint16]

#: Queries that share a reading of the keys.
GROUP = 16


def _widening(_context: Any, half: Any) -> Any:  # noqa: ARG001 - numba checks the name
    """The float32 of these half-precision bits: one instruction on every processor that has it."""
    signature = types.float32(types.uint16)

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return signature, generate


_widen = cast("Callable[[np.uint16], np.float32]", intrinsic(_widening))


@compiled
def squared_distance(query: Floats, key: Floats) -> np.float32:
    """Squared Euclidean distance of two float32 vectors of the same length.

    Differences and squares are taken in float64. Lane ``j`` sums the elements ``i`` with ``i % 8 == j`` up to the last
    complete group of eight, lane 0 also the remaining ones, in ascending order; then
    ``((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7))``; then one rounding to float32.
    """
    whole = query.shape[0] - query.shape[0] % 8
    lane0 = lane1 = lane2 = lane3 = lane4 = lane5 = lane6 = lane7 = 0.0
    for i in range(0, whole, 8):
        lane0 += (np.float64(query[i]) - np.float64(key[i])) ** 2
        lane1 += (np.float64(query[i + 1]) - np.float64(key[i + 1])) ** 2
        lane2 += (np.float64(query[i + 2]) - np.float64(key[i + 2])) ** 2
        lane3 += (np.float64(query[i + 3]) - np.float64(key[i + 3])) ** 2
        lane4 += (np.float64(query[i + 4]) - np.float64(key[i + 4])) ** 2
        lane5 += (np.float64(query[i + 5]) - np.float64(key[i + 5])) ** 2
        lane6 += (np.float64(query[i + 6]) - np.float64(key[i + 6])) ** 2
        lane7 += (np.float64(query[i + 7]) - np.float64(key[i + 7])) ** 2
    for i in range(whole, query.shape[0]):
        lane0 += (np.float64(query[i]) - np.float64(key[i])) ** 2
    return np.float32(((lane0 + lane4) + (lane2 + lane6)) + ((lane1 + lane5) + (lane3 + lane7)))


@compiled
def widen(halves: Halves, out: Floats) -> None:
    """Half-precision bits to float32, both of one length."""
    for i in range(halves.shape[0]):
        out[i] = _widen(halves[i])


@compiled
def distances(query: Floats, keys: Halves, ids: Longs, out: Floats) -> None:
    """:func:`squared_distance` of a query to the keys ``ids``, rows of ``keys``, into ``out``."""
    key = np.empty(keys.shape[1], dtype=np.float32)
    for i in range(ids.shape[0]):
        widen(keys[ids[i]], key)
        out[i] = squared_distance(query, key)


@compiled
def squared_norms(keys: Halves, out: Floats) -> None:
    """Squared length of each key, float32 [keys], rounded once."""
    key = np.empty(keys.shape[1], dtype=np.float32)
    for row in range(keys.shape[0]):
        widen(keys[row], key)
        total = 0.0
        for i in range(key.shape[0]):
            total += np.float64(key[i]) ** 2
        out[row] = np.float32(total)


@compiled
def _farther(distance: np.float32, entry: int, other_distance: np.float32, other: int) -> bool:
    """Whether the first of two entries ranks after the second: by distance, ties by id."""
    return bool(distance > other_distance or (distance == other_distance and entry > other))


@compiled
def _offer(found: Floats, ids: Longs, size: int, distance: np.float32, entry: int) -> int:
    """Put an entry into a heap of the nearest ``len(found)``, the farthest on top; the heap's new size."""
    if size < found.shape[0]:
        place = size
        while place > 0:
            parent = (place - 1) // 2
            if not _farther(distance, entry, found[parent], ids[parent]):
                break
            found[place], ids[place] = found[parent], ids[parent]
            place = parent
        found[place], ids[place] = distance, entry
        return size + 1
    if not _farther(found[0], ids[0], distance, entry):
        return size
    place = 0
    while 2 * place + 1 < size:
        child = 2 * place + 1
        if child + 1 < size and _farther(found[child + 1], ids[child + 1], found[child], ids[child]):
            child += 1
        if not _farther(found[child], ids[child], distance, entry):
            break
        found[place], ids[place] = found[child], ids[child]
        place = child
    found[place], ids[place] = distance, entry
    return size


@compiled
def scan(  # noqa: PLR0913 - a compiled loop takes arrays, no objects
    queries: Floats,
    keys: Halves,
    norms: Floats,
    ids: Longs,
    first: int,
    end: int,
    slack: Doubles,
    found: Floats,
    found_ids: Longs,
    sizes: Longs,
) -> None:
    """Offer the keys ``first`` to ``end - 1`` to the heaps of a group of queries.

    Args:
        queries: [queries, dimension].
        keys: [entries, dimension].
        norms: squared lengths of the keys.
        ids: of the keys, int64 [entries]; empty if they are numbered by position.
        slack: how far a distance from float32 products can lie from the kernel's (:func:`distance_slack`).
        found, found_ids: the heaps, [queries, k], changed in place.
        sizes: entries in each heap, int64 [queries], changed in place.
    """
    count, size = queries.shape
    block = np.zeros((4, size), dtype=np.float32)
    products = np.empty((4, count), dtype=np.float32)
    own = np.empty(count)  # squared length of each query
    limits = np.full(count, np.inf)  # upper limit of |x|^2 - 2 <q, x> for a key that might enter the heap
    for query in range(count):
        own[query] = 0.0
        for i in range(size):
            own[query] += np.float64(queries[query, i]) ** 2
        if sizes[query] == found.shape[1]:
            limits[query] = np.float64(found[query, 0]) + slack[query] - own[query]
    for start in range(first, end, 4):
        rows = min(4, end - start)
        for place in range(rows):
            widen(keys[start + place], block[place])
        inner_products(block, queries, products)
        for place in range(rows):
            row = start + place
            norm = np.float64(norms[row])
            for query in range(count):
                if norm - 2.0 * np.float64(products[place, query]) <= limits[query]:
                    distance = squared_distance(queries[query], block[place])
                    entry = ids[row] if ids.shape[0] else row
                    sizes[query] = _offer(found[query], found_ids[query], sizes[query], distance, entry)
                    if sizes[query] == found.shape[1]:
                        limits[query] = np.float64(found[query, 0]) + slack[query] - own[query]


def distance_slack(query_norms: Doubles, largest_norm: float, dimension: int) -> Doubles:
    """How far ``|x|^2 - 2 <q, x> + |q|^2``, with its product summed in float32 in any order, can lie from the kernel.

    The product errs by at most ``g(n) |q| |x|`` (see :func:`~specrag.retrieval.index.scoring.dense_slack`) and counts
    twice; the key's squared length is rounded once; the kernel rounds a distance of at most ``(|q| + |x|)^2`` once,
    and the loss in float64 is far smaller. Underflow of products is covered by the last summand.

    Args:
        query_norms: Euclidean lengths of the queries, float64 [queries].
        largest_norm: of the keys.
        dimension: n.
    """
    roundings = (dimension + 2) * UNIT_ROUNDOFF
    relative = 1.000001 * roundings / (1.0 - roundings)
    lengths = query_norms + largest_norm
    return 2.0 * relative * query_norms * largest_norm + 3.0 * UNIT_ROUNDOFF * lengths**2 + 1e-30
