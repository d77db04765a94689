"""The batch-invariant attention loop by AVX-512's bfloat16 products: in each of 16 lanes two products and a sum.

Where two multiply-adds in float32 take less time than one such product, they take its place with the same bits
(:func:`is_fused`).

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
from specrag.engine.cpu import avx512, bfloat16
from specrag.engine.cpu.amx import address, call, emitted, features
from specrag.engine.cpu.avx512 import FLOATS, WORDS, exp, floats, spread, words
from specrag.engine.cpu.bfloat16 import halves, longs, narrow, widen
from specrag.engine.cpu.threads import call_at

#: Lanes of a vector; keys of a block, or numbers of an answer, that are computed at once.
LANES, BLOCK = 16, 32
#: Queries that are multiplied at once, or twice as many.
QUERIES = 3
#: Less than any score.
HIDDEN = np.float32(-1e30)
#: Blocks of keys, or values, that are fetched ahead: memory brings only what lies in one page by itself.
AHEAD = 2

_INT32, _INT64 = ir.IntType(32), ir.IntType(64)
_HALVES = ir.VectorType(ir.IntType(16), LANES)


@cache
def available(head_dim: int) -> bool:
    """Whether the processor has the instruction, and heads of this size fill whole vectors."""
    if head_dim % BLOCK or not all(features().get(name) for name in ("avx512f", "avx512bf16")):
        return False
    binding.initialize_native_asmparser()  # for the instruction by its name
    return True


@cache
def is_fused() -> bool:
    """Whether two multiply-adds of 16 float32 lanes are faster than one product of bfloat16 pairs.

    They are on Intel's processors (Emerald Rapids: 0.39 against 0.77 ns), not on AMD's. The bits are the same, but for
    subnormal numbers, which only the product takes for 0.
    """
    return not binding.get_host_cpu_name().startswith("znver")


def room(rows: int, keys: int) -> tuple[int, int]:
    """Room for the scores of so many rows times group, and keys, float32; half as much behind them is for weights."""
    return -(-rows // QUERIES) * QUERIES, -(-keys // BLOCK) * BLOCK // 2 * 3


# -- intrinsics; addresses and sizes in bytes; wide: in float32 what is bfloat16 otherwise -----------------------


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


def _fetch(builder: Any, place: Any) -> None:
    read, first, data = (ir.Constant(_INT32, number) for number in (0, 3, 1))
    call(builder, "prefetch.p0", address(builder, place, 0), read, first, data)


def _turned(builder: Any, source: Any, size: Any) -> list[Any]:
    rows = [_read(builder, WORDS, _moved(builder, source, _number(row), size)) for row in range(LANES)]
    for distance in (1, 2, 4, 8):
        lanes = range(LANES)
        low = [lane + LANES - distance if lane & distance else lane for lane in lanes]
        high = [lane + LANES if lane & distance else lane + distance for lane in lanes]
        for row in lanes:
            if not row & distance:
                pair = rows[row], rows[row + distance]
                rows[row], rows[row + distance] = (_shuffled(builder, *pair, each) for each in (low, high))
    return rows


def _turn(builder: Any, source: Any, size: Any, target: Any) -> None:
    for number, row in enumerate(_turned(builder, source, size)):
        _write(builder, row, target, 4 * BLOCK * number)


def _turn_wide(builder: Any, source: Any, size: Any, target: Any) -> None:
    for number, row in enumerate(_turned(builder, source, size)):
        _write(builder, builder.shl(row, words(16)), target, 8 * BLOCK * number)
        _write(builder, builder.and_(row, words(0xFFFF0000)), target, 8 * BLOCK * number + 4 * BLOCK)


def _widen_all(builder: Any, source: Any, count: Any, target: Any) -> None:
    with cgutils.for_range(builder, count) as loop:
        numbers = _read(builder, _HALVES, _moved(builder, source, loop.index, _number(2 * LANES)))
        _write(
            builder, avx512.widen(builder, numbers), _moved(builder, target, loop.index, _number(4 * LANES))
        )


def _weave(builder: Any, source: Any, size: Any, target: Any) -> None:
    rows = [_read(builder, _HALVES, place) for place in (source, builder.add(source, size))]
    both = [lane // 2 + LANES * (lane % 2) for lane in range(2 * LANES)]
    _write(builder, _shuffled(builder, rows[0], rows[1], both), target)


def _largest(builder: Any, scores: Any, count: Any) -> Any:
    most = cgutils.alloca_once_value(builder, floats(float(HIDDEN)))  # type: ignore[no-untyped-call]
    with cgutils.for_range(builder, count) as loop:
        numbers = _read(builder, FLOATS, _moved(builder, scores, loop.index, _number(4 * LANES)))
        before = builder.load(most)
        larger = builder.fcmp_ordered(">", numbers, before)
        builder.store(builder.select(larger, numbers, before), most)
    return call(builder, "vector.reduce.fmax.v16f32", builder.load(most), result=ir.FloatType())


def _weighing(wide: bool) -> Any:
    """The intrinsic that stores weights in bfloat16, or as such numbers in float32."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        scores, weights, count = arguments
        largest = spread(builder, _largest(builder, scores, count), FLOATS)
        # What has no flag numba would mark as fast: sums in another order, by how many there are.
        in_order = ("nsz",)
        total = cgutils.alloca_once_value(builder, floats(0.0))  # type: ignore[no-untyped-call]
        with cgutils.for_range(builder, count) as loop:
            numbers = _read(builder, FLOATS, _moved(builder, scores, loop.index, _number(4 * LANES)))
            value = exp(builder, builder.fsub(numbers, largest, flags=in_order))
            builder.store(builder.fadd(builder.load(total), value, flags=in_order), total)
            rounded = avx512.narrow(builder, value)
            stored = avx512.widen(builder, rounded) if wide else rounded
            size = 4 * LANES if wide else 2 * LANES
            _write(builder, stored, _moved(builder, weights, loop.index, _number(size)))
        nothing = ir.Constant(ir.FloatType(), 0.0)
        return call(builder, "vector.reduce.fadd.v16f32", nothing, builder.load(total), result=ir.FloatType())

    made = types.float32(types.int64, types.int64, types.int64), generate

    def exponentials(_context: Any, _scores: Any, _weights: Any, _count: Any) -> Any:
        return made

    return intrinsic(exponentials)


