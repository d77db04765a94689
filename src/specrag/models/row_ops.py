"""What the lean decoder computes row by row between its matrix products: norms, rotation, gates.

On the CPU in bf16 compiled loops do it: torch's operations take longer to start than to compute a few rows. A row's
bits do not depend on the other rows.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from specrag.engine.bfloat16 import exp, halves, narrow, widen
from specrag.engine.compiling import reordered


class RowOps(Protocol):
    """The operations."""

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """The root-mean-square norm of each row, ``[rows, size]``, times ``weight`` ``[size]``."""

    def rotation(self, turns: torch.Tensor, factors: torch.Tensor) -> Any:
        """What a pass's rotations have in common.

        Args:
            turns: complex ``[rows, head_dim / 2]`` (:meth:`specrag.models.rotary.Rotary.turns`).
            factors: of each head beside the rotation, ``[heads]``: the softmax scale for queries, 1 for keys.
        """

    def rotate(self, x: torch.Tensor, rotation: Any) -> torch.Tensor:
        """Rotate ``[rows, heads, head_dim]``, computed in float32; perhaps in place. The heads lie side by side."""

    def gate(self, x: torch.Tensor) -> torch.Tensor:
        """``[rows, 2 * size]`` to ``[rows, size]``: SiLU of the first half times the second."""


class TorchOps:
    """Every dtype and device."""

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def rotation(self, turns: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        return turns[:, None] * factors[None, :, None]

    def rotate(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * rotation).flatten(-2).to(x.dtype)

    def gate(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


class CompiledOps:
    """bf16 on the CPU."""

    def __init__(self) -> None:
        # Compiled, or fetched from the disk, before a pass waits for it.
        x = torch.zeros((1, 2), dtype=torch.bfloat16)
        self.norm(x, x[0], 1.0)
        self.rotate(x[None], self.rotation(torch.zeros((1, 1), dtype=torch.complex64), torch.ones(1)))
        self.gate(x)

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty_like(x)
        _norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.shape[0], x.shape[1], eps)
        return out

    def rotation(self, turns: torch.Tensor, factors: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        return turns.numpy(), factors.numpy()

    def rotate(self, x: torch.Tensor, rotation: tuple[np.ndarray, np.ndarray]) -> torch.Tensor:
        _rotate(x.data_ptr(), x.stride(0), x.shape[2], *rotation)
        return x

    def gate(self, x: torch.Tensor) -> torch.Tensor:
        rows, size = x.shape[0], x.shape[1] // 2
        out = torch.empty((rows, size), dtype=x.dtype)
        _gate(x.data_ptr(), out.data_ptr(), rows, size)
        return out


def row_ops(dtype: torch.dtype, device: torch.device) -> RowOps:
    """The faster operations for this kind of numbers."""
    return CompiledOps() if dtype == torch.bfloat16 and device.type == "cpu" else TorchOps()


@reordered
def _norm(x: int, weight: int, out: int, rows: int, size: int, eps: float) -> None:
    numbers, weights, results = halves(x), halves(weight), halves(out)
    for row in range(rows):
        start = row * size
        total = np.float32(0.0)
        for i in range(size):
            value = widen(numbers[start + i])
            total += value * value
        scale = np.float32(1.0) / np.sqrt(total / np.float32(size) + np.float32(eps))
        for i in range(size):
            results[start + i] = narrow(widen(numbers[start + i]) * scale * widen(weights[i]))


@reordered
def _rotate(x: int, row_stride: int, head_dim: int, turns: np.ndarray, factors: np.ndarray) -> None:
    numbers = halves(x)
    for row in range(turns.shape[0]):
        for head in range(factors.shape[0]):
            factor = factors[head]
            start = row * row_stride + head * head_dim
            for pair in range(turns.shape[1]):
                turn = turns[row, pair]
                real, imaginary = turn.real * factor, turn.imag * factor
                first, second = widen(numbers[start + 2 * pair]), widen(numbers[start + 2 * pair + 1])
                numbers[start + 2 * pair] = narrow(first * real - second * imaginary)
                numbers[start + 2 * pair + 1] = narrow(first * imaginary + second * real)


@reordered
def _gate(x: int, out: int, rows: int, size: int) -> None:
    numbers, results = halves(x), halves(out)
    for row in range(rows):
        start = row * 2 * size
        for i in range(size):
            gate = widen(numbers[start + i])
            up = widen(numbers[start + size + i])
            results[row * size + i] = narrow(gate / (np.float32(1.0) + exp(-gate)) * up)
