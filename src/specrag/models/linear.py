"""Linear layers of the lean decoder, one class for each way of storing the weights.

All of them map ``[rows, in_features]`` to ``[rows, out_features]`` and can add a residual.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from specrag.engine.cpu.pages import use_huge_pages
from specrag.models import int8_rows
from specrag.models.int8_product import Int8Product
from specrag.models.row_ops import RowOps
from specrag.models.tile_linear import TileLinear

#: With up to this many inputs, oneDNN's bf16 product sums in the same order for every number of rows, or for every
#: number up to :func:`invariant_rows`; with more inputs the order depends on the number of rows (measured on Zen 4).
INVARIANT_INPUTS = 1024

#: The numbers of rows that :func:`invariant_rows` tests for another summation order, and the limits it may return.
_PROBED_ROWS = (2, 3, 4, 6, 8, 12, 16, 17, 24, 32, 33, 40, 48, 64, 65, 96, 128, 160)
_ROW_LIMITS = (32, 16, 8, 4, 2)

_INT8_MAX = 127
_CACHED_NUMBERS = 2**17


class Linear(Protocol):
    """A matrix product with fixed weights."""

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """``[rows, in]`` -> ``[rows, out]``, plus ``residual`` ``[rows, out]`` if given."""


class PlainLinear:
    """torch's own product, for fp32 and fp16, and for every dtype on a GPU."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        y = F.linear(x, self._weight, self._bias)
        return y if residual is None else y.add_(residual)


class PackedLinear:
    """bf16 weights in oneDNN's blocked layout, 1.2 to 1.5 times as fast as the plain layout on the CPU."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self._weight = _in_huge_pages(packed, weight.nbytes)
        self._bias = bias

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if residual is None:
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        else:
            y = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._weight, self._bias, "add")
        return y

    @staticmethod
    def available() -> bool:
        """Whether this machine's processor and torch build have the packed bf16 product."""
        return bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


