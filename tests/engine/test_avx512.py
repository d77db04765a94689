"""AVX-512 helpers against torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from numba import njit, types
from numba.extending import intrinsic

from specrag.engine.cpu import avx512
from specrag.engine.cpu.amx import features

pytestmark = pytest.mark.skipif(not features().get("avx512f"), reason="this processor has no AVX-512")


def _rounding(_context: Any, _source: Any, _target: Any) -> Any:
    def generate(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        avx512.store_halves(builder, avx512.load(builder, arguments[0]), arguments[1])
        return target.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@pytest.mark.parametrize("has_instruction", [True, False])
def test_numbers_are_rounded_as_torch_does(monkeypatch: pytest.MonkeyPatch, has_instruction: bool) -> None:
    """By the processor's instruction, or in whole numbers: ties, carries into the exponent, signs, infinities."""
    if has_instruction and not features().get("avx512bf16"):
        pytest.skip("this processor has no bf16 instructions")
    monkeypatch.setattr(avx512, "features", lambda: {"avx512bf16": has_instruction})
    rounding: Any = intrinsic(_rounding)

    run: Any = njit(lambda source, target: rounding(source, target))

    bits = torch.tensor(
        [0x3F800000, 0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0x3FFFFFFF, 0x7F7F7FFF, 0]
    )
    edges = torch.cat([bits, bits | 1 << 31]).to(torch.int32).view(torch.float32)
    random = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 1e3
    for numbers in [edges, *random.split(16)]:
        aligned, found = numbers.clone(), torch.empty(16, dtype=torch.bfloat16)
        run(aligned.data_ptr(), found.data_ptr())
        assert torch.equal(found, numbers.bfloat16())
