"""What lies between the attention of one layer and the next in one go, in 8 bits.

Of the six operations there (projection, norm, gate and up, down, norm, queries with keys and values) each is a
compiled loop: those of the single operations, so that a row has the same bits. Torch's threads run all six before they
come back.

Of few rows every thread computes some columns, and waits for the others behind each loop. To start one from Python
would take as long as to run it: its arguments are looked up again, its results get new memory, and weights that pass by
have pushed the interpreter out of the caches. So arguments are written once for each number of rows, and results always
go to the same memory.

Of many rows every thread computes its own from the first loop to the last, so that what one loop writes is still in the
processor's own caches when the next one reads it. All threads then read all weights, which pays if a layer is small.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from specrag.engine import inlined_exact, threaded_exact
from specrag.engine.cpu.amx import TILE, empty_rows
from specrag.engine.cpu.bfloat16 import longs
from specrag.engine.cpu.threads import LoopThreads, OpenMP, call_at, call_with, openmp
from specrag.models.int8_product import Int8Product
from specrag.models.linear import Int8Linear, Linear
from specrag.models.row_ops import norm_step

#: Bytes of a layer's weights up to which each thread may read all of them, for its own rows, and the fewest rows of a
#: thread for which that pays (measured with two threads: 3.5 MB 0.81 to 0.91 of the time, 9.8 MB 0.88 to 0.99, 61 MB
#: 1.04 to 1.19).
_SMALL_BYTES, _PART_ROWS = 2**24, 32
#: Each thread quantises all rows for itself: the most numbers that all of them together may quantise before a product
#: (two threads, Qwen2.5-Coder-1.5B: 8 to 40 rows take 0.85 to 0.95 of what single operations take, 61 the same).
_QUANTISED_NUMBERS = 2**20


@inlined_exact
def _steps(place: int) -> None:
    """Arguments: how many steps there are, the barrier's address or 0, of each step its loop's and its arguments'."""
    given: Any = longs(place)
    for step in range(given[0]):
        call_with(given[2 + 2 * step], given[3 + 2 * step])
        if given[1]:
            call_with(given[1], 0)  # takes nothing, and does not look for it


@threaded_exact
def _run_steps(place: int) -> None:
    """Run all steps on each thread."""
    _steps(place)


@threaded_exact
def _run_parts(place: int) -> None:
    """Run each part on one thread.

    Arguments: how many parts there are, the functions that tell a thread its number and how many there are, and the
    address of each part's steps.
    """
    given: Any = longs(place)
    for part in range(call_at(given[1]), given[0], call_at(given[2])):
        _steps(given[3 + part])


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
        linears = self.output, self.gated, self.down, self.qkv
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
        self._widest = max(product.inputs for each in products for product in each)
        self._is_small = sum(product.nbytes for product in products[0]) <= _SMALL_BYTES
        self._free: dict[tuple[int, int], list[FusedRows]] = defaultdict(list)

    @classmethod
    def made_of(cls, layers: Sequence[DecoderLayer], eps: float) -> FusedLayers | None:
        """None where not all linear layers are compiled loops in 8 bits."""
        helpers = openmp()
        products = [found for layer in layers if (found := layer.products()) is not None]
        return None if helpers is None or len(products) < len(layers) else cls(layers, products, eps, helpers)

    @contextmanager
    def rows(self, count: int) -> Iterator[FusedRows | None]:
        """For a pass of so many rows; None where single operations are faster.

        Each thread that runs passes gets memory of its own.
        """
        threads = torch.get_num_threads()
        if self._is_small and count >= _PART_ROWS * threads:
            yield FusedRows(self, parts_of(count))
            return
        if count * self._widest * threads > _QUANTISED_NUMBERS:
            yield None
            return
        free = self._free[count, threads]
        try:
            fused = free.pop()
        except IndexError:
            fused = FusedRows(self, [slice(0, count)])
        try:
            yield fused
        finally:
            free.append(fused)


