"""The lean decoder's operations between matrix products: RMS norm, rotary embedding and SiLU gates.

In bf16 on the CPU they are compiled loops: torch's operations take longer to start than to compute a few rows. The
many rows of a prompt are shared out over torch's threads. A row's bits do not depend on the other rows.

The weights of queries and keys are reordered at load so that the two numbers of a rotated pair are neighbours;
attention scores do not change, and the rotation is one complex product in fp32.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from specrag.engine import fastmath, inlined, threaded
from specrag.engine.cpu.amx import empty_rows
from specrag.engine.cpu.bfloat16 import exp, floats, halves, longs, narrow, widen
from specrag.engine.cpu.threads import LoopThreads, OpenMP, call_at, openmp


def pair_order(head_dim: int) -> torch.Tensor:
    """For each place of the reordered head, the place that it had: ``[head_dim]``."""
    half = head_dim // 2
    return torch.stack([torch.arange(half), torch.arange(half) + half], dim=1).flatten()


def interleave(weight: torch.Tensor, heads: int, head_dim: int) -> torch.Tensor:
    """Reorder a projection's outputs, ``[heads * head_dim, ...]``."""
    shaped = weight.unflatten(0, (heads, head_dim))
    turned: torch.Tensor = shaped[:, pair_order(head_dim)]
    return turned.flatten(0, 1)


class Rotary:
    """Angles of every position.

    Args:
        config: a transformers configuration; its rope parameters, scaled kinds included, are read by
            transformers' own functions.
        head_dim: size of a head, all of it rotated.
    """

    def __init__(self, config: Any, head_dim: int, device: torch.device) -> None:
        parameters = dict(getattr(config, "rope_parameters", None) or {})
        kind = parameters.get("rope_type", "default")
        self.scaling = 1.0
        if kind == "default":
            theta = parameters.get("rope_theta", getattr(config, "rope_theta", 10_000.0))
            exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
            self.inverse = (1.0 / theta**exponents).to(device)
        else:
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            inverse, self.scaling = ROPE_INIT_FUNCTIONS[kind](config, device)
            self.inverse = inverse.to(device)

    def turns(self, positions: list[int]) -> torch.Tensor:
        """What the pairs of a row at each position are multiplied by, complex ``[rows, head_dim / 2]``."""
        angles = (
            torch.tensor(positions, dtype=torch.float32, device=self.inverse.device)[:, None] * self.inverse
        )
        return torch.polar(torch.full_like(angles, self.scaling), angles)

    def moved(self, keys: torch.Tensor, distance: int) -> torch.Tensor:
        """Keys that were rotated for one position as they are ``distance`` positions later, computed in float32.

        Args:
            keys: ``[..., head_dim]``.
        """
        angles = distance * self.inverse
        turn = torch.polar(torch.ones_like(angles), angles)
        pairs = torch.view_as_complex(keys.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * turn).flatten(-2).to(keys.dtype)


#: From so many numbers on threads share an operation: below, waking them takes longer.
SHARED_NUMBERS = 2**16


