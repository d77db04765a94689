"""What becomes of the sums of 8-bit products: scaled, with bias and residual or gated in bf16, or logits in float32.

In vectors of 16, which LLVM has to be told: of a loop in numba it makes narrower ones and compares all pointers first,
and writing the sums then takes as long as AMX tiles take to add them up.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

from specrag.engine import inlined_exact
from specrag.engine.cpu.amx import call
from specrag.engine.cpu.avx512 import (
    FLOATS,
    WORDS,
    exp,
    floats,
    load,
    load_halves,
    narrow,
    spread,
    store,
    store_halves,
    widen,
)
from specrag.engine.cpu.vnni import PANEL

_LANES = 16
_VECTORS = PANEL // _LANES


def _scaled(builder: Any, sums: Any, shifts: Any, scales: Any, number: int, behind: int = 0) -> Any:
    """The vector of this number, yet to be multiplied by the row's step; its shifts and scales lie further behind."""
    here, moved = 4 * _LANES * number, 4 * _LANES * (number + behind)
    whole = builder.sub(
        load(builder, sums, here, WORDS, align=4), load(builder, shifts, moved, WORDS, align=4)
    )
    return builder.fmul(builder.sitofp(whole, FLOATS), load(builder, scales, moved, align=4))


def _writing(has_bias: bool, has_residual: bool, is_logits: bool = False) -> Any:
    """The intrinsic that writes a row of a panel: ``(sums, shifts, scales, step, out, bias, residual)``."""

    def generate(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        sums, shifts, scales, step, out, bias, residual = arguments
        steps = spread(builder, step, FLOATS)
        for number in range(_VECTORS):
            value = _scaled(builder, sums, shifts, scales, number)
            added = [
                load_halves(builder, place, 2 * _LANES * number)
                for place, is_there in ((bias, has_bias), (residual, has_residual))
                if is_there
            ]
            if added:
                value = call(builder, "fma.v16f32", value, steps, added[0], result=FLOATS)
            else:
                value = builder.fmul(value, steps)
            if len(added) > 1:
                value = builder.fadd(value, added[1])
            if is_logits:
                store(builder, value, out, 4 * _LANES * number, align=4)
            else:
                store_halves(builder, value, out, 2 * _LANES * number)
        return target.get_dummy_value()

    places = (types.int64,) * 3
    made = types.void(*places, types.float32, *places), generate

    def write(
        _context: Any,
        _sums: Any,
        _shifts: Any,
        _scales: Any,
        _step: Any,
        _out: Any,
        _bias: Any,
        _residual: Any,
    ) -> Any:
        return made

    return intrinsic(write)


_plain, _biased = _writing(False, False), _writing(True, False)
_continued, _biased_continued = _writing(False, True), _writing(True, True)
_logits = _writing(False, False, is_logits=True)


def _writing_gated(
    _context: Any, _sums: Any, _more_sums: Any, _shifts: Any, _scales: Any, _step: Any, _out: Any
) -> Any:
    def generate(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        sums, more_sums, shifts, scales, step, out = arguments
        steps = spread(builder, step, FLOATS)

        def scaled(place: Any, number: int, behind: int) -> Any:
            value = builder.fmul(_scaled(builder, place, shifts, scales, number, behind), steps)
            return widen(builder, narrow(builder, value))

        for number in range(_VECTORS):
            gate, up = scaled(sums, number, 0), scaled(more_sums, number, _VECTORS)
            share = builder.fadd(exp(builder, builder.fneg(gate)), floats(1.0))
            store_halves(builder, builder.fdiv(builder.fmul(gate, up), share), out, 2 * _LANES * number)
        return target.get_dummy_value()

    return types.void(*(types.int64,) * 4, types.float32, types.int64), generate


#: ``(sums, more_sums, shifts, scales, step, out)``: write SiLU of a row of a panel, in bf16, times that row of the next
#: panel; ``shifts`` and ``scales`` are both panels'. Both rows are rounded to bf16 first, as they are where the gate is
#: an operation of its own: a model writes the same text either way.
write_gated: Any = intrinsic(_writing_gated)


@inlined_exact
def write_row(
    sums: int, shifts: int, scales: int, step: Any, out: int, bias: int, residual: int, is_logits: Any
) -> None:
    """Write a row's outputs of a panel: ``(sums - shifts) * scales * step + bias + residual``.

    Args:
        sums, shifts: addresses of int32 ``[PANEL]``.
        scales: of float32 ``[PANEL]``.
        step: the row's, float32.
        out: of bf16 ``[PANEL]``, or of float32 if ``is_logits``, which have neither bias nor residual.
        bias, residual: of bf16 ``[PANEL]``; 0 for none.
    """
    if is_logits:
        _logits(sums, shifts, scales, step, out, bias, residual)
    elif bias and residual:
        _biased_continued(sums, shifts, scales, step, out, bias, residual)
    elif bias:
        _biased(sums, shifts, scales, step, out, bias, residual)
    elif residual:
        _continued(sums, shifts, scales, step, out, bias, residual)
    else:
        _plain(sums, shifts, scales, step, out, bias, residual)
