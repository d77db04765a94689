"""Rows times 8-bit weights in one compiled loop: quantised, multiplied and rescaled as the weights pass by.

To start oneDNN's product, and torch's operations before and behind it, takes as long as to read the weights of a small
model. Sums are whole numbers and scales are applied in oneDNN's order: a row has the bits that its product gives it.

Few rows are multiplied by vectors, and more of them by AMX tiles where there are any: one layout suits both.

Two Zen 4 cores, microseconds with oneDNN and here: 1 row by 576 x 960 66 and 12, by 1536 x 17920 395 and 316; 240 rows
by the latter 17,000 and 15,400.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from specrag.engine import inlined_exact, threaded_exact
from specrag.engine.cpu import amx as tiles
from specrag.engine.cpu import vnni
from specrag.engine.cpu.bfloat16 import floats, longs
from specrag.engine.cpu.pages import use_huge_pages
from specrag.engine.cpu.threads import LoopThreads, call_at
from specrag.engine.cpu.vnni import DEPTH, PANEL, ROWS
from specrag.models.int8_outputs import write_gated, write_row
from specrag.models.int8_rows import ZERO_POINT, quantise, quantise_rows
from specrag.models.row_ops import SHARED_NUMBERS

#: What becomes of the sums.
_PLAIN, _LOGITS, _GATED = 0, 1, 2
#: Rows from which tiles are the faster way (two Xeon cores, Qwen2.5-Coder-1.5B: a pass of 3 rows takes 67 ms with them
#: and 74 without, one of 6 70 and 88, one of 2 the same).
_TILED_ROWS = 3
#: Bytes of the sums of a panel, of as many rows as are multiplied at once.
_SUM_BYTES = max(ROWS, tiles.TILE) * tiles.PANEL_ROW
#: Of as many as a thread keeps: of two panels, twice.
_SUMS_BYTES = 4 * _SUM_BYTES


class Int8Product:
    """The products of rows with one matrix.

    Args:
        weight: int8 ``[outputs, inputs]``.
        scale: of each output, float32 ``[outputs]``.
        bias: bf16 ``[outputs]``.
        gated: the first half of the outputs are gates for the second, without bias; a result has half as many numbers.

    Attributes:
        inputs, outputs: numbers of a row, and of its result.
        nbytes: of the weights.
    """

    def __init__(
        self, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, gated: bool = False
    ) -> None:
        columns, self.inputs = weight.shape
        if gated:
            weight, scale = _in_turns(weight), _in_turns(scale)
        self.nbytes = weight.nbytes
        self.outputs = columns // 2 if gated else columns
        self._mode = _GATED if gated else _PLAIN
        self._bias = bias
        # What the zero point adds to each sum.
        # numpy adds 8-bit numbers fifteen times as fast as torch.
        self._shift = torch.from_numpy(weight.numpy().sum(axis=1, dtype=np.int32) * ZERO_POINT)
        packed = _packed(weight)
        use_huge_pages(packed.data_ptr(), packed.nbytes)
        self._kept = packed, scale
        # The loops' arguments. 0: rows; 1, 2: functions that tell a thread its number and how many there are, 0 if
        # alone; 3 to 5: addresses of weights, scales, shifts; 6, 7: numbers of a result, inputs; 8, 9: rows in bf16,
        # numbers from one to the next; 10, 11: results, what becomes of the sums; 12, 13: bias, residual, 0 for none;
        # 14, 15: scratch, bytes of it for a thread; 16, 17: rows in 8 bits and their steps, if they are computed; 18:
        # bytes from row to row of those; 19, 20: settings of the tiles for sixteen rows and for the last ones; 21:
        # panels of which the sums of a row are needed at once.
        self._given = np.zeros(22, dtype=np.int64)
        self._given[3:8] = (
            packed.data_ptr(), scale.data_ptr(), self._shift.data_ptr(), self.outputs, self.inputs,
        )  # fmt: skip
        self._given[21] = 2 if gated else 1
        self._tiled = tiles.has_octets() and self.inputs % tiles.OCTETS == 0
        _multiply()  # compiled, or fetched from the disk, before a pass waits for it
        if self._tiled:
            _multiply_tiles()

    @staticmethod
    def serves(weight: torch.Tensor, gated: bool = False) -> bool:
        """Whether the processor has the instructions, and the matrix is of whole panels and steps."""
        outputs, inputs = weight.shape
        return vnni.available() and outputs % (2 * PANEL if gated else PANEL) == 0 and inputs % DEPTH == 0

    def linear(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """bf16 ``[rows, outputs]``, with bias and ``residual``, of the same size; gated without them."""
        out = torch.empty((x.shape[0], self.outputs), dtype=torch.bfloat16)
        residual = None if residual is None else residual.contiguous()
        self._run(x, out, self._mode, residual)
        return out

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """float32 ``[rows, outputs]``, without bias."""
        out = torch.empty((x.shape[0], self.outputs))
        self._run(x, out, _LOGITS, None)
        return out

    def _run(self, x: torch.Tensor, out: torch.Tensor, mode: int, residual: torch.Tensor | None) -> None:
        if x.stride(1) != 1:
            x = x.contiguous()
        threads = LoopThreads()
        is_shared = x.numel() >= SHARED_NUMBERS
        scratch = torch.empty((threads.size, self.room(0 if is_shared else x.shape[0])), dtype=torch.uint8)
        loop, given = self.prepare(x, out, threads, scratch, residual, mode)
        if is_shared:
            numbers, steps = quantise(x, int(given[18]))
            given[16], given[17] = numbers.data_ptr(), steps.data_ptr()
        threads.run(loop, given.ctypes.data)

    def room(self, rows: int) -> int:
        """Bytes of scratch that a thread needs to quantise so many rows for itself, and to multiply them."""
        return _SUMS_BYTES + _aligned(rows * self._apart(rows)) + _aligned(4 * rows)

    def prepare(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        threads: LoopThreads,
        scratch: torch.Tensor,
        residual: torch.Tensor | None = None,
        mode: int | None = None,
    ) -> tuple[Any, np.ndarray]:
        """The loop and its arguments, in which each thread quantises all rows for itself.

        Args:
            x: bf16 ``[rows, inputs]``, the numbers of a row side by side.
            out: ``[rows, outputs]``; may be ``residual`` itself.
            scratch: bytes ``[threads, room]``, at least :meth:`room`.
        """
        rows = x.shape[0]
        is_tiled = self._is_tiled(rows)
        given = self._given.copy()
        given[0], given[1], given[2] = rows, threads.number, threads.count
        given[8], given[9], given[10] = x.data_ptr(), x.stride(0), out.data_ptr()
        given[11] = self._mode if mode is None else mode
        given[12] = 0 if self._bias is None or mode == _LOGITS else self._bias.data_ptr()
        given[13] = 0 if residual is None else residual.data_ptr()
        given[14], given[15], given[18] = scratch.data_ptr(), scratch.shape[1], self._apart(rows)
        if is_tiled:
            given[19] = tiles.panel_setting().ctypes.data
            given[20] = tiles.panel_setting(rows % tiles.TILE or tiles.TILE).ctypes.data
        return _multiply_tiles() if is_tiled else _multiply(), given

    def _is_tiled(self, rows: int) -> bool:
        return self._tiled and rows >= _TILED_ROWS

    def _apart(self, rows: int) -> int:
        """Bytes from row to row in 8 bits."""
        return tiles.row_bytes(self.inputs) if self._is_tiled(rows) else self.inputs


def _in_turns(halves: torch.Tensor) -> torch.Tensor:
    """Gates, and behind them what they are for, in turns: a panel of gates, and one of what they are for."""
    turned: torch.Tensor = halves.unflatten(0, (2, -1, PANEL)).transpose(0, 1)
    return turned.flatten(0, 2)


def _packed(weight: torch.Tensor) -> torch.Tensor:
    """In panels, each of them by steps of inputs, each of those by outputs: ``[panels, steps, PANEL, DEPTH]``."""
    steps = weight.contiguous().view(torch.int32)  # of DEPTH numbers each, which move as one
    panels: torch.Tensor = steps.unflatten(0, (-1, PANEL)).transpose(1, 2)
    return panels.contiguous().view(torch.int8)


def _aligned(size: int) -> int:
    """A size in whole lines of the cache."""
    return (size + 63) // 64 * 64


aligned = inlined_exact(_aligned)


@inlined_exact
def _quantised(given: Any, scratch: int) -> Any:
    """Addresses of the rows in 8 bits, and of their steps; computed here if that is not done yet."""
    if given[16]:
        return given[16], given[17]
    steps = scratch + aligned(given[0] * given[18])
    quantise_rows(given[8], given[9], scratch, given[18], steps, given[7], 0, given[0])
    return scratch, steps


@inlined_exact
def _write(given: Any, sums: int, first: int, done: int, count: int, panel: int, steps: int) -> None:
    """Write the outputs of some of a panel's rows.

    Args:
        sums: of the rows from ``first`` on.
        done, count: the first of them to be written, and the one behind the last.
        panel: the first of those that belong together.
    """
    mode, column = given[11], panel * PANEL
    shifts, scales = given[5] + 4 * column, given[4] + 4 * column
    start, size = (column // 2 if mode == _GATED else column), (4 if mode == _LOGITS else 2)
    bias = given[12] + 2 * start if given[12] else 0
    for row in range(done, count):
        place = (first + row) * given[6] + start
        own, step, out = sums + row * PANEL * 4, floats(steps)[first + row], given[10] + size * place
        if mode == _GATED:
            write_gated(own, own + _SUM_BYTES, shifts, scales, step, out)
        else:
            residual = given[13] + 2 * place if given[13] else 0
            write_row(own, shifts, scales, step, out, bias, residual, mode == _LOGITS)


@inlined_exact
def _own_panels(given: Any) -> Any:
    """This thread's scratch, the first of its panels, and the one behind the last."""
    thread, threads = (call_at(given[1]), call_at(given[2])) if given[1] else (0, 1)
    together = given[21]
    groups = given[6] // PANEL  # of panels that belong together
    return (
        given[14] + thread * given[15],
        groups * thread // threads * together,
        groups * (thread + 1) // threads * together,
    )


