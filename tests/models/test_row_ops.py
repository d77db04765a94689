"""The compiled operations between matrix products against torch's in float32."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch

from specrag.engine.cpu.threads import openmp
from specrag.models.row_ops import SHARED_NUMBERS, CompiledOps, TorchOps, row_ops

ROWS = [1, 3, 64]


def near(found: torch.Tensor, exact: torch.Tensor) -> None:
    """One rounding to bf16 apart: half a unit in the last of 8 bits, and a little for float32."""
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), exact, atol=1e-6, rtol=2**-8)


@pytest.mark.parametrize("rows", ROWS)
def test_norm(rows: int) -> None:
    x, weight = torch.randn(rows, 100).bfloat16(), torch.randn(100).bfloat16()
    exact = TorchOps().norm(x.float(), weight.float(), 1e-5)
    near(CompiledOps().norm(x, weight, 1e-5), exact)


def test_norm_of_zeros() -> None:
    x = torch.zeros(2, 8).bfloat16()
    assert torch.equal(CompiledOps().norm(x, torch.ones(8).bfloat16(), 1e-5), x)


@pytest.mark.parametrize("rows", ROWS)
def test_rotation_of_heads_that_lie_among_others(rows: int) -> None:
    packed = torch.randn(rows, 7, 16).bfloat16()
    turns = torch.polar(torch.ones(rows, 8), torch.randn(rows, 8) * 100)
    factors = torch.tensor([0.25, 0.25, 1.0, 1.0])
    plain, compiled = TorchOps(), CompiledOps()
    exact = plain.rotate(packed[:, :4].float(), plain.rotation(turns, factors))
    others = packed[:, 4:].clone()
    found = compiled.rotate(packed[:, :4], compiled.rotation(turns, factors))
    torch.testing.assert_close(found.float(), exact, atol=2e-3, rtol=2**-8)
    assert torch.equal(packed[:, 4:], others)


@pytest.mark.parametrize("rows", ROWS)
def test_gate(rows: int) -> None:
    x = torch.randn(rows, 2 * 50).mul(8).bfloat16()
    x[0, :4] = torch.tensor([-1000.0, 1000.0, -80.0, 0.0])
    near(CompiledOps().gate(x), TorchOps().gate(x.float()))


@pytest.mark.parametrize("operation", ["norm", "gate"])
def test_a_row_has_the_same_bits_alone(operation: str) -> None:
    x = torch.randn(40, 64).bfloat16()
    ops, weight = CompiledOps(), torch.randn(64).bfloat16()

    def compute(rows: torch.Tensor) -> torch.Tensor:
        return ops.norm(rows, weight, 1e-5) if operation == "norm" else ops.gate(rows)

    together = compute(x)
    for row in range(len(x)):
        assert torch.equal(compute(x[row : row + 1])[0], together[row])


@pytest.mark.parametrize("size", [64, 104, 576, 1536])
def test_threads_share_many_rows_without_another_bit(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rows are of no thread's round number."""
    if openmp() is None:
        pytest.skip("torch's threads cannot be had here")
    rows = 2 * SHARED_NUMBERS // size + 3
    x, weight = torch.randn(rows, size).mul(3).bfloat16(), torch.randn(size).bfloat16()
    turns = torch.polar(torch.ones(rows, size // 8), torch.randn(rows, size // 8) * 100)
    ops = CompiledOps()

    def compute() -> list[torch.Tensor]:
        rotated = x.clone().view(rows, 4, size // 4)
        ops.rotate(rotated, ops.rotation(turns, torch.tensor([0.25, 0.25, 1.0, 1.0])))
        return [ops.norm(x, weight, 1e-5), rotated, ops.gate(x)]

    shares = Mock(side_effect=openmp)
    monkeypatch.setattr("specrag.models.row_ops.openmp", shares)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        shared = compute()
    finally:
        torch.set_num_threads(threads)
    assert shares.call_count == 3
    shares.side_effect = lambda: None
    assert all(map(torch.equal, shared, compute()))


def test_which_numbers_are_compiled() -> None:
    cpu = torch.device("cpu")
    assert isinstance(row_ops(torch.bfloat16, cpu), CompiledOps)
    assert isinstance(row_ops(torch.float32, cpu), TorchOps)
    assert isinstance(row_ops(torch.bfloat16, torch.device("meta")), TorchOps)
