"""What becomes of a row of sums that tiles have computed: 32 numbers in float32, 16 at a time, to bfloat16."""

from __future__ import annotations

from typing import Any

from specrag.engine.lanes import FLOATS, exp, floats, load, load_halves, store_halves
from specrag.engine.tiles import call, emitted

#: A gate of less than minus this lets nothing pass.
_SHUT = 80.0


def _round(builder: Any, sums: Any, out: Any) -> None:
    for half in range(2):
        store_halves(builder, load(builder, sums, 64 * half), out, 32 * half)


def _round_with(builder: Any, sums: Any, out: Any, added: Any) -> None:
    for half in range(2):
        total = builder.fadd(load(builder, sums, 64 * half), load_halves(builder, added, 32 * half))
        store_halves(builder, total, out, 32 * half)


def _gate(builder: Any, sums: Any, out: Any) -> None:
    gate, up = load(builder, sums, 0), load(builder, sums, 64)
    # Bounded, for a quotient with infinity may be computed as no number.
    power = call(builder, "minnum.v16f32", builder.fneg(gate), floats(_SHUT), result=FLOATS)
    divisor = builder.fadd(floats(1.0), exp(builder, power))
    store_halves(builder, builder.fmul(builder.fdiv(gate, divisor), up), out)


#: ``(sums, out)``: a row of a block as 32 numbers, or as 16 numbers times their gates.
round_row, gate_row = emitted(2, _round), emitted(2, _gate)
#: ``(sums, out, added)``
round_row_with = emitted(3, _round_with)
