"""The softmax between the two products of attention, a row of blocks that tiles have computed at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from specrag.engine import lanes
from specrag.engine.tiles import BLOCK, BLOCK_BYTES, TILE, call

_INT32, _INT64 = ir.IntType(32), ir.IntType(64)
#: Less than any score.
HIDDEN = -1e30
#: From block to block of scores, and of exponentials in bfloat16: a cache line or two more than a block has, else the
#: blocks' rows of the same number would push each other out of the cache.
SCORE_BYTES, WEIGHT_BYTES = BLOCK_BYTES + 128, BLOCK_BYTES // 2 + 64
_PLACES = ir.Constant(lanes.WORDS, list(range(TILE)))


def _each_half(
    builder: Any, scores: Any, blocks: Any, seen: Any, use: Callable[[Any, Any, int], None]
) -> None:
    """Call ``use`` with the block, the half, and its 16 scores of a row, hidden where they are not seen."""
    with cgutils.for_range(builder, blocks) as loop:
        place = builder.add(scores, builder.mul(loop.index, ir.Constant(_INT64, SCORE_BYTES)))
        left = builder.sub(seen, builder.mul(loop.index, ir.Constant(_INT64, BLOCK)))
        for half in range(2):
            count = builder.trunc(builder.sub(left, ir.Constant(_INT64, half * TILE)), _INT32)
            shown = builder.icmp_signed("<", _PLACES, lanes.spread(builder, count, lanes.WORDS))
            numbers = lanes.load(builder, place, half * 4 * TILE)
            use(builder.select(shown, numbers, lanes.floats(HIDDEN)), loop.index, half)


def _largest(_context: Any, _scores: Any, _blocks: Any, _seen: Any, _top: Any) -> Any:
    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        scores, blocks, seen, top = arguments
        most = cgutils.alloca_once_value(builder, lanes.spread(builder, top, lanes.FLOATS))  # type: ignore[no-untyped-call]

        def use(numbers: Any, _block: Any, _half: int) -> None:
            larger = call(builder, "maxnum.v16f32", builder.load(most), numbers, result=lanes.FLOATS)
            builder.store(larger, most)

        _each_half(builder, scores, blocks, seen, use)
        return call(builder, "vector.reduce.fmax.v16f32", builder.load(most), result=ir.FloatType())

    return types.float32(types.int64, types.int64, types.int64, types.float32), generate


def _exponentials(_context: Any, _scores: Any, _weights: Any, _blocks: Any, _seen: Any, _most: Any) -> Any:
    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        scores, weights, blocks, seen, most = arguments
        largest = lanes.spread(builder, most, lanes.FLOATS)
        total = cgutils.alloca_once_value(builder, lanes.floats(0.0))  # type: ignore[no-untyped-call]

        def use(numbers: Any, block: Any, half: int) -> None:
            value = lanes.exp(builder, builder.fsub(numbers, largest))
            builder.store(builder.fadd(builder.load(total), value), total)
            place = builder.add(weights, builder.mul(block, ir.Constant(_INT64, WEIGHT_BYTES)))
            lanes.store_halves(builder, value, place, half * 2 * TILE)

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
        factors = lanes.spread(builder, factor, lanes.FLOATS)
        for half in range(2):
            numbers = builder.fmul(lanes.load(builder, sums, half * 4 * TILE), factors)
            lanes.store_halves(builder, numbers, out, half * 2 * TILE)
        return target.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), generate


def _scaling(_context: Any, _sums: Any, _factor: Any) -> Any:
    def generate(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        sums, factor = arguments
        factors = lanes.spread(builder, factor, lanes.FLOATS)
        for half in range(2):
            offset = half * 4 * TILE
            lanes.store(builder, builder.fmul(lanes.load(builder, sums, offset), factors), sums, offset)
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