class InvariantLinear:
    """Packed bf16 weights, with a row's bits independent of how many rows are in the pass.

    The weights are split along the inputs so that no part sums more than :data:`INVARIANT_INPUTS` inputs, and the parts
    are added one after the other. More than :func:`invariant_rows` rows are computed in several products.

    Args:
        rows: the most rows of one product; None for the number that this machine allows.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, rows: int | None = None) -> None:
        self._rows = rows or invariant_rows()
        count = -(-weight.shape[1] // INVARIANT_INPUTS)
        parts = weight.tensor_split(count, dim=1)
        self._widths = [part.shape[1] for part in parts]
        self._parts = [PackedLinear(part, bias if not index else None) for index, part in enumerate(parts)]

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if x.shape[0] <= self._rows:
            return self._multiply(x, residual)
        residuals = itertools.repeat(None) if residual is None else residual.split(self._rows)
        return torch.cat(
            [self._multiply(*block) for block in zip(x.split(self._rows), residuals, strict=False)]
        )

    def _multiply(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        y = residual
        for part, piece in zip(self._parts, x.split(self._widths, dim=1), strict=True):
            y = part(piece.contiguous(), y)
        assert y is not None
        return y


@cache
def invariant_rows() -> int:
    """The number of rows up to which each row of a bf16 product has the same bits as alone, on this machine.

    No documentation promises this, so it is tested once: with AVX-512 it holds for any number of rows, with AMX tiles
    for up to 32.
    """
    random = torch.Generator().manual_seed(0)
    most = max(_PROBED_ROWS)
    x = torch.randn((most, INVARIANT_INPUTS), generator=random).bfloat16()
    product = PackedLinear(torch.randn((512, INVARIANT_INPUTS), generator=random).bfloat16(), None)
    alone = torch.cat([product(row) for row in x.split(1)])
    differing = [rows for rows in _PROBED_ROWS if not torch.equal(product(x[:rows]), alone[:rows])]
    if not differing:
        return sys.maxsize
    return next((limit for limit in _ROW_LIMITS if limit < differing[0]), 1)


class Int8Linear:
    """8-bit weights (one scale per output) times 8-bit activations (one scale per row), on the CPU.

    The integer product is exact and the scales are applied element by element, so a row's bits never depend on the
    other rows. It reads half as many bytes as bf16. If :func:`saturates` says that the product would not be exact, each
    row of activations is split into the sum of two rows of half the magnitude; the weights are still read once.

    Attributes:
        loop: the compiled one, if it serves here; oneDNN's product otherwise.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, gated: bool = False) -> None:
        scale = weight.abs().amax(dim=1).float().clamp_min_(1e-12).div_(_INT8_MAX)
        quantised = _quantise(weight, scale)
        int8_rows.compile_loops()
        self.loop = None
        if Int8Product.serves(quantised, gated):
            self.loop = Int8Product(quantised, scale, bias, gated)
            return
        self._weight = _in_huge_pages(torch.ops.onednn.qlinear_prepack(quantised, None), quantised.nbytes)
        self._scale = scale
        self._zero = torch.zeros(len(scale), dtype=torch.int64)
        self._bias = bias

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if self.loop is not None:
            return self.loop.linear(x, residual)
        return int8_rows.rescale(*self._multiply(x), self._bias, residual)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """The product in float32, without the bias."""
        if self.loop is not None:
            return self.loop.product(x)
        y, steps = self._multiply(x)
        return y.mul_(steps)

    def _multiply(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The integer product times the weights' scales, float32, and the rows' steps, yet to be multiplied in."""
        numbers, steps = int8_rows.quantise(x)
        if not saturates():
            return self._product(numbers, int8_rows.ZERO_POINT), steps
        half = numbers >> 1
        both = torch.cat([half, numbers - half])
        first, second = self._product(both, int8_rows.ZERO_POINT // 2).chunk(2)
        return first.add_(second), steps

    def _product(self, quantised: torch.Tensor, zero_point: int) -> torch.Tensor:
        return _multiply_int8(quantised, zero_point, self._weight, self._scale, self._zero)


def _in_huge_pages(packed: torch.Tensor, size: int) -> torch.Tensor:
    """What oneDNN has packed, so many bytes; it stays where it is if this version of torch does not tell where."""
    if hasattr(torch.ops.mkldnn, "data_ptr"):
        use_huge_pages(torch.ops.mkldnn.data_ptr(packed), size)
    return packed


def _multiply_int8(
    x: torch.Tensor, zero_point: int, weight: torch.Tensor, scale: torch.Tensor, zeros: torch.Tensor
) -> torch.Tensor:
    """The product of uint8 ``[rows, in]`` and prepacked int8 weights by oneDNN, float32 ``[rows, out]``."""
    y: torch.Tensor = _integer_product()(
        x, 1.0, zero_point, weight, scale, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return y


@cache
def _integer_product() -> Any:
    """The operation itself, cached: looking it up among its overloads takes as long as starting it."""
    return torch.ops.onednn.qlinear_pointwise.default


@cache
def saturates() -> bool:
    """Whether oneDNN's product of 8-bit numbers is wrong for large numbers on this processor.

    Without VNNI instructions it adds two products in 16 bits and saturates: a row of ones times a column of ones gave
    4.6 instead of 576 (AMD Zen 3).
    """
    weight = torch.ops.onednn.qlinear_prepack(torch.full((1, 64), _INT8_MAX, dtype=torch.int8), None)
    x = torch.full((1, 64), 2 * _INT8_MAX, dtype=torch.uint8)
    product = _multiply_int8(x, 0, weight, torch.ones(1), torch.zeros(1, dtype=torch.int64))
    return bool(product.item() != 64 * _INT8_MAX * 2 * _INT8_MAX)


def _quantise(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Each row of ``weight`` divided by its scale and rounded to int8."""
    quantised = torch.empty(weight.shape, dtype=torch.int8)
    # A few rows at a time, so that they stay in the processor's cache. Adding 1.5 * 2**23 rounds, and leaves the signed
    # number in the low byte.
    rows = max(_CACHED_NUMBERS // weight.shape[1], 1)
    for part, target, step in zip(weight.split(rows), quantised.split(rows), scale.split(rows), strict=True):
        target.copy_(torch.div(part, step[:, None]).add_(1.5 * 2.0**23).view(torch.int32))
    return quantised


def build_linear(
    weight: torch.Tensor, bias: torch.Tensor | None, *, int8: bool = False, invariant: bool = False
) -> Linear:
    """The fastest layer for these weights on their device that keeps the requested guarantees."""
    if int8:
        return Int8Linear(weight, bias)
    if TileLinear.fits(weight):
        return TileLinear(weight, bias)
    if weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and PackedLinear.available():
        if invariant and (weight.shape[1] > INVARIANT_INPUTS or invariant_rows() < sys.maxsize):
            return InvariantLinear(weight, bias)
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)


def build_gated(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    ops: RowOps,
    *,
    int8: bool = False,
    invariant: bool = False,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A layer that returns SiLU of the first half of its outputs times the second half.

    Args:
        ops: computes the gate if the product does not.
    """
    if not int8 and bias is None and TileLinear.fits(weight):
        return TileLinear(weight, gated=True)
    if int8 and bias is None and Int8Product.serves(weight, gated=True):
        return Int8Linear(weight, None, gated=True)
    return GatedLinear(build_linear(weight, bias, int8=int8, invariant=invariant), ops)


@dataclass(frozen=True, slots=True)
class GatedLinear:
    """A product, and the gate behind it."""

    linear: Linear
    ops: RowOps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.gate(self.linear(x))
