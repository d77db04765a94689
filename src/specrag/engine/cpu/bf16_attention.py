"""The batch-invariant attention loop by AVX-512's bfloat16 products: in each of 16 lanes two products and a sum.

Like :func:`specrag.engine.cpu.row_attention.attend_paths`, which needs no such instruction, it gives a row bits that
depend on what the row sees and on nothing else: a lane holds one key's score, or one number of an answer, and adds to
it in the order of the key's numbers, or of the keys' positions. Weights are rounded to bfloat16 before they multiply
values, as in torch's fused attention.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from specrag.engine.compiling import inlined, threaded
from specrag.engine.cpu import bfloat16
from specrag.engine.cpu.amx import address, call, emitted, features
from specrag.engine.cpu.avx512 import FLOATS, WORDS, exp, floats, spread, store_halves
from specrag.engine.cpu.bfloat16 import halves, longs, narrow
from specrag.engine.cpu.threads import call_at

#: Lanes of a vector; keys of a block, or numbers of an answer, that are computed at once.
LANES, BLOCK = 16, 32
#: Queries that are multiplied at once, or twice as many.
QUERIES = 3
#: Less than any score.
HIDDEN = np.float32(-1e30)

_INT32, _INT64 = ir.IntType(32), ir.IntType(64)
_HALVES = ir.VectorType(ir.IntType(16), LANES)


@cache
def available(head_dim: int) -> bool:
    """Whether the processor has the instruction, and heads of this size fill whole vectors."""
    if head_dim % BLOCK or not all(features().get(name) for name in ("avx512f", "avx512bf16")):
        return False
    binding.initialize_native_asmparser()  # for the instruction by its name
    return True


def room(rows: int, keys: int) -> tuple[int, int]:
    """Room for the scores of so many rows times group, and keys, float32; half as much behind them is for weights."""
    return -(-rows // QUERIES) * QUERIES, -(-keys // BLOCK) * BLOCK // 2 * 3


# -- intrinsics; addresses and sizes in bytes ------------------------------------------------------------------


def _number(value: int) -> Any:
    return ir.Constant(_INT64, value)


def _moved(builder: Any, place: Any, index: Any, size: Any) -> Any:
    return builder.add(place, builder.mul(index, size))


def _read(builder: Any, kind: Any, place: Any, offset: int = 0) -> Any:
    return builder.load(builder.bitcast(address(builder, place, offset), kind.as_pointer()), align=1)


def _write(builder: Any, numbers: Any, place: Any, offset: int = 0) -> None:
    pointer = builder.bitcast(address(builder, place, offset), numbers.type.as_pointer())
    builder.store(numbers, pointer, align=1)


def _shuffled(builder: Any, one: Any, two: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(one, two, ir.Constant(ir.VectorType(_INT32, len(lanes)), lanes))


def _turn(builder: Any, source: Any, size: Any, target: Any) -> None:
    rows = [_read(builder, WORDS, _moved(builder, source, _number(row), size)) for row in range(LANES)]
    for distance in (1, 2, 4, 8):
        lanes = range(LANES)
        low = [lane + LANES - distance if lane & distance else lane for lane in lanes]
        high = [lane + LANES if lane & distance else lane + distance for lane in lanes]
        for row in lanes:
            if not row & distance:
                pair = rows[row], rows[row + distance]
                rows[row], rows[row + distance] = (_shuffled(builder, *pair, each) for each in (low, high))
    for number, row in enumerate(rows):
        _write(builder, row, target, 4 * BLOCK * number)


def _weave(builder: Any, source: Any, size: Any, target: Any) -> None:
    rows = [_read(builder, _HALVES, place) for place in (source, builder.add(source, size))]
    both = [lane // 2 + LANES * (lane % 2) for lane in range(2 * LANES)]
    _write(builder, _shuffled(builder, rows[0], rows[1], both), target)


def _exponentials(_context: Any, _scores: Any, _weights: Any, _count: Any, _most: Any) -> Any:
    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        scores, weights, count, most = arguments
        largest = spread(builder, most, FLOATS)
        # What has no flag numba would mark as fast: sums in another order, by how many there are.
        in_order = ("nsz",)
        total = cgutils.alloca_once_value(builder, floats(0.0))  # type: ignore[no-untyped-call]
        with cgutils.for_range(builder, count) as loop:
            numbers = _read(builder, FLOATS, _moved(builder, scores, loop.index, _number(4 * LANES)))
            value = exp(builder, builder.fsub(numbers, largest, flags=in_order))
            builder.store(builder.fadd(builder.load(total), value, flags=in_order), total)
            store_halves(builder, value, _moved(builder, weights, loop.index, _number(2 * LANES)))
        nothing = ir.Constant(ir.FloatType(), 0.0)
        return call(builder, "vector.reduce.fadd.v16f32", nothing, builder.load(total), result=ir.FloatType())

    return types.float32(types.int64, types.int64, types.int64, types.float32), generate


def _multiplying(rows: int) -> Any:
    """The intrinsic for so many rows."""

    def generate(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        left, left_row, right, right_step, steps, out, out_row = arguments
        kind = ir.FunctionType(FLOATS, [FLOATS, WORDS, WORDS])
        results = [
            (_moved(builder, out, _number(row), out_row), 4 * LANES * half)
            for row in range(rows)
            for half in range(2)
        ]
        sums = [cgutils.alloca_once_value(builder, _read(builder, FLOATS, *result)) for result in results]  # type: ignore[no-untyped-call]
        with cgutils.for_range(builder, steps) as loop:
            step = _moved(builder, right, loop.index, right_step)
            columns = [_read(builder, WORDS, step, 4 * LANES * half) for half in range(2)]
            pair = _moved(builder, left, loop.index, _number(4))
            for number, place in enumerate(sums):
                if number % 2 == 0:
                    row = _moved(builder, pair, _number(number // 2), left_row)
                    numbers = spread(builder, _read(builder, _INT32, row), WORDS)
                both = [builder.load(place), numbers, columns[number % 2]]
                builder.store(builder.asm(kind, "vdpbf16ps $3, $2, $0", "=v,0,v,v", both, False), place)
        for result, place in zip(results, sums, strict=True):
            _write(builder, builder.load(place), *result)
        return target.get_dummy_value()

    made = types.void(*(types.int64,) * 7), generate

    def multiply(
        _context: Any, _left: Any, _row: Any, _right: Any, _step: Any, _steps: Any, _out: Any, _out_row: Any
    ) -> Any:
        return made

    return intrinsic(multiply)


#: ``turn(source, size, target)``: 16 pairs of numbers of each of 16 rows, ``size`` apart, so that the rows lie side by
#: side: the first pair of each, and ``4 * BLOCK`` behind it the next.
turn = emitted(3, _turn)
#: ``weave(source, size, target)``: 16 numbers of two rows, ``size`` apart, in pairs.
weave = emitted(3, _weave)
#: ``exponentials(scores, weights, count, most)``: of ``count`` times 16 scores minus ``most``, in bfloat16; their sum.
exponentials: Any = intrinsic(_exponentials)
_three, _six = (_multiplying(rows) for rows in (QUERIES, 2 * QUERIES))


@inlined
def multiply(
    left: int, left_row: int, right: int, right_step: int, steps: int, out: int, out_row: int, rows: int
) -> None:
    """Add the products of rows with a block of columns, pair by pair.

    Args:
        left: address of bfloat16 ``[rows, 2 * steps]``; from row to row ``left_row`` bytes.
        right: of pairs of bfloat16 ``[steps, BLOCK]``; from step to step ``right_step`` bytes.
        out: of float32 ``[rows, BLOCK]``, to be added to; from row to row ``out_row`` bytes.
        rows: a multiple of :data:`QUERIES`.
    """
    for row in range(0, rows, 2 * QUERIES):
        source, target = left + row * left_row, out + row * out_row
        if row + QUERIES < rows:
            _six(source, left_row, right, right_step, steps, target, out_row)
        else:
            _three(source, left_row, right, right_step, steps, target, out_row)


# -- parts of the loop, and the loop ---------------------------------------------------------------------------


@inlined
def copy(
    block: Any, stored: int, start: int, most: int, before: int, path: Any, border: int, steps: int
) -> None:
    """Read the block that begins at a position: from ``before`` on a path's rows, from ``most`` on nothing."""
    head_dim = block.shape[1]
    for each in range(BLOCK):
        place = start + each
        if place >= most:
            for i in range(head_dim):
                block[each, i] = np.uint16(0)
            continue
        if steps > 0 and place >= before:
            place = path[border + place - before]
        numbers = halves(stored + place * 2 * head_dim)
        for i in range(head_dim):
            block[each, i] = numbers[i]


