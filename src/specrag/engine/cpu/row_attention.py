"""Attention loops for few rows of many sessions.

torch's products need a call for each session and layer, and copy keys that are not side by side; with many sessions
the calls then cost more than the arithmetic. These loops serve all sessions of a pass in one call a layer, read keys
and values where they lie, and compute in float32. Where there is enough to do, torch's threads share it
(``threads.py``). Numbers are bfloat16, handed over as the addresses of their 16 bits (``bfloat16.py``); keys and values
may be in 8 bits (``engine/kv.py``).

:func:`attend` is the faster. :func:`attend_paths` gives a row bits that depend on what the row sees and on nothing
else: every row's sums run over the keys in the order of their positions, four at a time, the last four filled up with
zeros, and a row of a tree reads its ancestors where they will lie once they are committed. So plain decoding, a chain
and a tree give a token the same bits.
"""

from __future__ import annotations

from enum import IntEnum
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from numba import carray  # type: ignore[attr-defined]

from specrag.engine.compiling import fastmath, inlined, threaded
from specrag.engine.cpu.bfloat16 import Function, bits, exp, floats, halves, longs, narrow, octets, widen
from specrag.engine.cpu.threads import call_at
from specrag.engine.kv import SCALE_BYTES

Longs: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float32]

#: Most rows of a tree: a row tells in one number which of them it sees.
TREE_ROWS = 64

#: Keys whose products with three queries are summed side by side: as many sums as keep a core busy.
_KEYS = 4
_QUERIES = 3

_HIDDEN = np.float32(-1e30)


# -- one row of stored keys or values; head_dim and int8 are constants to numba ---------------------------------


@inlined
def load(block: Any, place: int, address: int, head_dim: int, int8: bool) -> None:
    """Read the stored row at ``address`` into ``block[place]``."""
    if int8:
        numbers, scale = octets(address), floats(address + head_dim)[0]
        for i in range(head_dim):
            block[place, i] = np.float32(numbers[i]) * scale
    else:
        wide = halves(address)
        for i in range(head_dim):
            block[place, i] = widen(wide[i])


@inlined
def store(address: int, source: Any, first: int, head_dim: int, int8: bool) -> None:
    """Write the bfloat16 numbers of ``source`` from ``first`` on to the row that begins at ``address``."""
    if int8:
        largest = np.float32(0.0)
        for i in range(head_dim):
            largest = max(largest, abs(widen(source[first + i])))
        scale = largest / np.float32(127.0)
        floats(address + head_dim)[0] = scale
        share = np.float32(0.0) if scale == np.float32(0.0) else np.float32(1.0) / scale
        numbers = octets(address)
        for i in range(head_dim):
            numbers[i] = np.int8(np.rint(widen(source[first + i]) * share))
    else:
        wide = halves(address)
        for i in range(head_dim):
            wide[i] = source[first + i]


# -- loops ------------------------------------------------------------------------------------------------------


@inlined
def softmax(scores: Floats) -> None:
    """Softmax of one row of scores, in place."""
    top = _HIDDEN
    for i in range(scores.shape[0]):
        top = max(top, scores[i])
    total = np.float32(0.0)
    for i in range(scores.shape[0]):
        value = exp(scores[i] - top)
        scores[i] = value
        total += value
    share = np.float32(1.0) / total
    for i in range(scores.shape[0]):
        scores[i] *= share


@cache
def write(head_dim: int, int8: bool) -> Function:
    """The loop that copies a pass's keys and values behind their sessions.

    The loop's arguments: ``keys`` and ``values``, addresses of ``[rows, kv_heads, head_dim]``, the heads side by side;
    ``row_stride``, numbers from one row of both to the next; ``kv_heads``; for each session in ``buffers`` the address
    of its layer's ``[2, kv_heads, capacity, row]``, in ``head_bytes`` the bytes from one head of it to the next, in
    ``offsets`` the row where its first one goes, in ``counts`` its rows, which lie in the pass in this order.
    """
    row_bytes = head_dim + SCALE_BYTES if int8 else 2 * head_dim

    @fastmath
    def run(
        keys: int,
        values: int,
        row_stride: int,
        kv_heads: int,
        buffers: Longs,
        head_bytes: Longs,
        offsets: Longs,
        counts: Longs,
    ) -> None:
        new_keys, new_values = halves(keys), halves(values)
        row = 0
        for session in range(buffers.shape[0]):
            stride = head_bytes[session]
            for step in range(counts[session]):
                for head in range(kv_heads):
                    source = row * row_stride + head * head_dim
                    target = buffers[session] + head * stride + (offsets[session] + step) * row_bytes
                    store(target, new_keys, source, head_dim, int8)
                    store(target + kv_heads * stride, new_values, source, head_dim, int8)
                row += 1

    return run


