"""Rows in 8 bits: compiled loops around oneDNN's integer product.

torch's operations take longer to start than to compute a few rows, and a product needs ten of them. The many rows of a
prompt are shared out over torch's threads. Nothing is computed with fast math: a row has the same bits alone and among
others, on one thread and on several.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from specrag.engine import exact, inlined_exact, threaded_exact
from specrag.engine.cpu.bfloat16 import as_bits, floats, fma, halves, longs, narrow, octets, widen
from specrag.models.row_ops import mine, share

_LARGEST = 127
#: What stands for 0: oneDNN takes numbers without a sign.
ZERO_POINT = 128
_STEP = np.float32(1 / _LARGEST)
_TINY = np.float32(1e-12)
#: Added to a number below 2**22, it rounds it to a whole one, ties to even, and leaves that in the low byte.
_ROUND = np.float32(2.0**23 + ZERO_POINT)


def quantise(x: torch.Tensor, apart: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in steps of a 127th of their largest number.

    Args:
        x: bf16 ``[rows, size]``.
        apart: bytes from row to row of the result, at least ``size``; by default they lie side by side.

    Returns:
        uint8 ``[rows, size]``, :data:`ZERO_POINT` for 0, and each row's step, float32 ``[rows, 1]``; never 0.
    """
    if x.stride(1) != 1:
        x = x.contiguous()
    rows, size = x.shape
    numbers = torch.empty((rows, apart or size), dtype=torch.uint8)[:, :size]
    steps = torch.empty((rows, 1))
    given = x.data_ptr(), x.stride(0), numbers.data_ptr(), numbers.stride(0), steps.data_ptr(), size
    if not share(_shared_quantise, rows, x.numel(), *given):
        _quantise(*given, rows)
    return numbers, steps


def rescale(
    product: torch.Tensor, steps: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
) -> torch.Tensor:
    """``product * steps + bias + residual``, computed in float32: bf16 ``[rows, size]``.

    Args:
        product: float32 ``[rows, size]``.
        steps: float32 ``[rows, 1]``.
        bias: bf16 ``[size]``.
        residual: bf16 ``[rows, size]``.
    """
    rows, size = product.shape
    out = torch.empty((rows, size), dtype=torch.bfloat16)
    residual = None if residual is None else residual.contiguous()
    shift, added = (0 if each is None else each.data_ptr() for each in (bias, residual))
    given = product.data_ptr(), steps.data_ptr(), shift, added, out.data_ptr(), size
    if not share(_shared_rescale, rows, out.numel(), *given):
        _rescale(*given, rows)
    return out


@cache
def compile_loops() -> None:
    """Compile, or fetch from the disk, before a pass waits for it."""
    numbers, steps = quantise(torch.zeros((1, 2), dtype=torch.bfloat16))
    rescale(numbers.float(), steps, None, None)


@inlined_exact
def quantise_rows(
    x: int, apart: int, out: int, out_apart: int, steps: int, size: int, first: int, last: int
) -> None:
    """:func:`quantise` of some rows by addresses: so many numbers ``apart`` from row to row."""
    numbers, results, found = halves(x), octets(out), floats(steps)
    for row in range(first, last):
        start = row * apart
        largest = np.uint16(0)
        for i in range(size):
            # Without its sign, a number's bits are the larger the larger it is.
            value = np.uint16(numbers[start + i] & np.uint16(0x7FFF))
            largest = max(largest, value)
        step = fma(widen(largest), _STEP, _TINY)
        found[row] = step
        inverse = np.float32(1.0) / step
        for i in range(size):
            # The quotient, rounded as a division would: a product, corrected by what it lacks (Markstein 1990).
            number = widen(numbers[start + i])
            near = number * inverse
            quotient = fma(fma(-near, step, number), inverse, near)
            results[row * out_apart + i] = np.int8(as_bits(quotient + _ROUND))


@inlined_exact
def _rescale_rows(
    product: int, steps: int, bias: int, residual: int, out: int, size: int, first: int, last: int
) -> None:
    numbers, scales, results = floats(product), floats(steps), halves(out)
    shifts, added = halves(bias), halves(residual)
    for row in range(first, last):
        step = scales[row]
        for i in range(size):
            number = numbers[row * size + i]
            if bias:
                value = fma(number, step, widen(shifts[i]))
                if residual:
                    value += widen(added[row * size + i])
            elif residual:
                value = fma(number, step, widen(added[row * size + i]))
            else:
                value = number * step
            results[row * size + i] = narrow(value)


@exact
def _quantise(x: int, apart: int, out: int, out_apart: int, steps: int, size: int, rows: int) -> None:
    quantise_rows(x, apart, out, out_apart, steps, size, 0, rows)


@exact
def _rescale(product: int, steps: int, bias: int, residual: int, out: int, size: int, rows: int) -> None:
    _rescale_rows(product, steps, bias, residual, out, size, 0, rows)


@threaded_exact
def _shared_quantise(address: int) -> None:
    given: Any = longs(address)
    first, last = mine(given)
    quantise_rows(given[4], given[5], given[6], given[7], given[8], given[9], first, last)


@threaded_exact
def _shared_rescale(address: int) -> None:
    given: Any = longs(address)
    first, last = mine(given)
    _rescale_rows(given[4], given[5], given[6], given[7], given[8], given[9], first, last)
