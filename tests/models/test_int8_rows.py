"""The loops around 8-bit products against torch's operations, and a row's bits on any number of threads."""

from __future__ import annotations

import pytest
import torch

from specrag.models import int8_rows
from specrag.models.row_ops import SHARED_NUMBERS


def normal(seed: int, *size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def by_torch(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    largest = x.abs().amax(dim=1, keepdim=True)
    steps = torch.add(torch.tensor([1e-12]), largest, alpha=1 / 127)
    return (torch.round(x.float() / steps) + int8_rows.ZERO_POINT).to(torch.uint8), steps


#: Few rows, and so many that threads share them; sizes that fill no vector.
SIZES = [(1, 576), (3, 7), (300, 577)]


@pytest.mark.parametrize("size", SIZES)
def test_rows_become_steps_of_their_largest_number(size: tuple[int, int], threads: int) -> None:
    x = (normal(1, *size) * torch.logspace(10, -6, size[0])[:, None]).bfloat16()
    numbers, steps = int8_rows.quantise(x)
    wanted, wanted_steps = by_torch(x)
    assert torch.equal(steps, wanted_steps)
    assert torch.equal(numbers, wanted)
    assert int((numbers.int() - int8_rows.ZERO_POINT).abs().max()) == 127
    assert size[0] * size[1] > SHARED_NUMBERS or size[0] < 300


@pytest.mark.parametrize("size", SIZES)
def test_rows_may_be_laid_apart(size: tuple[int, int]) -> None:
    x = normal(1, *size).bfloat16()
    numbers, steps = int8_rows.quantise(x, size[1] + 64)
    assert numbers.stride() == (size[1] + 64, 1)
    wanted, wanted_steps = by_torch(x)
    assert torch.equal(numbers, wanted)
    assert torch.equal(steps, wanted_steps)


def test_zeros_stay_zeros_and_ties_go_to_even_numbers() -> None:
    x = torch.tensor([[0.0, -0.0, 0.0, 0.0], [127.0, 0.5, 1.5, -2.5]]).bfloat16()
    numbers, steps = int8_rows.quantise(x)
    assert numbers[0].tolist() == [int8_rows.ZERO_POINT] * 4
    assert steps[0].item() > 0
    assert (numbers[1].int() - int8_rows.ZERO_POINT).tolist() == [127, 0, 2, -2]


@pytest.mark.parametrize("exponent", [-120, -30, 0, 100])
def test_every_quotient_is_rounded_as_a_division_does(exponent: int) -> None:
    """Each largest number's digits, by all numbers up to it that do not vanish beside it."""
    digits = (127 + exponent) * 128 + torch.arange(128)
    for largest in digits.tolist():
        x = torch.arange(max(largest - 2000, 1), largest + 1, dtype=torch.int16).view(torch.bfloat16)[None]
        numbers, steps = int8_rows.quantise(x)
        wanted = torch.round(x.float() / steps) + int8_rows.ZERO_POINT
        assert torch.equal(numbers, wanted.to(torch.uint8))


def test_rows_that_lie_apart_are_read_where_they_are() -> None:
    wide = normal(1, 5, 96).bfloat16()
    for part in (wide[:, 3:67], wide.T[:, :3]):
        assert torch.equal(int8_rows.quantise(part)[0], int8_rows.quantise(part.contiguous())[0])
        product, steps = normal(2, *part.shape), normal(3, part.shape[0], 1)
        assert torch.equal(
            int8_rows.rescale(product, steps, None, part),
            int8_rows.rescale(product, steps, None, part.contiguous()),
        )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("extras", ["none", "bias", "residual", "both"])
def test_a_product_is_rescaled_as_torch_does_it(size: tuple[int, int], extras: str, threads: int) -> None:
    product, steps = normal(1, *size) * 100, normal(2, size[0], 1).abs()
    bias = normal(3, size[1]).bfloat16() if extras in ("bias", "both") else None
    residual = normal(4, *size).bfloat16() if extras in ("residual", "both") else None
    wanted = product * steps
    if bias is not None:
        wanted = torch.addcmul(bias, product, steps)
        wanted = wanted if residual is None else wanted + residual
    elif residual is not None:
        wanted = torch.addcmul(residual, product, steps)
    assert torch.equal(int8_rows.rescale(product, steps, bias, residual), wanted.bfloat16())