class LoopArguments(IntEnum):
    """The places of the arguments that every attention loop has, 64-bit whole numbers; those of arrays are addresses.

    ``QUERIES`` and ``OUT``: ``[rows, kv_heads * group, head_dim]``, each with the numbers from row to row behind it.
    ``SCORES``: room for ``[threads, SCORE_ROWS, SCORE_KEYS]``, rows times group and keys of the largest unit, or more
    where the loop says so. What is computed are units, and of each every head: ``unit * KV_HEADS + head``, shared out
    in ``PARTS`` from one of ``BORDERS`` to the next. ``NUMBER`` and ``COUNT`` are functions that tell a thread its
    number and how many there are, 0 if it is alone. Places 5 to 12 are the loop's own.
    """

    QUERIES = 0
    QUERY_STRIDE = 1
    OUT = 2
    OUT_STRIDE = 3
    KV_HEADS = 4
    SCORES = 13
    SCORE_ROWS = 14
    SCORE_KEYS = 15
    PARTS = 16
    BORDERS = 17
    NUMBER = 18
    COUNT = 19


@inlined
def workspace_of(given: Any, head_dim: int) -> Any:
    """This thread's number, the number of threads, and this thread's buffers for scores, queries and results, float32.

    Args:
        given: the loop's arguments (:class:`LoopArguments`).
    """
    rows, width = given[14], given[15]
    thread, threads = 0, 1
    if given[18]:
        thread, threads = call_at(given[18]), call_at(given[19])
    scores = carray(floats(given[13] + 4 * thread * rows * width), (rows, width))
    query = np.empty((rows, head_dim), np.float32)
    mixed = np.empty((rows, head_dim), np.float32)
    return thread, threads, scores, query, mixed


class AttendArguments(IntEnum):
    """The places of :func:`attend`'s own arguments beside :class:`LoopArguments`: addresses.

    For each session in ``STARTS`` its first row, in ``COUNTS`` its rows, in ``FIRSTS`` its first piece and in ``SEEN``
    the rows of its last piece that all its rows see; for each piece of a session's keys and values in ``BUFFERS`` the
    address of ``[2, kv_heads, capacity, row]``, in ``HEAD_BYTES`` the bytes from head to head, in ``SIZES`` the rows
    that are read; in ``MASKS`` for each row of the pass which rows of the last piece behind ``SEEN`` it sees, the
    first by the lowest bit. A unit is a session.
    """

    STARTS = 5
    COUNTS = 6
    FIRSTS = 7
    SEEN = 8
    BUFFERS = 9
    HEAD_BYTES = 10
    SIZES = 11
    MASKS = 12


