"""AVX-512 helpers in LLVM IR (16 fp32 lanes), for what LLVM does not vectorise by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]

from specrag.engine.cpu.amx import TILE, address, call, features

FLOATS = ir.VectorType(ir.FloatType(), TILE)
WORDS = ir.VectorType(ir.IntType(32), TILE)
_HALVES = ir.VectorType(ir.IntType(16), TILE)

#: 2 to a power from 0 to 1, as :func:`specrag.engine.cpu.bfloat16.exp` has it.
_POLYNOMIAL = (1.8775767e-3, 8.9893397e-3, 5.5826318e-2, 2.4015361e-1, 6.9315308e-1, 9.9999994e-1)


class _Bfloat(ir.types.Type):  # type: ignore[misc]
    """LLVM's 16-bit number, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat)

    def __hash__(self) -> int:
        return hash(_Bfloat)


_BFLOATS = ir.VectorType(_Bfloat(), TILE)


def words(number: int) -> Any:
    """A 32-bit integer constant in all 16 lanes."""
    return ir.Constant(WORDS, [number] * TILE)


def floats(number: float) -> Any:
    """A fp32 constant in all 16 lanes."""
    return ir.Constant(FLOATS, [float(np.float32(number))] * TILE)


def spread(builder: Any, number: Any, kind: Any) -> Any:
    """A scalar in all 16 lanes."""
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), number, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), words(0))


def load(builder: Any, place: Any, offset: int = 0, kind: Any = FLOATS, align: int = 64) -> Any:
    """Load 16 numbers of 32 bits, by default fp32 from a 64-byte boundary."""
    pointer = builder.bitcast(address(builder, place, offset), kind.as_pointer())
    return builder.load(pointer, align=align)


def store(builder: Any, numbers: Any, place: Any, offset: int = 0, align: int = 64) -> None:
    """Store 16 fp32 numbers, by default to a 64-byte boundary."""
    pointer = builder.bitcast(address(builder, place, offset), FLOATS.as_pointer())
    builder.store(numbers, pointer, align=align)


def widen(builder: Any, numbers: Any) -> Any:
    """16 bfloat16 numbers as fp32."""
    return builder.bitcast(builder.shl(builder.zext(numbers, WORDS), words(16)), FLOATS)


def narrow(builder: Any, numbers: Any) -> Any:
    """16 fp32 numbers as bfloat16, rounded to nearest, ties to even; subnormal numbers may become 0."""
    if features().get("avx512bf16"):
        found = call(builder, "x86.avx512bf16.cvtneps2bf16.512", numbers, result=_BFLOATS)
        return builder.bitcast(found, _HALVES)
    bits = builder.bitcast(numbers, WORDS)
    last = builder.and_(builder.lshr(bits, words(16)), words(1))
    rounded = builder.add(builder.add(bits, words(0x7FFF)), last)
    return builder.trunc(builder.lshr(rounded, words(16)), _HALVES)


def load_halves(builder: Any, place: Any, offset: int = 0) -> Any:
    """Load 16 bfloat16 numbers, widened to fp32."""
    pointer = builder.bitcast(address(builder, place, offset), _HALVES.as_pointer())
    return widen(builder, builder.load(pointer, align=2))


def store_halves(builder: Any, numbers: Any, place: Any, offset: int = 0) -> None:
    """Store as bfloat16 (:func:`narrow`)."""
    pointer = builder.bitcast(address(builder, place, offset), _HALVES.as_pointer())
    builder.store(narrow(builder, numbers), pointer, align=2)


def exp(builder: Any, x: Any) -> Any:
    """E to the power of each lane (relative error 3e-7)."""
    y = builder.fmul(x, floats(1.4426950408889634))
    whole = call(builder, "floor.v16f32", y, result=FLOATS)
    part = builder.fsub(y, whole)
    value = floats(_POLYNOMIAL[0])
    for factor in _POLYNOMIAL[1:]:
        value = call(builder, "fma.v16f32", value, part, floats(factor), result=FLOATS)
    every, nearest = ir.Constant(ir.IntType(16), -1), ir.Constant(ir.IntType(32), 4)
    name = "x86.avx512.mask.scalef.ps.512"
    return call(builder, name, value, whole, floats(0.0), every, nearest, result=FLOATS)
