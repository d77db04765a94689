"""Linear layers against a product in float64, and the independence of their rows."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from specrag.engine.cpu import amx as tiles
from specrag.models.linear import (
    INVARIANT_INPUTS,
    Int8Linear,
    InvariantLinear,
    Linear,
    PackedLinear,
    PlainLinear,
    build_gated,
    build_linear,
    invariant_rows,
)
from specrag.models.row_ops import TorchOps, row_ops
from specrag.models.tile_linear import TileLinear
from tests.processor import PACKED_BF16

TILES = pytest.mark.skipif(not tiles.available(), reason="this processor has no matrix tiles")

#: (inputs, outputs) as SmolLM2 has them: qkv, output, gate and up, down.
SHAPES = [(576, 960), (576, 576), (576, 3072), (1536, 576)]

#: Relative error of a bf16 result, and of 8-bit weights and activations (half a step of 1/127 of the largest).
BF16, INT8 = 2**-7, 0.02

KINDS = [
    pytest.param(PlainLinear, torch.float32, 1e-5, id="plain-fp32"),
    pytest.param(PlainLinear, torch.bfloat16, BF16, id="plain-bf16"),
    pytest.param(PackedLinear, torch.bfloat16, BF16, id="packed-bf16", marks=PACKED_BF16),
    pytest.param(InvariantLinear, torch.bfloat16, 2 * BF16, id="invariant-bf16", marks=PACKED_BF16),
    pytest.param(TileLinear, torch.bfloat16, BF16, id="tiles", marks=TILES),
    pytest.param(Int8Linear, torch.bfloat16, INT8, id="int8"),
]


def normal(seed: int, *size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("kind", "dtype", "tolerance"), KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 5, 64, 79])
@pytest.mark.parametrize("extras", ["none", "bias", "residual", "both"])
def test_the_product_is_right(
    kind: Callable[[torch.Tensor, torch.Tensor | None], Linear],
    dtype: torch.dtype,
    tolerance: float,
    shape: tuple[int, int],
    rows: int,
    extras: str,
) -> None:
    inputs, outputs = shape
    weight = (normal(1, outputs, inputs) * inputs**-0.5).to(dtype)
    x = normal(2, rows, inputs).to(dtype)
    bias = normal(3, outputs).to(dtype) if extras in ("bias", "both") else None
    residual = normal(4, rows, outputs).to(dtype) if extras in ("residual", "both") else None
    expected = x.double() @ weight.double().T
    if bias is not None:
        expected += bias.double()
    if residual is not None:
        expected += residual.double()
    with torch.inference_mode():
        y = kind(weight, bias)(x.clone(), None if residual is None else residual.clone())
    assert y.dtype == dtype
    assert y.shape == (rows, outputs)
    error = (y.double() - expected).norm() / expected.norm()
    assert error < tolerance


def test_large_inputs_do_not_spoil_the_other_rows_of_an_int8_product() -> None:
    """Each row has a scale of its own."""
    weight = normal(1, 64, 96).bfloat16()
    x = normal(2, 3, 96).bfloat16()
    x[1] *= 1e4
    y = Int8Linear(weight, None)(x)
    expected = x.double() @ weight.double().T
    error = (y.double() - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(error.max()) < INT8


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_an_int8_product_of_the_largest_numbers_does_not_saturate(sign: float) -> None:
    """Without VNNI oneDNN's own is wrong: it sums pairs of products in 16 bits."""
    weight = torch.full((64, 1024), sign).bfloat16()
    y = Int8Linear(weight, None).product(torch.ones(3, 1024, dtype=torch.bfloat16))
    assert torch.allclose(y, torch.full((3, 64), 1024 * sign), rtol=1e-6)


def test_a_row_of_zeros_gives_the_bias() -> None:
    bias = normal(3, 64).bfloat16()
    y = Int8Linear(normal(1, 64, 96).bfloat16(), bias)(torch.zeros(2, 96, dtype=torch.bfloat16))
    assert torch.equal(y, bias.expand(2, 64))


@pytest.mark.parametrize(
    "kind",
    [
        Int8Linear,
        pytest.param(InvariantLinear, marks=PACKED_BF16),
        pytest.param(partial(InvariantLinear, rows=4), marks=PACKED_BF16, id="four-rows"),
        pytest.param(TileLinear, marks=TILES),
    ],
)
@pytest.mark.parametrize("shape", [*SHAPES, (1024, 576), (2048, 320), (8960, 128)])
def test_a_row_has_the_same_bits_among_any_number_of_rows(
    kind: Callable[[torch.Tensor, torch.Tensor | None], Linear], shape: tuple[int, int]
) -> None:
    inputs, outputs = shape
    layer = kind((normal(1, outputs, inputs) * inputs**-0.5).bfloat16(), normal(2, outputs).bfloat16())
    x, residual = normal(3, 64, inputs).bfloat16(), normal(4, 64, outputs).bfloat16()
    with torch.inference_mode():
        alone = torch.cat([layer(x[i : i + 1], residual[i : i + 1].clone()) for i in range(64)])
        for rows in range(2, 65):
            start = (rows * 7) % (65 - rows)
            part = slice(start, start + rows)
            assert torch.equal(layer(x[part], residual[part].clone()), alone[part]), rows


@PACKED_BF16
def test_rows_beyond_the_limit_are_computed_in_blocks_without_losing_bias_or_residual() -> None:
    weight, bias = normal(1, 40, 96).bfloat16(), normal(2, 40).bfloat16()
    x, residual = normal(3, 11, 96).bfloat16(), normal(4, 11, 40).bfloat16()
    blocks, alone = InvariantLinear(weight, bias, rows=4), InvariantLinear(weight, bias, rows=1)
    assert torch.equal(blocks(x, residual.clone()), alone(x, residual.clone()))
    assert torch.equal(blocks(x), alone(x))


