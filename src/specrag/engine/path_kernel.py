"""Attention whose bits, for a row, depend on what the row sees and on nothing else: a compiled loop on the CPU.

Every row's sums run over the keys in the order of their positions, four at a time, the last four filled up with zeros.
A row of a tree reads its ancestors where they will lie once they are committed. So plain decoding, a chain and a tree
give a token the same bits. Numbers are bfloat16, handed over as addresses (``bfloat16.py``); keys and values may be in
8 bits.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from specrag.engine.attention_kernel import Floats, Longs, softmax
from specrag.engine.bfloat16 import Function, halves, narrow, widen
from specrag.engine.compiling import reordered
from specrag.engine.kv_numbers import SCALE_BYTES
from specrag.engine.row_kernel import load

#: Rows of a chain that read a block of keys together.
CHAIN_ROWS = 16

#: Keys that are read at once; the room behind the last key's score that filling up needs is one less.
BLOCK_KEYS = 4


@cache
def attend_paths(head_dim: int, group: int, int8: bool) -> Function:
    """The loop for heads of this size, ``group`` query heads sharing a key.

    It computes units: some rows of a chain, or one row of a tree. Its arguments: ``queries`` and ``out``, addresses of
    ``[rows, kv_heads * group, head_dim]`` with their numbers from row to row; ``kv_heads``; ``window``, how many
    positions a row sees, itself included; for each unit, in ``firsts`` its first row in the pass, in ``counts`` its
    rows, in ``buffers`` the address of its session's ``[2, kv_heads, capacity, row]``, in ``head_bytes`` the
    bytes from head to head, in ``seen`` how many of the buffer's first rows its first row sees, each later row one
    more; from ``borders[unit]`` to ``borders[unit + 1]`` in ``path`` the places of what a tree's row sees behind them;
    ``scores``: room for ``[rows * group, keys + BLOCK_KEYS - 1]`` of the largest unit.
    """
    row_bytes = head_dim + SCALE_BYTES if int8 else 2 * head_dim

    @reordered
    def run(
        queries: int,
        query_stride: int,
        out: int,
        out_stride: int,
        kv_heads: int,
        window: int,
        firsts: Longs,
        counts: Longs,
        buffers: Longs,
        head_bytes: Longs,
        seen: Longs,
        borders: Longs,
        path: Longs,
        scores: Floats,
    ) -> None:
        asked, answer = halves(queries), halves(out)
        query = np.empty((scores.shape[0], head_dim), np.float32)
        mixed = np.empty((scores.shape[0], head_dim), np.float32)
        block = np.empty((BLOCK_KEYS, head_dim), np.float32)
        for unit in range(firsts.shape[0]):
            before, border, count = seen[unit], borders[unit], counts[unit]
            steps = borders[unit + 1] - border
            least = before + steps
            most = least + count - 1
            many = count * group
            for head in range(kv_heads):
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
