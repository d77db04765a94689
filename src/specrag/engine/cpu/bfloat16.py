"""bfloat16 in numba, which has no such type: 16-bit integers, widened to float32 and narrowed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, cast

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from specrag.engine.compiling import inlined

Function: TypeAlias = Callable[..., Any]

_LOG2_E = np.float32(1.4426950408889634)
_LARGEST_EXPONENT = np.float32(126.0)
#: Powers below 2 to this are 0. Smaller ones, multiplied once or twice more, would become subnormal numbers, with which
#: some processors compute a hundred times slower: a softmax over scores that are hidden from a row (measured on an
#: Intel Xeon: 16 rows behind 200 keys 572 against 190 microseconds).
_SMALLEST_EXPONENT = np.float32(-100.0)


def _float_of(_context: Any, bits: Any) -> Any:  # noqa: ARG001 - numba checks the name
    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


def _bits_of(_context: Any, number: Any) -> Any:  # noqa: ARG001
    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


def _multiplying_and_adding(_context: Any, one: Any, two: Any, added: Any) -> Any:  # noqa: ARG001
    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


def _numbers_at(kind: Any, stored: Any) -> Function:
    """An intrinsic that reads an address as a pointer to numbers of this kind."""

    def at(_context: Any, address: Any) -> Any:  # noqa: ARG001
        def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], stored.as_pointer())

        pointer: Any = types.CPointer
        return pointer(kind)(types.int64), generate

    return cast(Function, intrinsic(at))


def _widening(_context: Any, number: Any) -> Any:
    def same(_target: Any, _builder: Any, _signature: Any, arguments: Any) -> Any:
        return arguments[0]

    def widened(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        bits = builder.zext(arguments[0], ir.IntType(32))
        return builder.bitcast(builder.shl(bits, ir.Constant(ir.IntType(32), 16)), ir.FloatType())

    return types.float32(number), same if number == types.float32 else widened


_as_float = cast(Function, intrinsic(_float_of))

#: The bits of a float32.
as_bits = cast(Function, intrinsic(_bits_of))

#: ``fma(one, two, added)``: one * two + added of float32, rounded once.
fma = cast(Function, intrinsic(_multiplying_and_adding))

#: To float32: of 16 bits the same number, 16 zero bits behind; float32 stays, for loops that read either.
widen = cast(Function, intrinsic(_widening))

#: The 64-bit whole numbers that begin at an address.
longs = _numbers_at(types.int64, ir.IntType(64))

#: The same, without a sign.
bits = _numbers_at(types.uint64, ir.IntType(64))

#: The 32-bit whole numbers that begin at an address.
integers = _numbers_at(types.int32, ir.IntType(32))

#: The 16-bit numbers that begin at an address.
halves = _numbers_at(types.uint16, ir.IntType(16))

#: The 8-bit whole numbers that begin at an address.
octets = _numbers_at(types.int8, ir.IntType(8))

#: The float32 numbers that begin at an address.
floats = _numbers_at(types.float32, ir.FloatType())


@inlined
def narrow(number: Any) -> Any:
    """Round float32 to the nearest bfloat16, ties to even; its 16 bits."""
    bits = as_bits(number)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@inlined
def exp(x: Any) -> Any:
    """E to a power, in float32: 2**whole by the exponent's bits, 2**part by a polynomial (relative error 3e-7).

    Below 2**-100 it is 0.
    """
    y = min(max(x * _LOG2_E, _SMALLEST_EXPONENT), _LARGEST_EXPONENT)
    whole = np.floor(y)
    part = y - whole
    value = np.float32(1.8775767e-3)
    value = value * part + np.float32(8.9893397e-3)
    value = value * part + np.float32(5.5826318e-2)
    value = value * part + np.float32(2.4015361e-1)
    value = value * part + np.float32(6.9315308e-1)
    value = value * part + np.float32(9.9999994e-1)
    power = _as_float(np.uint32(np.int32(whole) + np.int32(127)) << np.uint32(23)) * value
    return power if y > _SMALLEST_EXPONENT else np.float32(0.0)
