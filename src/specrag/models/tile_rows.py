"""What becomes of a row of sums that tiles have computed: 32 numbers in float32, 16 at a time, to bfloat16."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]

from specrag.engine.tiles import TILE, address, call, emitted

_FLOATS = ir.VectorType(ir.FloatType(), TILE)
_WORDS = ir.VectorType(ir.IntType(32), TILE)
_HALVES = ir.VectorType(ir.IntType(16), TILE)


def _words(number: int) -> Any:
    return ir.Constant(_WORDS, [number] * TILE)


def _floats(number: float) -> Any:
    return ir.Constant(_FLOATS, [float(np.float32(number))] * TILE)


def _sums_at(builder: Any, place: Any, offset: int) -> Any:
    pointer = builder.bitcast(address(builder, place, offset), _FLOATS.as_pointer())
    return builder.load(pointer, align=64)


def _widened_at(builder: Any, place: Any, offset: int) -> Any:
    pointer = builder.bitcast(address(builder, place, offset), _HALVES.as_pointer())
    words = builder.zext(builder.load(pointer, align=2), _WORDS)
    return builder.bitcast(builder.shl(words, _words(16)), _FLOATS)


def _narrow_to(builder: Any, numbers: Any, place: Any, offset: int) -> None:
    """To the nearest bfloat16, ties to even."""
    words = builder.bitcast(numbers, _WORDS)
    odd = builder.and_(builder.lshr(words, _words(16)), _words(1))
    rounded = builder.lshr(builder.add(builder.add(words, _words(0x7FFF)), odd), _words(16))
    pointer = builder.bitcast(address(builder, place, offset), _HALVES.as_pointer())
    builder.store(builder.trunc(rounded, _HALVES), pointer, align=2)


def _round(builder: Any, sums: Any, out: Any) -> None:
    for half in range(2):
        _narrow_to(builder, _sums_at(builder, sums, 64 * half), out, 32 * half)


def _round_with(builder: Any, sums: Any, out: Any, added: Any) -> None:
    for half in range(2):
        total = builder.fadd(_sums_at(builder, sums, 64 * half), _widened_at(builder, added, 32 * half))
        _narrow_to(builder, total, out, 32 * half)


#: e to a power as :func:`specrag.engine.bfloat16.exp` has it: 2**part by a polynomial.
_POLYNOMIAL = (1.8775767e-3, 8.9893397e-3, 5.5826318e-2, 2.4015361e-1, 6.9315308e-1, 9.9999994e-1)


def _exp(builder: Any, x: Any) -> Any:
    y = builder.fmul(x, _floats(1.4426950408889634))
    y = call(builder, "maxnum.v16f32", y, _floats(-100.0), result=_FLOATS)
    y = call(builder, "minnum.v16f32", y, _floats(126.0), result=_FLOATS)
    whole = call(builder, "floor.v16f32", y, result=_FLOATS)
    part = builder.fsub(y, whole)
    value = _floats(_POLYNOMIAL[0])
    for factor in _POLYNOMIAL[1:]:
        value = call(builder, "fma.v16f32", value, part, _floats(factor), result=_FLOATS)
    exponent = builder.shl(builder.add(builder.fptosi(whole, _WORDS), _words(127)), _words(23))
    return builder.fmul(builder.bitcast(exponent, _FLOATS), value)


def _gate(builder: Any, sums: Any, out: Any) -> None:
    gate, up = _sums_at(builder, sums, 0), _sums_at(builder, sums, 64)
    divisor = builder.fadd(_floats(1.0), _exp(builder, builder.fneg(gate)))
    _narrow_to(builder, builder.fmul(builder.fdiv(gate, divisor), up), out, 0)


#: ``(sums, out)``: a row of a block as 32 numbers, or as 16 numbers times their gates.
round_row, gate_row = emitted(2, _round), emitted(2, _gate)
#: ``(sums, out, added)``
round_row_with = emitted(3, _round_with)
