"""Attention of few rows over many sessions, as compiled loops on the CPU.

torch's products need a call for each session and layer, and copy keys that are not side by side; with many sessions
the calls then cost more than the arithmetic. These loops serve all sessions of a pass in one call a layer, read keys
and values where they lie, and compute in float32. They run on one core, since waking another takes as long as the work.

Numbers are bfloat16, handed over as the addresses of their 16 bits (``bfloat16.py``); keys and values may be in 8 bits.
"""

from __future__ import annotations

from functools import cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from specrag.engine.bfloat16 import Function, exp, halves, narrow, widen
from specrag.engine.compiling import inlined, reordered
from specrag.engine.kv_numbers import SCALE_BYTES
from specrag.engine.row_kernel import load, store

Longs: TypeAlias = npt.NDArray[np.int64]
Masks: TypeAlias = npt.NDArray[np.uint64]
Floats: TypeAlias = npt.NDArray[np.float32]

#: Most rows of a tree: a row tells in one number which of them it sees.
TREE_ROWS = 64

#: Keys whose products with three queries are summed side by side: as many sums as keep a core busy.
_KEYS = 4
_QUERIES = 3

_HIDDEN = np.float32(-1e30)


@inlined
def softmax(scores: Floats) -> None:
    """In place."""
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

    @reordered
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


@cache
def attend(head_dim: int, group: int, int8: bool) -> Function:
    """The attention loop for heads of this size, ``group`` query heads sharing a key: constants make it faster.

    The loop's arguments: ``queries`` and ``out``, addresses of ``[rows, kv_heads * group, head_dim]`` with their
    numbers from row to row; ``kv_heads``; for each session in ``starts`` its first row, in ``counts`` its rows, in
    ``firsts`` its first piece and in ``seen`` the rows of its last piece that all its rows see; for each piece of
    a session's keys and values in ``buffers`` the address of ``[2, kv_heads, capacity, row]``, in
    ``head_bytes`` the bytes from head to head, in ``sizes`` the rows that are read; in ``masks`` for each row of
    the pass which rows of the last piece behind ``seen`` it sees, the first by the lowest bit; ``scores``, room for
    ``[rows * group, keys]`` of the largest session.
    """
    row_bytes = head_dim + SCALE_BYTES if int8 else 2 * head_dim

    @reordered
    def run(
        queries: int,
        query_stride: int,
        out: int,
        out_stride: int,
        kv_heads: int,
        starts: Longs,
        counts: Longs,
        firsts: Longs,
        seen: Longs,
        buffers: Longs,
        head_bytes: Longs,
        sizes: Longs,
        masks: Masks,
        scores: Floats,
    ) -> None:
        asked, answer = halves(queries), halves(out)
        query = np.empty((scores.shape[0], head_dim), np.float32)
        mixed = np.empty((scores.shape[0], head_dim), np.float32)
        block = np.empty((_KEYS, head_dim), np.float32)
        for session in range(starts.shape[0]):
            first, count = starts[session], counts[session]
            many = count * group
            for head in range(kv_heads):
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