class RowOps(Protocol):
    """The operations."""

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """The root-mean-square norm of each row, ``[rows, size]``, times ``weight`` ``[size]``."""

    def rotation(self, turns: torch.Tensor, factors: torch.Tensor) -> Any:
        """What a pass's rotations have in common.

        Args:
            turns: complex ``[rows, head_dim / 2]`` (:meth:`specrag.models.row_ops.Rotary.turns`).
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
        rows, size = x.shape
        out = empty_rows(rows, size)
        places = x.data_ptr(), weight.data_ptr(), out.data_ptr()
        if not share(_shared_norm, rows, x.numel(), *places, size, out.stride(0), number=eps):
            _norm(*places, rows, size, out.stride(0), eps)
        return out

    def rotation(self, turns: torch.Tensor, factors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return turns.contiguous(), factors.contiguous()

    def rotate(self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        turns, factors = rotation
        rows, heads, size = x.shape
        given = x.data_ptr(), x.stride(0), size, turns.data_ptr(), factors.data_ptr(), heads
        if not share(_shared_rotate, rows, x.numel(), *given):
            _rotate(*given, rows)
        return x

    def gate(self, x: torch.Tensor) -> torch.Tensor:
        rows, size = x.shape[0], x.shape[1] // 2
        out = torch.empty((rows, size), dtype=x.dtype)
        if not share(_shared_gate, rows, out.numel(), x.data_ptr(), out.data_ptr(), size):
            _gate(x.data_ptr(), out.data_ptr(), rows, size)
        return out


def row_ops(dtype: torch.dtype, device: torch.device) -> RowOps:
    """The faster operations for this kind of numbers."""
    return CompiledOps() if dtype == torch.bfloat16 and device.type == "cpu" else TorchOps()


def share(loop: Any, rows: int, numbers: int, *given: int, number: float = 0.0) -> bool:
    """Run a loop on all threads, if there are enough numbers; whether it did.

    Args:
        loop: takes the address of ``rows``, the functions that tell a thread its number and how many there are,
            ``number`` as a float32, and ``given``, in 64 bits each.
    """
    threads = torch.get_num_threads()
    helpers = openmp() if numbers >= SHARED_NUMBERS and threads > 1 else None
    if helpers is None:
        return False
    arguments = _arguments(helpers, rows, number, *given)  # kept until the loop has run
    helpers.run(loop.address, arguments.ctypes.data, threads, 0)
    return True


def _arguments(helpers: OpenMP | LoopThreads, rows: int, number: float, *given: int) -> np.ndarray:
    """What a shared loop takes (:func:`share`)."""
    arguments = np.array([rows, helpers.number, helpers.count, 0, *given], dtype=np.int64)
    arguments.view(np.float32)[6] = number
    return arguments


def norm_step(
    threads: LoopThreads, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
) -> tuple[Any, np.ndarray]:
    """:meth:`RowOps.norm` of bf16 on the CPU as a shared loop and its arguments."""
    places = x.data_ptr(), weight.data_ptr(), out.data_ptr()
    return _shared_norm, _arguments(threads, x.shape[0], eps, *places, x.shape[1], out.stride(0))


@inlined
def mine(given: Any) -> Any:
    """The rows of this thread: the first, and the one behind the last."""
    thread, threads = (call_at(given[1]), call_at(given[2])) if given[1] else (0, 1)
    return given[0] * thread // threads, given[0] * (thread + 1) // threads


@inlined
def _norm_rows(
    x: int, weight: int, out: int, first: int, last: int, size: int, out_stride: int, eps: Any
) -> None:
    numbers, weights, results = halves(x), halves(weight), halves(out)
    for row in range(first, last):
        start = row * size
        total = np.float32(0.0)
        for i in range(size):
            value = widen(numbers[start + i])
            total += value * value
        scale = np.float32(1.0) / np.sqrt(total / np.float32(size) + np.float32(eps))
        for i in range(size):
            results[row * out_stride + i] = narrow(widen(numbers[start + i]) * scale * widen(weights[i]))


@inlined
def _rotate_rows(
    x: int, row_stride: int, head_dim: int, turns: int, factors: int, heads: int, first: int, last: int
) -> None:
    numbers, circle, scales = halves(x), floats(turns), floats(factors)
    pairs = head_dim // 2
    for row in range(first, last):
        angle = row * head_dim
        for head in range(heads):
            factor = scales[head]
            start = row * row_stride + head * head_dim
            for pair in range(pairs):
                real, imaginary = circle[angle + 2 * pair] * factor, circle[angle + 2 * pair + 1] * factor
                one, two = widen(numbers[start + 2 * pair]), widen(numbers[start + 2 * pair + 1])
                numbers[start + 2 * pair] = narrow(one * real - two * imaginary)
                numbers[start + 2 * pair + 1] = narrow(one * imaginary + two * real)


@inlined
def _gate_rows(x: int, out: int, first: int, last: int, size: int) -> None:
    numbers, results = halves(x), halves(out)
    for row in range(first, last):
        start = row * 2 * size
        for i in range(size):
            gate = widen(numbers[start + i])
            up = widen(numbers[start + size + i])
            results[row * size + i] = narrow(gate / (np.float32(1.0) + exp(-gate)) * up)


@fastmath
def _norm(x: int, weight: int, out: int, rows: int, size: int, out_stride: int, eps: float) -> None:
    _norm_rows(x, weight, out, 0, rows, size, out_stride, eps)


@threaded
def _shared_norm(address: int) -> None:
    given = longs(address)
    first, last = mine(given)
    _norm_rows(given[4], given[5], given[6], first, last, given[7], given[8], floats(address + 24)[0])


@fastmath
def _rotate(x: int, row_stride: int, head_dim: int, turns: int, factors: int, heads: int, rows: int) -> None:
    _rotate_rows(x, row_stride, head_dim, turns, factors, heads, 0, rows)


@threaded
def _shared_rotate(address: int) -> None:
    given = longs(address)
    first, last = mine(given)
    _rotate_rows(given[4], given[5], given[6], given[7], given[8], given[9], first, last)


@fastmath
def _gate(x: int, out: int, rows: int, size: int) -> None:
    _gate_rows(x, out, 0, rows, size)


@threaded
def _shared_gate(address: int) -> None:
    given = longs(address)
    first, last = mine(given)
    _gate_rows(given[4], given[5], first, last, given[6])
