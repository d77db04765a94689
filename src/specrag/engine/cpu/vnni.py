"""Products of 8-bit numbers by AVX-512 VNNI, as numba intrinsics: four products and their sum in each 32-bit lane."""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from specrag.engine.compiling import inlined_exact
from specrag.engine.cpu.amx import address, features
from specrag.engine.cpu.avx512 import WORDS, spread, words

#: Columns that are multiplied at once, in four vectors of 16; and numbers that one instruction adds to each.
PANEL, DEPTH = 64, 4
#: Bytes of a step: ``DEPTH`` rows of a panel.
_STEP_BYTES = PANEL * DEPTH
_VECTORS = PANEL // 16
_INT64 = ir.IntType(64)

#: Rows that are multiplied at once.
ROWS = 6


@cache
def available() -> bool:
    """Whether this processor has the instructions, and numba compiles for it."""
    if not all(features().get(name) for name in ("avx512f", "avx512vnni")):
        return False
    binding.initialize_native_asmparser()  # for the instruction by its name
    return True


def _add_products(builder: Any, sums: Any, unsigned: Any, signed: Any) -> Any:
    """The instruction by its name: LLVM's own function for it has had two signatures."""
    kind = ir.FunctionType(WORDS, [WORDS, WORDS, WORDS])
    return builder.asm(kind, "vpdpbusd $3, $2, $0", "=v,0,v,v", [sums, unsigned, signed], False)


def _multiplying(rows: int) -> Any:
    """The intrinsic for so many rows."""

    def generate(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        x, weight, out, steps = arguments
        sums = [[cgutils.alloca_once(builder, WORDS) for _ in range(_VECTORS)] for _ in range(rows)]  # type: ignore[no-untyped-call]
        for place in (place for row in sums for place in row):
            builder.store(words(0), place)
        size = builder.mul(steps, ir.Constant(_INT64, DEPTH))
        with cgutils.for_range(builder, steps) as loop:
            step = builder.add(weight, builder.mul(loop.index, ir.Constant(_INT64, _STEP_BYTES)))
            columns = [
                builder.load(
                    builder.bitcast(address(builder, step, 64 * number), WORDS.as_pointer()), align=1
                )
                for number in range(_VECTORS)
            ]
            four = builder.add(x, builder.mul(loop.index, ir.Constant(_INT64, DEPTH)))
            for row in sums:
                pointer = builder.bitcast(address(builder, four), ir.IntType(32).as_pointer())
                numbers = spread(builder, builder.load(pointer, align=1), WORDS)
                for place, column in zip(row, columns, strict=True):
                    builder.store(_add_products(builder, builder.load(place), numbers, column), place)
                four = builder.add(four, size)
        for number, place in enumerate(place for row in sums for place in row):
            pointer = builder.bitcast(address(builder, out, 64 * number), WORDS.as_pointer())
            builder.store(builder.load(place), pointer, align=1)
        return target.get_dummy_value()

    made = types.void(*(types.int64,) * 4), generate

    def multiply(_context: Any, _x: Any, _weight: Any, _out: Any, _steps: Any) -> Any:
        return made

    return intrinsic(multiply)


_one, _two, _three, _four, _five, _six = (_multiplying(rows) for rows in range(1, ROWS + 1))


@inlined_exact
def multiply(x: int, weight: int, out: int, steps: int, rows: int) -> None:
    """Rows of numbers without a sign times a panel of numbers with one.

    Args:
        x: address of uint8 ``[rows, 4 * steps]``.
        weight: of int8 ``[steps, PANEL, 4]``.
        out: of int32 ``[rows, PANEL]``, to be written.
        steps: fours of numbers that are summed.
        rows: 1 to :data:`ROWS`.
    """
    if rows == 1:
        _one(x, weight, out, steps)
    elif rows == 2:
        _two(x, weight, out, steps)
    elif rows == 3:
        _three(x, weight, out, steps)
    elif rows == 4:
        _four(x, weight, out, steps)
    elif rows == 5:
        _five(x, weight, out, steps)
    else:
        _six(x, weight, out, steps)