@cache
def attend(head_dim: int, group: int, int8: bool) -> Any:  # noqa: C901, PLR0915 - a compiled loop is fastest in one piece
    """The attention loop for heads of this size, ``group`` query heads sharing a key: constants make it faster.

    It takes the address of its arguments (:class:`AttendArguments`).
    """
    row_bytes = head_dim + SCALE_BYTES if int8 else 2 * head_dim

    @threaded
    def run(address: int) -> None:  # noqa: C901, PLR0915 - a compiled loop is fastest in one piece
        given = longs(address)
        query_stride, out_stride, kv_heads = given[1], given[3], given[4]
        starts, counts, firsts, seen = longs(given[5]), longs(given[6]), longs(given[7]), longs(given[8])
        buffers, head_bytes, sizes, masks = (
            longs(given[9]),
            longs(given[10]),
            longs(given[11]),
            bits(given[12]),
        )
        asked, answer, borders = halves(given[0]), halves(given[2]), longs(given[17])
        thread, threads, scores, query, mixed = workspace_of(given, head_dim)
        block = np.empty((_KEYS, head_dim), np.float32)
        for part in range(thread, given[16], threads):
            for unit in range(borders[part], borders[part + 1]):
                session, head = unit // kv_heads, unit % kv_heads
                first, count = starts[session], counts[session]
                many = count * group
                for row in range(count):
                    for each in range(group):
                        place = (first + row) * query_stride + (head * group + each) * head_dim
                        for i in range(head_dim):
                            query[row * group + each, i] = widen(asked[place + i])
                            mixed[row * group + each, i] = np.float32(0.0)
                total = 0
                for piece in range(firsts[session], firsts[session + 1]):
                    keys = buffers[piece] + head * head_bytes[piece]
                    size = sizes[piece]
                    key = 0
                    while key + _KEYS <= size:
                        for each in range(_KEYS):
                            load(block, each, keys + (key + each) * row_bytes, head_dim, int8)
                        place = total + key
                        one = 0
                        while one + _QUERIES <= many:
                            a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = c0 = c1 = c2 = c3 = np.float32(0.0)
                            for i in range(head_dim):
                                x, y, z = query[one, i], query[one + 1, i], query[one + 2, i]
                                k0, k1, k2, k3 = block[0, i], block[1, i], block[2, i], block[3, i]
                                a0 += x * k0
                                a1 += x * k1
                                a2 += x * k2
                                a3 += x * k3
                                b0 += y * k0
                                b1 += y * k1
                                b2 += y * k2
                                b3 += y * k3
                                c0 += z * k0
                                c1 += z * k1
                                c2 += z * k2
                                c3 += z * k3
                            scores[one, place], scores[one, place + 1] = a0, a1
                            scores[one, place + 2], scores[one, place + 3] = a2, a3
                            scores[one + 1, place], scores[one + 1, place + 1] = b0, b1
                            scores[one + 1, place + 2], scores[one + 1, place + 3] = b2, b3
                            scores[one + 2, place], scores[one + 2, place + 1] = c0, c1
                            scores[one + 2, place + 2], scores[one + 2, place + 3] = c2, c3
                            one += _QUERIES
                        while one < many:
                            a0 = a1 = a2 = a3 = np.float32(0.0)
                            for i in range(head_dim):
                                x = query[one, i]
                                a0 += x * block[0, i]
                                a1 += x * block[1, i]
                                a2 += x * block[2, i]
                                a3 += x * block[3, i]
                            scores[one, place], scores[one, place + 1] = a0, a1
                            scores[one, place + 2], scores[one, place + 3] = a2, a3
                            one += 1
                        key += _KEYS
                    while key < size:
                        load(block, 0, keys + key * row_bytes, head_dim, int8)
                        for one in range(many):
                            a0 = np.float32(0.0)
                            for i in range(head_dim):
                                a0 += query[one, i] * block[0, i]
                            scores[one, total + key] = a0
                        key += 1
                    total += size
                # The rows of the session's tree end the last piece.
                last = firsts[session + 1] - 1
                tree = total - (sizes[last] - seen[session])
                for row in range(count):
                    sees = masks[first + row]
                    for one in range(row * group, (row + 1) * group):
                        for i in range(total - tree):
                            if not (sees >> np.uint64(i)) & np.uint64(1):
                                scores[one, tree + i] = _HIDDEN
                        softmax(scores[one, :total])
                total = 0
                for piece in range(firsts[session], firsts[session + 1]):
                    values = buffers[piece] + (kv_heads + head) * head_bytes[piece]
                    size = sizes[piece]
                    key = 0
                    while key + _KEYS <= size:
                        for each in range(_KEYS):
                            load(block, each, values + (key + each) * row_bytes, head_dim, int8)
                        place = total + key
                        for one in range(many):
                            a0, a1 = scores[one, place], scores[one, place + 1]
                            a2, a3 = scores[one, place + 2], scores[one, place + 3]
                            for i in range(head_dim):
                                mixed[one, i] += (a0 * block[0, i] + a1 * block[1, i]) + (
                                    a2 * block[2, i] + a3 * block[3, i]
                                )
                        key += _KEYS
                    while key < size:
                        load(block, 0, values + key * row_bytes, head_dim, int8)
                        for one in range(many):
                            a0 = scores[one, total + key]
                            for i in range(head_dim):
                                mixed[one, i] += a0 * block[0, i]
                        key += 1
                    total += size
                for row in range(count):
                    for each in range(group):
                        place = (first + row) * out_stride + (head * group + each) * head_dim
                        for i in range(head_dim):
                            answer[place + i] = narrow(mixed[row * group + each, i])

    return run


#: Rows of a chain that read a block of keys together.
CHAIN_ROWS = 16

#: Keys that are read at once; the room behind the last key's score that filling up needs is one less.
BLOCK_KEYS = 4