def parts_of(rows: int) -> list[slice]:
    """Rows as each thread takes them, in whole tiles."""
    tiles, threads = -(-rows // TILE), torch.get_num_threads()
    borders = [min(tiles * number // threads * TILE, rows) for number in range(threads + 1)]
    return [slice(*pair) for pair in itertools.pairwise(borders) if pair[0] < pair[1]]


class FusedRows:
    """The loops between the layers' attentions, and the memory of their results.

    Args:
        parts: the rows that a thread computes alone; a single part is computed by all threads together.
    """

    def __init__(self, fused: FusedLayers, parts: Sequence[slice]) -> None:
        self._fused, self._threads = fused, LoopThreads()
        output, _, down, qkv = fused.products[0]
        rows = parts[-1].stop
        self._x = torch.empty((rows, output.outputs), dtype=torch.bfloat16)
        self._qkv = torch.empty((rows, qkv.outputs), dtype=torch.bfloat16)
        self._normed = empty_rows(rows, output.outputs)
        self._gated = torch.empty((rows, down.inputs), dtype=torch.bfloat16)
        self._mixed = torch.empty((rows, output.inputs), dtype=torch.bfloat16)
        most = max(part.stop - part.start for part in parts)
        room = max(product.room(most) for product in fused.products[0])
        self._scratch = torch.empty((max(self._threads.size, len(parts)), room), dtype=torch.uint8)
        self._kept: list[np.ndarray] = []  # the loops have only their addresses
        self._firsts: list[list[tuple[slice, np.ndarray]]] = []
        self._programs: list[int] = []
        is_shared = len(parts) == 1
        self._loop = _run_steps if is_shared else _run_parts
        for index in range(len(fused.layers) - 1):
            firsts, programs = [], []
            for number, part in enumerate(parts):
                steps = self._steps(index, part, LoopThreads(is_shared), self._scratch[number:])
                self._kept += [given for _, given in steps]
                places = [place for loop, given in steps for place in (loop.address, given.ctypes.data)]
                programs.append(self._keep(len(steps), fused.helpers.barrier if is_shared else 0, *places))
                firsts.append((part, steps[0][1]))
            self._firsts.append(firsts)
            numbers = len(parts), fused.helpers.number, fused.helpers.count
            self._programs.append(programs[0] if is_shared else self._keep(*numbers, *programs))

    def advance(self, index: int, mixed: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """From a layer's attention to the next one's.

        Args:
            index: of the layer.
            mixed: its attention's result, ``[rows, heads * head_dim]``.
            x: what went into the layer, ``[rows, hidden_size]``.

        Returns:
            What goes into the next layer, and its queries, keys and values, both overwritten by the next call.
        """
        for part, first in self._firsts[index]:
            first[8], first[9] = mixed.data_ptr() + 2 * part.start * mixed.stride(0), mixed.stride(0)
            first[13] = x.data_ptr() + 2 * part.start * x.stride(0)
        self._fused.helpers.run(self._loop.address, self._programs[index], self._threads.size, 0)
        return self._x, self._qkv

    def _keep(self, *numbers: int) -> int:
        """The address of a loop's arguments."""
        self._kept.append(np.array(numbers, dtype=np.int64))
        return int(self._kept[-1].ctypes.data)

    def _steps(
        self, index: int, part: slice, threads: LoopThreads, scratch: torch.Tensor
    ) -> list[tuple[Any, np.ndarray]]:
        """The loops of some rows behind a layer's attention, and their arguments."""
        layers, eps = self._fused.layers, self._fused.eps
        output, gated, down, _ = self._fused.products[index]
        qkv = self._fused.products[index + 1][3]
        x, normed, inner = self._x[part], self._normed[part], self._gated[part]
        return [
            output.prepare(self._mixed[part], x, threads, scratch, x),
            norm_step(threads, x, layers[index].mlp_norm, eps, normed),
            gated.prepare(normed, inner, threads, scratch),
            down.prepare(inner, x, threads, scratch, x),
            norm_step(threads, x, layers[index + 1].attention_norm, eps, normed),
            qkv.prepare(normed, self._qkv[part], threads, scratch),
        ]