@PACKED_BF16
def test_the_layer_that_was_asked_for_is_built() -> None:
    small = normal(1, 8, INVARIANT_INPUTS).bfloat16()
    large = normal(1, 8, INVARIANT_INPUTS + 1).bfloat16()
    assert isinstance(build_linear(small, None), PackedLinear)
    any_number = invariant_rows() >= sys.maxsize
    expected = PackedLinear if any_number else InvariantLinear
    assert isinstance(build_linear(small, None, invariant=True), expected)
    assert isinstance(build_linear(large, None), PackedLinear)
    assert isinstance(build_linear(large, None, invariant=True), InvariantLinear)
    assert isinstance(build_linear(large, None, int8=True, invariant=True), Int8Linear)
    assert isinstance(build_linear(large.float(), None), PlainLinear)


# -- matrix tiles ---------------------------------------------------------------------------------------------


@TILES
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("inputs", "outputs"), [(32, 32), (64, 96), (2048, 64)])
def test_tiles_compute_every_number_of_rows_alike_on_any_number_of_threads(
    threads: int, inputs: int, outputs: int
) -> None:
    """More threads than panels of columns too."""
    layer = TileLinear((normal(1, outputs, inputs) * inputs**-0.5).bfloat16())
    x, residual = normal(2, 100, inputs).bfloat16(), normal(3, 100, outputs).bfloat16()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = torch.cat([layer(*rows) for rows in zip(x.split(1), residual.split(1), strict=True)])
        torch.set_num_threads(threads)
        for rows in (1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 100):
            assert torch.equal(layer(x[:rows], residual[:rows]), alone[:rows]), rows
    finally:
        torch.set_num_threads(before)


@TILES
def test_tiles_read_rows_that_lie_apart_and_columns_that_do() -> None:
    layer = TileLinear(normal(1, 64, 96).bfloat16())
    wide = normal(2, 40, 200).bfloat16()
    assert torch.equal(layer(wide[:, 7:103]), layer(wide[:, 7:103].contiguous()))
    assert torch.equal(layer(wide[:, 7:103].flip(0).t().contiguous().t()), layer(wide[:, 7:103].flip(0)))
    assert layer(wide[:0, :96]).shape == (0, 64)


@TILES
@pytest.mark.parametrize("rows", [1, 16, 33])
def test_a_gate_is_computed_with_the_product(rows: int) -> None:
    weight = (normal(1, 192, 64) * 64**-0.5).bfloat16()
    x = (normal(2, rows, 64) * 8).bfloat16()  # some gates are wide open, some shut
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=-1)
    expected = torch.nn.functional.silu(gate) * up
    y = TileLinear(weight, gated=True)(x)
    assert y.shape == (rows, 96)
    assert (y.double() - expected).norm() / expected.norm() < BF16


@TILES
@pytest.mark.parametrize("size", [1e4, 1e10, float("inf"), float("nan")])
def test_a_gate_of_huge_numbers_is_what_it_is_elsewhere(size: float) -> None:
    """No crash, no wrong finite number; a shut gate is 0."""
    weight = torch.zeros(64, 32, dtype=torch.bfloat16)
    weight[:, 0] = 1.0
    x = torch.zeros(2, 32, dtype=torch.bfloat16)
    x[0, 0], x[1, 0] = size, -size
    y = TileLinear(weight, gated=True)(x)
    expected = TorchOps().gate(x.float() @ weight.float().T).bfloat16()
    for row in range(2):
        if torch.isfinite(expected[row]).all():
            assert torch.allclose(y[row].float(), expected[row].float(), rtol=BF16, atol=1e-12)
        else:
            assert not torch.isfinite(y[row]).any()


@pytest.mark.parametrize("shape", [(64, 100), (96, 40), (64, 96)])
def test_a_gated_layer_is_the_same_with_and_without_tiles(shape: tuple[int, int]) -> None:
    """Shapes that tiles do not fit are computed by others."""
    outputs, inputs = shape
    weight, x = normal(1, outputs, inputs).bfloat16() * 0.1, normal(2, 5, inputs).bfloat16()
    gate, up = (x.float() @ weight.float().T).chunk(2, dim=-1)
    expected = torch.nn.functional.silu(gate) * up
    ops = row_ops(torch.bfloat16, torch.device("cpu"))
    for made in (build_gated(weight, None, ops), build_gated(weight, torch.zeros(outputs).bfloat16(), ops)):
        assert (made(x).float() - expected).norm() / expected.norm() < 2 * BF16


ELSEWHERE = """
import torch
from specrag.engine.attention import tiles as tile_attention
from specrag.engine.cpu import tile_attention as tile_attention_kernel
from specrag.engine.cpu import amx as tiles
from specrag.models import decoder, eagle_head
from specrag.models import tile_linear
from specrag.models.linear import build_linear
from tests.processor import PACKED_BF16

assert not tiles.available()
layer = build_linear(torch.ones(64, 32).bfloat16(), None)
assert type(layer) is not tile_linear.TileLinear
assert layer(torch.ones(3, 32).bfloat16()).tolist() == [[32.0] * 64] * 3
"""


@pytest.mark.slow
def test_a_processor_without_tiles_compiles_none_of_their_loops(tmp_path: Path) -> None:
    """For another processor LLVM ends the process at their instructions, so that nothing may compile them."""
    other = {
        "NUMBA_CPU_NAME": "generic",
        "NUMBA_CPU_FEATURES": "+avx2,+fma" if platform.machine() == "x86_64" else "",
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE],
        env={**os.environ, **other},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
