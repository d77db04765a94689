"""Attention loops for many rows with matrix tiles (Intel AMX).

Keys and values are first brought into the order in which tiles read them (``pack``). Then every unit, 32 rows of one
head, reads them in stretches: scores in float32, their exponentials in bfloat16, and sums that are scaled down when a
larger score comes (Dao et al. 2022, FlashAttention, algorithm 1). A row's bits do not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from specrag.engine.compiling import threaded
from specrag.engine.cpu import avx512
from specrag.engine.cpu.amx import (
    BLOCK,
    BLOCK_BYTES,
    TILE,
    TILE_BYTES,
    add,
    call,
    clear,
    configure,
    load,
    release,
    store,
)
from specrag.engine.cpu.bfloat16 import Function, exp, floats, halves, longs
from specrag.engine.cpu.threads import call_at

# -- the softmax between the two products, one row of blocks at a time ------------------------------------------

_INT32, _INT64 = ir.IntType(32), ir.IntType(64)
#: Less than any score.
HIDDEN = -1e30
#: From block to block of scores, and of exponentials in bfloat16: a cache line or two more than a block has, else the
#: blocks' rows of the same number would push each other out of the cache.
SCORE_BYTES, WEIGHT_BYTES = BLOCK_BYTES + 128, BLOCK_BYTES // 2 + 64
_PLACES = ir.Constant(avx512.WORDS, list(range(TILE)))


def _each_half(
    builder: Any, scores: Any, blocks: Any, seen: Any, use: Callable[[Any, Any, int], None]
) -> None:
    """Call ``use`` with the block, the half, and its 16 scores of a row, hidden where they are not seen."""
    with cgutils.for_range(builder, blocks) as loop:
        place = builder.add(scores, builder.mul(loop.index, ir.Constant(_INT64, SCORE_BYTES)))
        left = builder.sub(seen, builder.mul(loop.index, ir.Constant(_INT64, BLOCK)))
        for half in range(2):
            count = builder.trunc(builder.sub(left, ir.Constant(_INT64, half * TILE)), _INT32)
            shown = builder.icmp_signed("<", _PLACES, avx512.spread(builder, count, avx512.WORDS))
            numbers = avx512.load(builder, place, half * 4 * TILE)
            use(builder.select(shown, numbers, avx512.floats(HIDDEN)), loop.index, half)


def _largest(_context: Any, _scores: Any, _blocks: Any, _seen: Any, _top: Any) -> Any:
    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        scores, blocks, seen, top = arguments
        most = cgutils.alloca_once_value(builder, avx512.spread(builder, top, avx512.FLOATS))  # type: ignore[no-untyped-call]

        def use(numbers: Any, _block: Any, _half: int) -> None:
            larger = call(builder, "maxnum.v16f32", builder.load(most), numbers, result=avx512.FLOATS)
            builder.store(larger, most)

        _each_half(builder, scores, blocks, seen, use)
        return call(builder, "vector.reduce.fmax.v16f32", builder.load(most), result=ir.FloatType())

    return types.float32(types.int64, types.int64, types.int64, types.float32), generate


def _exponentials(_context: Any, _scores: Any, _weights: Any, _blocks: Any, _seen: Any, _most: Any) -> Any:
    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        scores, weights, blocks, seen, most = arguments
        largest = avx512.spread(builder, most, avx512.FLOATS)
        total = cgutils.alloca_once_value(builder, avx512.floats(0.0))  # type: ignore[no-untyped-call]

        def use(numbers: Any, block: Any, half: int) -> None:
            value = avx512.exp(builder, builder.fsub(numbers, largest))
            builder.store(builder.fadd(builder.load(total), value), total)
            place = builder.add(weights, builder.mul(block, ir.Constant(_INT64, WEIGHT_BYTES)))
            avx512.store_halves(builder, value, place, half * 2 * TILE)

        _each_half(builder, scores, blocks, seen, use)
        return call(
            builder, "vector.reduce.fadd.v16f32", ir.Constant(ir.FloatType(), 0.0), builder.load(total),
            result=ir.FloatType(),
        )  # fmt: skip

    kinds = (types.int64, types.int64, types.int64, types.int64, types.float32)
    return types.float32(*kinds), generate


def _scaled(_context: Any, _sums: Any, _out: Any, _factor: Any) -> Any:
    def generate(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        sums, out, factor = arguments
        factors = avx512.spread(builder, factor, avx512.FLOATS)
        for half in range(2):
            numbers = builder.fmul(avx512.load(builder, sums, half * 4 * TILE), factors)
            avx512.store_halves(builder, numbers, out, half * 2 * TILE)
        return target.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), generate


def _scaling(_context: Any, _sums: Any, _factor: Any) -> Any:
    def generate(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        sums, factor = arguments
        factors = avx512.spread(builder, factor, avx512.FLOATS)
        for half in range(2):
            offset = half * 4 * TILE
            avx512.store(builder, builder.fmul(avx512.load(builder, sums, offset), factors), sums, offset)
        return target.get_dummy_value()

    return types.void(types.int64, types.float32), generate


#: ``(scores, blocks, seen, top)``: the largest of ``top`` and a row's first ``seen`` scores, which lie 32 in a block.
largest: Any = intrinsic(_largest)
#: ``(scores, weights, blocks, seen, most)``: write the exponentials of scores minus ``most`` in bfloat16, 0 for what is
#: not seen, and return their sum, with 16 sums side by side.
exponentials: Any = intrinsic(_exponentials)
#: ``(sums, factor)``, ``(sums, out, factor)``: 32 numbers times a factor, in their place or in bfloat16 elsewhere.
scale: Any = intrinsic(_scaling)
scale_to: Any = intrinsic(_scaled)
# -- the loops --------------------------------------------------------------------------------------------------

#: Keys of a stretch: its scores and exponentials stay in the second cache.
STRETCH = 512

_STEP_BYTES = 2 * TILE_BYTES


def _words(_context: Any, address: Any) -> Any:  # noqa: ARG001 - numba checks the name
    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(32).as_pointer())

    pointer: Any = types.CPointer
    return pointer(types.uint32)(types.int64), generate


#: The 32-bit words that begin at an address.
words: Function = intrinsic(_words)


class TileArguments(IntEnum):
    """The places of the arguments of both loops, 64-bit whole numbers; those of arrays are addresses.

    ``QUERIES`` and ``OUT``: ``[rows, heads * head_dim]``, each with the bytes from row to row behind it. ``GROUP``:
    query heads that share a key. For each segment in ``FIRSTS`` its first piece, in ``PACKED`` where its packed
    keys begin, in ``STEPS`` how many times 32 keys it has, in ``PAST`` how many keys its first row sees besides its
    own, in ``ROWS`` its first row and in ``COUNTS`` how many. For each piece in ``BUFFERS`` the address of ``[2,
    kv_heads, capacity, head_dim]``, in ``HEAD_BYTES`` the bytes from head to head, in ``SIZES`` the keys that are
    read. ``UNITS``: segment, head and first row of each unit. ``ROOM``: memory of a thread, ``ROOM_BYTES`` each.
    ``WHOLE``, and for each segment in ``RESTS``: settings of the tiles for 32 rows and for its last rows.
    ``NUMBER`` and ``COUNT``: functions that tell a thread its number and how many there are, 0 if it is alone.
    """

    QUERIES = 0
    QUERY_STRIDE = 1
    OUT = 2
    OUT_STRIDE = 3
    KV_HEADS = 4
    GROUP = 5
    SEGMENTS = 6
    FIRSTS = 7
    PACKED = 8
    STEPS = 9
    PAST = 10
    ROWS = 11
    COUNTS = 12
    BUFFERS = 13
    HEAD_BYTES = 14
    SIZES = 15
    UNITS = 16
    UNIT_COUNT = 17
    ROOM = 18
    ROOM_BYTES = 19
    WHOLE = 20
    RESTS = 21
    NUMBER = 22
    COUNT = 23


def packed_bytes(steps: int, head_dim: int) -> int:
    """Bytes of the packed keys, or values, of a head: ``steps`` times 32 of them."""
    return steps * BLOCK * head_dim * 2


def room_bytes(head_dim: int) -> int:
    """Bytes of a thread's buffers: scores and exponentials of a stretch, sums, and each row's maximum and total."""
    return STRETCH // BLOCK * (SCORE_BYTES + WEIGHT_BYTES) + head_dim // BLOCK * BLOCK_BYTES + 2 * BLOCK * 4


@cache
def pack(head_dim: int) -> Any:  # noqa: C901 - a compiled loop is fastest in one piece
    """The loop that brings keys and values into the order of tiles.

    Of a head first the keys, ``[steps, head_dim / 32, 2, 16, 16]`` words of two numbers that are neighbours in a key,
    by 32 keys, 32 numbers, 16 keys, word and key; then the values, ``[head_dim / 32, steps, 2, 16, 16]`` words of
    the same number of two neighbouring keys, by 32 numbers, 32 keys, 16 numbers, pair of keys and number.
    """
    deep = head_dim // BLOCK

    @threaded
    def run(address: int) -> None:  # noqa: C901 - a compiled loop is fastest in one piece
        given = longs(address)
        kv_heads, segments = given[4], given[6]
        firsts, packed, all_steps = longs(given[7]), longs(given[8]), longs(given[9])
        buffers, head_bytes, sizes = longs(given[13]), longs(given[14]), longs(given[15])
        thread, threads = (call_at(given[22]), call_at(given[23])) if given[23] else (0, 1)
        for unit in range(thread, segments * kv_heads * 2, threads):
            segment, head, kind = unit // (2 * kv_heads), unit // 2 % kv_heads, unit % 2
            steps = all_steps[segment]
            target = packed[segment] + (2 * head + kind) * steps * BLOCK * head_dim * 2
            into, pairs = words(target), halves(target)
            place = 0
            for piece in range(firsts[segment], firsts[segment + 1]):
                source = buffers[piece] + (kind * kv_heads + head) * head_bytes[piece]
                for key in range(sizes[piece]):
                    step, half, column = place // BLOCK, place % BLOCK // TILE, place % TILE
                    if kind == 0:
                        numbers = words(source + key * head_dim * 2)
                        for each in range(deep):
                            start = ((step * deep + each) * 2 + half) * TILE * TILE + column
                            for row in range(TILE):
                                into[start + row * TILE] = numbers[each * TILE + row]
                    else:
                        values = halves(source + key * head_dim * 2)
                        for each in range(2 * deep):
                            tile = (each // 2 * steps + step) * 2 + each % 2
                            start = (tile * TILE + place % BLOCK // 2) * 2 * TILE + place % 2
                            for number in range(TILE):
                                pairs[start + 2 * number] = values[each * TILE + number]
                    place += 1
            if kind == 1:  # nothing times what was never written may be no number
                while place < steps * BLOCK:
                    for each in range(2 * deep):
                        tile = (each // 2 * steps + place // BLOCK) * 2 + each % 2
                        start = (tile * TILE + place % BLOCK // 2) * 2 * TILE + place % 2
                        for number in range(TILE):
                            pairs[start + 2 * number] = np.uint16(0)
                    place += 1

    return run


@cache
def attend(head_dim: int) -> Any:  # noqa: C901 - a compiled loop is fastest in one piece
    """The attention loop; :func:`pack` runs before it."""
    deep = head_dim // BLOCK

    @threaded
    def run(address: int) -> None:  # noqa: C901 - a compiled loop is fastest in one piece
        given = longs(address)
        queries, query_stride, out, out_stride = given[0], given[1], given[2], given[3]
        group = given[5]
        packed, all_steps, past, rows, counts = (
            longs(given[8]), longs(given[9]), longs(given[10]), longs(given[11]), longs(given[12]),
        )  # fmt: skip
        units = longs(given[16])
        thread, threads = (call_at(given[22]), call_at(given[23])) if given[23] else (0, 1)
        scores = given[18] + thread * given[19]
        weights = scores + STRETCH // BLOCK * SCORE_BYTES
        sums = weights + STRETCH // BLOCK * WEIGHT_BYTES
        tops, totals = floats(sums + deep * BLOCK_BYTES), floats(sums + deep * BLOCK_BYTES + 4 * BLOCK)
        for unit in range(thread, given[17], threads):
            segment, head, row = units[3 * unit], units[3 * unit + 1], units[3 * unit + 2]
            here = min(counts[segment] - row, BLOCK)
            configure(given[20] if here == BLOCK else given[21] + 64 * segment)
            steps = all_steps[segment]
            keys = packed[segment] + 2 * (head // group) * steps * BLOCK * head_dim * 2
            values = keys + steps * BLOCK * head_dim * 2
            left = queries + (rows[segment] + row) * query_stride + head * head_dim * 2
            sees = past[segment] + row + 1  # of the first row; each of the others sees one more
            needed = (sees + here - 1 + BLOCK - 1) // BLOCK
            for each in range(here):
                tops[each] = np.float32(HIDDEN)
            for first in range(0, needed, STRETCH // BLOCK):
                blocks = min(needed - first, STRETCH // BLOCK)
                for block in range(blocks):
                    clear()
                    right = keys + (first + block) * deep * _STEP_BYTES
                    for each in range(deep):
                        add(left + each * 64, query_stride, right + each * _STEP_BYTES, here)
                    store(scores + block * SCORE_BYTES, here)
                for each in range(here):
                    row_scores, seen = scores + each * 4 * BLOCK, sees + each - first * BLOCK
                    top = largest(row_scores, blocks, seen, tops[each])
                    total = exponentials(row_scores, weights + each * 2 * BLOCK, blocks, seen, top)
                    if first:
                        share = exp(tops[each] - top)
                        total += totals[each] * share
                        for part in range(deep):
                            scale(sums + part * BLOCK_BYTES + each * 4 * BLOCK, share)
                    tops[each], totals[each] = top, total
                for part in range(deep):
                    own = sums + part * BLOCK_BYTES
                    if first == 0:
                        clear()
                    else:
                        load(own, here)
                    right = values + (part * steps + first) * _STEP_BYTES
                    for block in range(blocks):
                        add(weights + block * WEIGHT_BYTES, 64, right + block * _STEP_BYTES, here)
                    store(own, here)
            for each in range(here):
                answer = out + (rows[segment] + row + each) * out_stride + head * head_dim * 2
                share = np.float32(1.0) / totals[each]
                for part in range(deep):
                    scale_to(sums + part * BLOCK_BYTES + each * 4 * BLOCK, answer + part * 2 * BLOCK, share)
        release()

    return run
