"""The compiled 8-bit product gives oneDNN's bits, for any number of rows and threads, by vectors and by tiles."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch

from specrag.engine.cpu import amx as tiles
from specrag.engine.cpu import vnni
from specrag.models import int8_product
from specrag.models.int8_product import Int8Product
from specrag.models.linear import Int8Linear
from specrag.models.row_ops import CompiledOps

pytestmark = pytest.mark.skipif(not vnni.available(), reason="this processor has no AVX-512 VNNI")

#: (inputs, outputs): SmolLM2's and Qwen2.5-1.5B's; rows of whole kilobytes; one panel; few steps.
SHAPES = [(576, 960), (1536, 576), (1536, 2048), (8960, 1536), (2048, 64), (64, 64), (64, 128), (4, 128)]


def normal(seed: int, *size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def onednns(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Int8Linear]:
    """Makes the same layer without the loop."""

    def make(weight: torch.Tensor, bias: torch.Tensor | None) -> Int8Linear:
        with monkeypatch.context() as patch:
            patch.setattr(Int8Product, "serves", lambda *_: False)
            layer = Int8Linear(weight, bias)
        assert layer.loop is None
        return layer

    return make


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 6, 7, 8, 13, 16, 17, 32, 33, 75])
def test_its_bits_are_onednns(
    shape: tuple[int, int], rows: int, threads: int, onednns: Callable[..., Int8Linear]
) -> None:
    inputs, outputs = shape
    weight = (normal(1, outputs, inputs) * inputs**-0.5).bfloat16()
    x = (normal(2, rows, inputs) * torch.logspace(3, -3, rows)[:, None]).bfloat16()
    bias, residual = normal(3, outputs).bfloat16(), normal(4, rows, outputs).bfloat16()
    for given in (None, bias):
        own, theirs = Int8Linear(weight, given), onednns(weight, given)
        assert own.loop is not None
        assert torch.equal(own(x), theirs(x))
        assert torch.equal(own(x, residual), theirs(x, residual))
        assert own.product(x).dtype == torch.float32
        assert torch.equal(own.product(x), theirs.product(x))


@pytest.mark.parametrize("shape", [(576, 3072), (1536, 256), (64, 128)])
@pytest.mark.parametrize("rows", [1, 2, 3, 6, 7, 8, 33, 75])
def test_gates_stand_in_turns_with_what_they_are_for(shape: tuple[int, int], rows: int, threads: int) -> None:
    inputs, outputs = shape
    weight = (normal(1, outputs, inputs) * inputs**-0.5).bfloat16()
    x = (normal(2, rows, inputs) * torch.logspace(1, -1, rows)[:, None]).bfloat16()
    layer = Int8Linear(weight, None, gated=True)
    own = layer(x)
    apart = CompiledOps().gate(Int8Linear(weight, None)(x))
    assert own.shape == (rows, outputs // 2)
    # The other loop's divisions may differ in a last bit of float32, which rounding to bf16 hardly ever shows.
    differing = (own != apart).sum().item()
    assert differing <= 1e-4 * own.numel()
    assert torch.allclose(own.float(), apart.float(), rtol=2**-7, atol=1e-30)
    assert all(torch.equal(layer(x[row : row + 1])[0], own[row]) for row in range(rows))


def test_large_gates_stay_finite() -> None:
    weight = torch.ones(128, 64, dtype=torch.bfloat16)
    layer = Int8Linear(weight, None, gated=True)
    given = layer(torch.tensor([[1e4], [-1e4], [0.0]]).expand(-1, 64).bfloat16())
    assert torch.allclose(given[0].float(), torch.tensor(4.1e11), rtol=0.02)
    assert given[1:].abs().max() == 0


def test_rows_that_lie_apart_are_read_where_they_are() -> None:
    layer = Int8Linear(normal(1, 64, 96).bfloat16(), None)
    wide, tall = normal(2, 5, 200).bfloat16(), normal(3, 64, 5).bfloat16()
    assert torch.equal(layer(wide[:, 7:103]), layer(wide[:, 7:103].contiguous()))
    assert torch.equal(layer(wide[:, :96], tall.T), layer(wide[:, :96], tall.T.contiguous()))
    assert torch.equal(layer(wide.T[:96].T), layer(wide[:, :96]))


@pytest.mark.parametrize("shape", [(576, 100), (62, 64)])
def test_matrices_of_no_whole_panels_are_left_to_onednn(shape: tuple[int, int]) -> None:
    layer = Int8Linear(normal(1, shape[1], shape[0]).bfloat16(), None)
    assert layer.loop is None
    assert layer(normal(2, 2, shape[0]).bfloat16()).shape == (2, shape[1])


@pytest.mark.skipif(not tiles.has_octets(), reason="this processor has no tiles for 8-bit numbers")
def test_tiles_multiply_all_but_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Int8Linear(normal(1, 128, 128).bfloat16(), None)
    x = normal(2, 40, 128).bfloat16()
    expected = layer(x)
    ran: list[str] = []
    for name in ("_multiply", "_multiply_tiles"):
        loop = getattr(int8_product, name)()

        def counting(name: str = name, loop: object = loop) -> object:
            ran.append(name)
            return loop

        monkeypatch.setattr(int8_product, name, counting)
    assert torch.equal(layer(x), expected)
    assert torch.equal(layer(x[:3]), expected[:3])
    assert torch.equal(layer(x[:2]), expected[:2])
    assert ran == ["_multiply_tiles", "_multiply_tiles", "_multiply"]
    monkeypatch.setattr(int8_product, "_TILED_ROWS", sys.maxsize)
    assert torch.equal(layer(x), expected)


def test_rows_quantised_once_for_all_threads_are_the_same(
    monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    layer = Int8Linear(normal(1, 64, 1024).bfloat16(), None)
    x = normal(2, 20, 1024).bfloat16()
    expected = layer(x)
    monkeypatch.setattr(int8_product, "SHARED_NUMBERS", 1)
    for rows in (3, 20):
        assert torch.equal(layer(x[:rows]), expected[:rows])
