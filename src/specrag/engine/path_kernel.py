"""Attention whose bits, for a row, depend on what the row sees and on nothing else: a compiled loop on the CPU.

Every row's sums run over the keys in the order of their positions, four at a time, the last four filled up with zeros.
A row of a tree reads its ancestors where they will lie once they are committed. So plain decoding, a chain and a tree
give a token the same bits. Numbers are bfloat16, handed over as addresses (``bfloat16.py``); keys and values may be in
8 bits.
"""

from __future__ import annotations

from enum import IntEnum
from functools import cache
from typing import Any

import numpy as np

from specrag.engine.attention_kernel import own_room, softmax
from specrag.engine.bfloat16 import halves, longs, narrow, widen
from specrag.engine.compiling import shared_out
from specrag.engine.kv_numbers import SCALE_BYTES
from specrag.engine.row_kernel import load

#: Rows of a chain that read a block of keys together.
CHAIN_ROWS = 16

#: Keys that are read at once; the room behind the last key's score that filling up needs is one less.
BLOCK_KEYS = 4


class PathArguments(IntEnum):
    """The places of the loop's own arguments (:class:`~specrag.engine.shared_loop.Shared`).

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
def attend_paths(head_dim: int, group: int, int8: bool) -> Any:
    """The loop for heads of this size, ``group`` query heads sharing a key.

    It takes the address of its arguments (:class:`PathArguments`).
    """
    row_bytes = head_dim + SCALE_BYTES if int8 else 2 * head_dim

    @shared_out
    def run(address: int) -> None:
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
        thread, threads, scores, query, mixed = own_room(given, head_dim)
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
