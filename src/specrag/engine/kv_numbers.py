"""The form in which keys and values lie in memory: as they were computed, or in 8 bits with a scale.

In 8 bits a head's numbers of one token are whole numbers from -127 to 127, and behind them, in the same row of bytes,
the float32 that they are multiplied by: the largest of them, divided by 127. Zero bytes are zeros.
"""

from __future__ import annotations

import torch

#: Bytes behind a row of 8-bit numbers.
SCALE_BYTES = 4

_LARGEST = 127.0


def quantize(numbers: torch.Tensor) -> torch.Tensor:
    """``[..., head_dim]`` of any floating type to int8 ``[..., head_dim + SCALE_BYTES]``.

    Each number moves by at most half a scale, 1/254 of the largest number of its row.
    """
    exact = numbers.to(torch.float32)
    scale = exact.abs().amax(dim=-1, keepdim=True) / _LARGEST
    # A row of zeros has no scale to divide by.
    whole = torch.round(exact / torch.where(scale == 0, 1.0, scale)).to(torch.int8)
    return torch.cat([whole, scale.contiguous().view(torch.int8)], dim=-1)


def dequantize(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """int8 ``[..., head_dim + SCALE_BYTES]`` to ``[..., head_dim]``; the product is rounded once, to ``dtype``."""
    scale = stored[..., -SCALE_BYTES:].view(torch.float32)
    return (stored[..., :-SCALE_BYTES].to(torch.float32) * scale).to(dtype)