@inlined
def score(keys: int, pairs: Any, query: Any, scores: int, score_row: int, rows: int) -> None:
    """Scores of a block of keys. ``pairs``: room for the block."""
    head_dim, turned = query.shape[1], pairs.ctypes.data
    for pair in range(0, head_dim // 2, LANES):
        for key in range(0, BLOCK, LANES):
            source = keys + 2 * key * head_dim + 4 * pair
            turn(source, 2 * head_dim, turned + 4 * (pair * BLOCK + key))
    left, steps = query.ctypes.data, head_dim // 2
    multiply(left, 2 * head_dim, turned, 4 * BLOCK, steps, scores, score_row, rows)


@inlined
def mix(values: int, pairs: Any, weights: int, score_row: int, mixed: Any, rows: int) -> None:
    """Add a block of values, each times its weight. ``pairs``: room for the block."""
    head_dim, woven, out = mixed.shape[1], pairs.ctypes.data, mixed.ctypes.data
    for key in range(0, BLOCK, 2):
        for i in range(0, head_dim, LANES):
            weave(values + 2 * (key * head_dim + i), 2 * head_dim, woven + 4 * (key // 2 * head_dim + i))
    size, steps = 4 * head_dim, BLOCK // 2
    for i in range(0, size, 4 * BLOCK):
        multiply(weights, score_row, woven + i, size, steps, out + i, size, rows)


@inlined
def weigh(scores: int, weights: int, lowest: int, total: int, end: int) -> Any:
    """Weights of a row's scores from ``lowest`` to ``total``, 0 for the others up to ``end``; returns their sum."""
    row = bfloat16.floats(scores)
    top = HIDDEN
    for key in range(lowest, total):
        top = max(top, row[key])
    for key in range(lowest):
        row[key] = HIDDEN
    for key in range(total, end):
        row[key] = HIDDEN
    return exponentials(scores, weights, end // LANES, top)


@cache
def attend_paths(head_dim: int, group: int) -> Any:  # noqa: C901 - a compiled loop is fastest in one piece
    """The loop for heads of this size, ``group`` query heads sharing a key.

    It takes the address of its arguments (:class:`specrag.engine.cpu.row_attention.PathArguments`); the room for scores
    is :func:`room`.
    """
    row_bytes = 2 * head_dim

    @threaded
    def run(arguments: int) -> None:  # noqa: C901
        given = longs(arguments)
        query_stride, out_stride, kv_heads, window = given[1], given[3], given[4], given[5]
        firsts, counts, buffers = longs(given[6]), longs(given[7]), longs(given[8])
        head_bytes, seen, borders, path = (
            longs(given[9]),
            longs(given[10]),
            longs(given[11]),
            longs(given[12]),
        )
        asked, answer, parts = halves(given[0]), halves(given[2]), longs(given[17])
        thread, threads = (call_at(given[18]), call_at(given[19])) if given[18] else (0, 1)
        most_rows, score_row = given[14], 4 * given[15]
        scores = given[13] + thread * most_rows * score_row
        weights = scores + score_row // 3 * 2
        query = np.zeros((most_rows, head_dim), np.uint16)
        mixed = np.empty((most_rows, head_dim), np.float32)
        sums = np.empty(most_rows, np.float32)
        block = np.empty((BLOCK, head_dim), np.uint16)
        pairs = np.empty((BLOCK // 2, head_dim), np.uint32)
        for part in range(thread, given[16], threads):
            for item in range(parts[part], parts[part + 1]):
                unit, head = item // kv_heads, item % kv_heads
                before, border, many = seen[unit], borders[unit], counts[unit] * group
                steps = borders[unit + 1] - border
                least, most = before + steps, before + steps + counts[unit] - 1
                in_order = before if steps > 0 else most
                end = (most + BLOCK - 1) // BLOCK * BLOCK
                rows = (many + QUERIES - 1) // QUERIES * QUERIES
                for one in range(rows):
                    row = bfloat16.floats(scores + one * score_row)
                    for key in range(end):
                        row[key] = np.float32(0.0)
                    for i in range(head_dim):
                        mixed[one, i] = np.float32(0.0)
                for one in range(many):
                    place = (firsts[unit] + one // group) * query_stride
                    place += (head * group + one % group) * head_dim
                    for i in range(head_dim):
                        query[one, i] = asked[place + i]
                keys = buffers[unit] + head * head_bytes[unit]
                values = keys + kv_heads * head_bytes[unit]
                for start in range(0, end, BLOCK):
                    source = keys + start * row_bytes
                    if start + BLOCK > in_order:
                        copy(block, keys, start, most, before, path, border, steps)
                        source = block.ctypes.data
                    score(source, pairs, query, scores + 4 * start, score_row, rows)
                for one in range(many):
                    total, place = least + one // group, one * score_row
                    lowest = max(total - window, 0)
                    sums[one] = weigh(scores + place, weights + place, lowest, total, end)
                for start in range(0, end, BLOCK):
                    source = values + start * row_bytes
                    if start + BLOCK > in_order:
                        copy(block, values, start, most, before, path, border, steps)
                        source = block.ctypes.data
                    mix(source, pairs, weights + 2 * start, score_row, mixed, rows)
                for one in range(many):
                    place = (firsts[unit] + one // group) * out_stride
                    place += (head * group + one % group) * head_dim
                    share = np.float32(1.0) / sums[one]
                    for i in range(head_dim):
                        answer[place + i] = narrow(mixed[one, i] * share)

    return run
