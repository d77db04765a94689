"""What lies between the attention of one layer and the next in one go, for passes of few rows in 8 bits.

Of the seven operations there (projection, norm, gate and up, gate, down, norm, queries with keys and values) each is
a compiled loop. To start one from Python takes as long as to run it for a few rows: its arguments are looked up again,
its results get new memory, and weights that pass by have pushed the interpreter out of the caches. Here arguments are
written once for each number of rows, results always go to the same memory, and torch's threads run all seven loops
before they come back. They are the loops of the single operations: a row has the same bits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from specrag.engine import threaded_exact
from specrag.engine.cpu.amx import empty_rows
from specrag.engine.cpu.bfloat16 import longs
from specrag.engine.cpu.threads import LoopThreads, OpenMP, call_with, openmp
from specrag.models.int8_product import Int8Product
from specrag.models.linear import GatedLinear, Int8Linear, Linear
from specrag.models.row_ops import SHARED_NUMBERS, gate_step, norm_step


@threaded_exact
def _run_steps(place: int) -> None:
    """Arguments: how many steps there are, the barrier's address, and of each step its loop's and its arguments'."""
    given: Any = longs(place)
    for step in range(given[0]):
        call_with(given[2 + 2 * step], given[3 + 2 * step])
        call_with(given[1], 0)  # takes nothing, and does not look for it


@dataclass(slots=True)
class DecoderLayer:
    """The parts of a layer.

    Attributes:
        qkv: queries, keys and values, side by side.
        output: of the attention, plus what went into the layer.
        gated: the activated half of the feed-forward part.
        window: how many positions a row sees, itself included; ``None`` for all.
    """

    attention_norm: torch.Tensor
    qkv: Linear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: Linear
    mlp_norm: torch.Tensor
    gated: Callable[[torch.Tensor], torch.Tensor]
    down: Linear
    window: int | None

    def products(self) -> tuple[Int8Product, ...] | None:
        """Of output, gate and up, down, and queries with keys and values, if all are compiled loops in 8 bits."""
        gate_up = self.gated.linear if isinstance(self.gated, GatedLinear) else None
        linears = self.output, gate_up, self.down, self.qkv
        found = [linear.loop for linear in linears if isinstance(linear, Int8Linear) and linear.loop]
        return tuple(found) if len(found) == len(linears) else None


class FusedLayers:
    """A model's layers, fused for each number of rows that is asked for.

    Args:
        layers: in their order.
        products: of each layer (:meth:`DecoderLayer.products`).
        eps: of the norms.
        helpers: the threads.
    """

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        products: Sequence[tuple[Int8Product, ...]],
        eps: float,
        helpers: OpenMP,
    ) -> None:
        self.layers, self.products, self.eps, self.helpers = layers, products, eps, helpers
        widest = max(product.inputs for each in products for product in each)
        # More rows are computed by single operations, whose rows threads share out.
        self._most = (SHARED_NUMBERS - 1) // widest
        self._free: dict[tuple[int, int], list[FusedRows]] = defaultdict(list)

    @classmethod
    def made_of(cls, layers: Sequence[DecoderLayer], eps: float) -> FusedLayers | None:
        """None where not all linear layers are compiled loops in 8 bits."""
        helpers = openmp()
        products = [found for layer in layers if (found := layer.products()) is not None]
        return None if helpers is None or len(products) < len(layers) else cls(layers, products, eps, helpers)

    @contextmanager
    def rows(self, count: int) -> Iterator[FusedRows | None]:
        """For a pass of so many rows; None for more than pay. Each thread that runs passes gets memory of its own."""
        if count > self._most:
            yield None
            return
        free = self._free[count, torch.get_num_threads()]
        try:
            fused = free.pop()
        except IndexError:
            fused = FusedRows(self, count)
        try:
            yield fused
        finally:
            free.append(fused)


class FusedRows:
    """The loops between the layers' attentions for one number of rows, and the memory of their results."""

    def __init__(self, fused: FusedLayers, rows: int) -> None:
        layers, products, eps, helpers = fused.layers, fused.products, fused.eps, fused.helpers
        self._helpers, self._threads = helpers, LoopThreads()
        output, gate_up, down, qkv = products[0]
        self._x = torch.empty((rows, output.outputs), dtype=torch.bfloat16)
        self._qkv = torch.empty((rows, qkv.outputs), dtype=torch.bfloat16)
        normed = empty_rows(rows, output.outputs)
        both = torch.empty((rows, gate_up.outputs), dtype=torch.bfloat16)
        gated = torch.empty((rows, down.inputs), dtype=torch.bfloat16)
        mixed = torch.empty((rows, output.inputs), dtype=torch.bfloat16)
        room = max(product.room(rows) for product in products[0])
        self._scratch = torch.empty((self._threads.size, room), dtype=torch.uint8)
        self._kept: list[Any] = [normed, both, gated]
        self._first: list[np.ndarray] = []
        self._programs: list[int] = []
        for layer, after, own, next_ones in zip(layers, layers[1:], products, products[1:], strict=False):
            steps = [
                self._product(own[0], mixed, self._x, self._x),
                norm_step(helpers, self._x, layer.mlp_norm, eps, normed),
                self._product(own[1], normed, both),
                gate_step(helpers, both, gated),
                self._product(own[2], gated, self._x, self._x),
                norm_step(helpers, self._x, after.attention_norm, eps, normed),
                self._product(next_ones[3], normed, self._qkv),
            ]
            places = [place for loop, given in steps for place in (loop.address, given.ctypes.data)]
            program = np.array([len(steps), helpers.barrier, *places], dtype=np.int64)
            self._kept += [program, *(given for _, given in steps)]
            self._first.append(steps[0][1])
            self._programs.append(program.ctypes.data)

    def advance(self, index: int, mixed: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """From a layer's attention to the next one's.

        Args:
            index: of the layer.
            mixed: its attention's result, ``[rows, heads * head_dim]``.
            x: what went into the layer, ``[rows, hidden_size]``.

        Returns:
            What goes into the next layer, and its queries, keys and values, both overwritten by the next call.
        """
        first = self._first[index]
        first[8], first[9], first[13] = mixed.data_ptr(), mixed.stride(0), x.data_ptr()
        self._helpers.run(_run_steps.address, self._programs[index], self._threads.size, 0)
        return self._x, self._qkv

    def _product(
        self, product: Int8Product, x: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[Any, np.ndarray]:
        return product.prepare(x, out, self._threads, self._scratch, residual)