@cache
def _multiply() -> Any:
    """The loop; compiled when it is first asked for, since other processors do not know its instructions."""

    @threaded_exact
    def run(place: int) -> None:
        given: Any = longs(place)
        rows, inputs = given[0], given[7]
        sums, begin, end = _own_panels(given)
        numbers, steps = _quantised(given, sums + _SUMS_BYTES)
        for panel in range(begin, end, given[21]):
            weight = given[3] + panel * PANEL * inputs
            for first in range(0, rows, ROWS):
                count = min(rows - first, ROWS)
                for each in range(given[21]):
                    right, own = weight + each * PANEL * inputs, sums + each * _SUM_BYTES
                    vnni.multiply(numbers + first * inputs, right, own, inputs // DEPTH, count)
                _write(given, sums, first, 0, count, panel, steps)

    return run


@cache
def _multiply_tiles() -> Any:
    """The same by tiles, sixteen rows and a panel at a time; what the last ones gave is written meanwhile."""

    @threaded_exact
    def run(place: int) -> None:
        given: Any = longs(place)
        rows, inputs, apart = given[0], given[7], given[18]
        scratch, begin, end = _own_panels(given)
        numbers, steps = _quantised(given, scratch + _SUMS_BYTES)
        # The rows before, of which `done` of `count` are written.
        last, last_first, last_panel, done, count = scratch, 0, 0, 0, 0
        turn, set_for = 0, 0
        # Evenly: what waits for a division, or to be written, would keep the next tiles from being fetched.
        shares = given[21] * (inputs // tiles.OCTETS)
        share = (tiles.TILE + shares - 1) // shares
        for panel in range(begin, end, given[21]):
            weight = given[3] + panel * PANEL * inputs
            for first in range(0, rows, tiles.TILE):
                here = min(rows - first, tiles.TILE)
                if here != set_for:
                    tiles.configure(given[19] if here == tiles.TILE else given[20])
                    set_for = here
                turn ^= 1
                sums = scratch + turn * 2 * _SUM_BYTES
                for each in range(given[21]):
                    left, right = numbers + first * apart, weight + each * PANEL * inputs
                    tiles.clear()
                    for _ in range(inputs // tiles.OCTETS):
                        tiles.add_panel(left, apart, right)
                        left += tiles.OCTETS
                        right += PANEL * tiles.OCTETS
                        if done < count:
                            _write(given, last, last_first, done, min(done + share, count), last_panel, steps)
                            done += share
                    tiles.store_panel(sums + each * _SUM_BYTES)
                _write(given, last, last_first, done, count, last_panel, steps)
                last, last_first, last_panel, done, count = sums, first, panel, 0, here
        _write(given, last, last_first, done, count, last_panel, steps)
        tiles.release()

    return run