def _add_pairs(builder: Any, sums: list[Any], left: Any, left_row: Any, right: Any) -> None:
    kind = ir.FunctionType(FLOATS, [FLOATS, WORDS, WORDS])
    columns = [_read(builder, WORDS, right, 4 * LANES * half) for half in range(2)]
    for number, place in enumerate(sums):
        if number % 2 == 0:
            row = _moved(builder, left, _number(number // 2), left_row)
            numbers = spread(builder, _read(builder, _INT32, row), WORDS)
        both = [builder.load(place), numbers, columns[number % 2]]
        builder.store(builder.asm(kind, "vdpbf16ps $3, $2, $0", "=v,0,v,v", both, False), place)


def _add_numbers(builder: Any, sums: list[Any], left: Any, left_row: Any, right: Any) -> None:
    columns = [_read(builder, FLOATS, right, 4 * LANES * half) for half in range(2)]
    for number, place in enumerate(sums):
        if number % 2 == 0:
            row = _moved(builder, left, _number(number // 2), left_row)
            numbers = spread(builder, _read(builder, ir.FloatType(), row), FLOATS)
        both = [numbers, columns[number % 2], builder.load(place)]
        builder.store(call(builder, "fma.v16f32", *both, result=FLOATS), place)


def _multiplying(rows: int, wide: bool) -> Any:
    """The intrinsic for so many rows, of bfloat16 or of float32."""

    def generate(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        left, left_row, right, right_step, steps, out, out_row = arguments
        results = [
            (_moved(builder, out, _number(row), out_row), 4 * LANES * half)
            for row in range(rows)
            for half in range(2)
        ]
        sums = [cgutils.alloca_once_value(builder, _read(builder, FLOATS, *result)) for result in results]  # type: ignore[no-untyped-call]
        with cgutils.for_range(builder, steps) as loop:
            step = _moved(builder, right, loop.index, right_step)
            if wide:  # the second number of a pair first, as the product of pairs does
                pair = _moved(builder, left, loop.index, _number(8))
                second = builder.add(step, builder.lshr(right_step, _number(1)))
                _add_numbers(builder, sums, builder.add(pair, _number(4)), left_row, second)
                _add_numbers(builder, sums, pair, left_row, step)
            else:
                _add_pairs(builder, sums, _moved(builder, left, loop.index, _number(4)), left_row, step)
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
#: The same in float32: of each pair the first numbers of the rows, and ``4 * BLOCK`` behind them the second.
turn_wide = emitted(3, _turn_wide)
#: ``weave(source, size, target)``: 16 numbers of two rows, ``size`` apart, in pairs.
weave = emitted(3, _weave)
#: ``widen_all(source, count, target)``: ``count`` times 16 numbers in float32.
widen_all = emitted(3, _widen_all)
#: ``fetch(place)``: the 64 bytes there will soon be read.
fetch = emitted(1, _fetch)
#: ``exponentials(scores, weights, count)``: of ``count`` times 16 scores minus the largest, in bfloat16; their sum.
exponentials, exponentials_wide = _weighing(wide=False), _weighing(wide=True)


def _multiplier(wide: bool) -> Any:
    three, six = _multiplying(QUERIES, wide), _multiplying(2 * QUERIES, wide)

    @inlined
    def multiply(
        left: int, left_row: int, right: int, right_step: int, steps: int, out: int, out_row: int, rows: int
    ) -> None:
        for row in range(0, rows, 2 * QUERIES):
            source, target = left + row * left_row, out + row * out_row
            if row + QUERIES < rows:
                six(source, left_row, right, right_step, steps, target, out_row)
            else:
                three(source, left_row, right, right_step, steps, target, out_row)

    return multiply


#: ``multiply(left, left_row, right, right_step, steps, out, out_row, rows)``: add the products of rows, a multiple of
#: :data:`QUERIES`, with a block of columns, pair by pair. ``left``: address of bfloat16 ``[rows, 2 * steps]``, from row
#: to row ``left_row`` bytes; ``right``: of pairs of bfloat16 ``[steps, BLOCK]``, from step to step ``right_step``;
#: ``out``: of float32 ``[rows, BLOCK]``, from row to row ``out_row`` bytes.
multiply = _multiplier(wide=False)
#: The same of float32 ``[rows, 2 * steps]`` and ``[steps, 2, BLOCK]``.
multiply_wide = _multiplier(wide=True)


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
def clear(scores: int, score_row: int, end: int, mixed: Any, rows: int) -> None:
    """Begin with sums of 0."""
    for one in range(rows):
        row = bfloat16.floats(scores + one * score_row)
        for key in range(end):
            row[key] = np.float32(0.0)
        for i in range(mixed.shape[1]):
            mixed[one, i] = np.float32(0.0)


@inlined
def gather(query: Any, one: int, asked: Any, place: int) -> None:
    """Read a query."""
    for i in range(query.shape[1]):
        query[one, i] = asked[place + i]


@inlined
def gather_wide(query: Any, one: int, asked: Any, place: int) -> None:
    """The same in float32."""
    for i in range(query.shape[1]):
        query[one, i] = widen(asked[place + i])


def _scorer(turn: Any, multiply: Any, size: int) -> Any:
    @inlined
    def score(keys: int, pairs: Any, query: Any, scores: int, score_row: int, rows: int) -> None:
        head_dim, turned = query.shape[1], pairs.ctypes.data
        for pair in range(0, head_dim // 2, LANES):
            for key in range(0, BLOCK, LANES):
                source = keys + 2 * key * head_dim + 4 * pair
                turn(source, 2 * head_dim, turned + 2 * size * pair * BLOCK + 4 * key)
        left, steps = query.ctypes.data, head_dim // 2
        multiply(left, size * head_dim, turned, 2 * size * BLOCK, steps, scores, score_row, rows)

    return score


#: ``score(keys, pairs, query, scores, score_row, rows)``: scores of a block of keys; ``pairs`` is room for the block.
score = _scorer(turn, multiply, 2)
#: The same of queries in float32.
score_wide = _scorer(turn_wide, multiply_wide, 4)


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
def mix_wide(values: int, pairs: Any, weights: int, score_row: int, mixed: Any, rows: int) -> None:
    """The same of weights in float32."""
    head_dim, wide, out = mixed.shape[1], pairs.ctypes.data, mixed.ctypes.data
    widen_all(values, BLOCK * head_dim // LANES, wide)
    size = 4 * head_dim
    for i in range(0, size, 4 * BLOCK):
        multiply_wide(weights, score_row, wide + i, 2 * size, BLOCK // 2, out + i, size, rows)


@inlined
def hide(scores: int, lowest: int, total: int, end: int) -> None:
    """Hide a row's scores before ``lowest`` and from ``total`` up to ``end``."""
    row = bfloat16.floats(scores)
    for key in range(lowest):
        row[key] = HIDDEN
    for key in range(total, end):
        row[key] = HIDDEN


@inlined
def fetch_block(place: int, size: int) -> None:
    """A block will soon be read."""
    for line in range(0, size, 64):
        fetch(place + line)


@inlined
def give(answer: Any, place: int, mixed: Any, one: int, total: Any) -> None:
    """Write a row of values divided by the sum of their weights."""
    share = np.float32(1.0) / total
    for i in range(mixed.shape[1]):
        answer[place + i] = narrow(mixed[one, i] * share)


@cache
def attend_paths(head_dim: int, group: int, fused: bool) -> Any:  # noqa: C901, PLR0915 - a loop is fastest in one piece
    """The loop for heads of this size, ``group`` query heads sharing a key.

    Args:
        fused: by multiply-adds in float32 (:func:`is_fused`).

    It takes the address of its arguments (:class:`specrag.engine.cpu.row_attention.PathArguments`); the room for scores
    is :func:`room`.
    """
    row_bytes = 2 * head_dim
    number, weight_bytes = (np.float32, 4) if fused else (np.uint16, 2)

    @threaded
    def run(arguments: int) -> None:  # noqa: C901, PLR0915 - a compiled loop is fastest in one piece
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
        # Weights in float32 take the scores' place.
        weights = scores if fused else scores + score_row // 3 * 2
        query = np.zeros((most_rows, head_dim), number)
        mixed = np.empty((most_rows, head_dim), np.float32)
        sums = np.empty(most_rows, np.float32)
        block = np.empty((BLOCK, head_dim), np.uint16)
        pairs = np.empty((BLOCK, head_dim), np.uint32)
        for part in range(thread, given[16], threads):
            for item in range(parts[part], parts[part + 1]):
                unit, head = item // kv_heads, item % kv_heads
                before, border, many = seen[unit], borders[unit], counts[unit] * group
                steps = borders[unit + 1] - border
                least, most = before + steps, before + steps + counts[unit] - 1
                in_order = before if steps > 0 else most
                end = (most + BLOCK - 1) // BLOCK * BLOCK
                rows = (many + QUERIES - 1) // QUERIES * QUERIES
                clear(scores, score_row, end, mixed, rows)
                for one in range(many):
                    place = (firsts[unit] + one // group) * query_stride
                    place += (head * group + one % group) * head_dim
                    if fused:
                        gather_wide(query, one, asked, place)
                    else:
                        gather(query, one, asked, place)
                keys = buffers[unit] + head * head_bytes[unit]
                values = keys + kv_heads * head_bytes[unit]
                for start in range(0, end, BLOCK):
                    source = keys + start * row_bytes
                    if start + BLOCK > in_order:
                        copy(block, keys, start, most, before, path, border, steps)
                        source = block.ctypes.data
                    fetch_block(keys + (start + AHEAD * BLOCK) * row_bytes, BLOCK * row_bytes)
                    if fused:
                        score_wide(source, pairs, query, scores + 4 * start, score_row, rows)
                    else:
                        score(source, pairs, query, scores + 4 * start, score_row, rows)
                for one in range(many):
                    total, place = least + one // group, one * score_row
                    lowest = max(total - window, 0)
                    hide(scores + place, lowest, total, end)
                    if fused:
                        sums[one] = exponentials_wide(scores + place, weights + place, end // LANES)
                    else:
                        sums[one] = exponentials(scores + place, weights + place, end // LANES)
                for start in range(0, end, BLOCK):
                    source = values + start * row_bytes
                    if start + BLOCK > in_order:
                        copy(block, values, start, most, before, path, border, steps)
                        source = block.ctypes.data
                    fetch_block(values + (start + AHEAD * BLOCK) * row_bytes, BLOCK * row_bytes)
                    if fused:
                        mix_wide(source, pairs, weights + weight_bytes * start, score_row, mixed, rows)
                    else:
                        mix(source, pairs, weights + weight_bytes * start, score_row, mixed, rows)
                for one in range(many):
                    place = (firsts[unit] + one // group) * out_stride
                    place += (head * group + one % group) * head_dim
                    give(answer, place, mixed, one, sums[one])

    return run