class PathArguments(IntEnum):
    """The places of :func:`attend_paths`'s own arguments beside :class:`LoopArguments`.

    A unit is some rows of a chain, or one row of a tree. ``WINDOW``: how many positions a row sees, itself included.
    For each unit the arrays hold, in ``FIRSTS`` its first row in the pass, in ``COUNTS`` its rows, in ``BUFFERS`` the
    address of its session's ``[2, kv_heads, capacity, row]``, in ``HEAD_BYTES`` the bytes from head to head, in
    ``SEEN`` how many of the buffer's first rows its first row sees, each later row one more; from
    ``PATH_BORDERS[unit]`` to ``PATH_BORDERS[unit + 1]`` in ``PATH`` the places of what a tree's row sees behind them.
    The room for scores is ``BLOCK_KEYS - 1`` keys more than the largest unit has.
    """

    WINDOW = 5
    FIRSTS = 6
    COUNTS = 7
    BUFFERS = 8
    HEAD_BYTES = 9
    SEEN = 10
    PATH_BORDERS = 11
    PATH = 12


@cache
def attend_paths(head_dim: int, group: int, int8: bool) -> Any:  # noqa: C901 - a compiled loop is fastest in one piece
    """The batch-invariant attention loop for heads of this size, ``group`` query heads sharing a key.

    It takes the address of its arguments (:class:`PathArguments`).
    """
    row_bytes = head_dim + SCALE_BYTES if int8 else 2 * head_dim

    @threaded
    def run(address: int) -> None:  # noqa: C901 - a compiled loop is fastest in one piece
        given = longs(address)
        query_stride, out_stride, kv_heads, window = given[1], given[3], given[4], given[5]
        firsts, counts, buffers, head_bytes = (
            longs(given[6]),
            longs(given[7]),
            longs(given[8]),
            longs(given[9]),
        )
        seen, borders, path, parts = longs(given[10]), longs(given[11]), longs(given[12]), longs(given[17])
        asked, answer = halves(given[0]), halves(given[2])
        thread, threads, scores, query, mixed = workspace_of(given, head_dim)
        block = np.empty((BLOCK_KEYS, head_dim), np.float32)
        for share in range(thread, given[16], threads):
            for item in range(parts[share], parts[share + 1]):
                unit, head = item // kv_heads, item % kv_heads
                before, border, count = seen[unit], borders[unit], counts[unit]
                steps = borders[unit + 1] - border
                least = before + steps
                most = least + count - 1
                many = count * group
                for one in range(many):
                    place = (firsts[unit] + one // group) * query_stride
                    place += (head * group + one % group) * head_dim
                    for i in range(head_dim):
                        query[one, i] = widen(asked[place + i])
                        mixed[one, i] = np.float32(0.0)
                for part in range(2):
                    stored = buffers[unit] + (part * kv_heads + head) * head_bytes[unit]
                    for key in range(0, most, BLOCK_KEYS):
                        for each in range(BLOCK_KEYS):
                            place = key + each
                            if place >= most:
                                for i in range(head_dim):
                                    block[each, i] = np.float32(0.0)
                                continue
                            if steps > 0 and place >= before:
                                place = path[border + place - before]
                            load(block, each, stored + place * row_bytes, head_dim, int8)
                        for one in range(many):
                            if part == 0:
                                a0 = a1 = a2 = a3 = np.float32(0.0)
                                for i in range(head_dim):
                                    x = query[one, i]
                                    a0 += x * block[0, i]
                                    a1 += x * block[1, i]
                                    a2 += x * block[2, i]
                                    a3 += x * block[3, i]
                                scores[one, key], scores[one, key + 1] = a0, a1
                                scores[one, key + 2], scores[one, key + 3] = a2, a3
                            else:
                                a0, a1 = scores[one, key], scores[one, key + 1]
                                a2, a3 = scores[one, key + 2], scores[one, key + 3]
                                for i in range(head_dim):
                                    mixed[one, i] += (a0 * block[0, i] + a1 * block[1, i]) + (
                                        a2 * block[2, i] + a3 * block[3, i]
                                    )
                    if part == 0:
                        for one in range(many):
                            total = least + one // group
                            lowest = max(total - window, 0)
                            softmax(scores[one, lowest:total])
                            for key in range(lowest):
                                scores[one, key] = np.float32(0.0)
                            for key in range(total, most + BLOCK_KEYS - 1):
                                scores[one, key] = np.float32(0.0)
                for one in range(many):
                    place = (firsts[unit] + one // group) * out_stride
                    place += (head * group + one % group) * head_dim
                    for i in range(head_dim):
                        answer[place + i] = narrow(mixed[one, i])

    return run
