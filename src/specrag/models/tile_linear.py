"""bf16 linear layers on Intel AMX tiles, computed by a compiled loop of our own.

Every number of rows is computed by the same loop in the same order of sums, so a row's bits never depend on the other
rows. Blocks of 32 by 32 outputs are computed in tiles; while one block is multiplied, the one before is rounded, added
to the residual or passed through the gate.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from specrag.engine import inlined, threaded
from specrag.engine.cpu import amx as tiles
from specrag.engine.cpu.amx import (
    BLOCK,
    BLOCK_BYTES,
    DEPTH,
    TILE,
    add,
    call,
    clear,
    configure,
    emitted,
    empty_rows,
    fetch,
    load,
    release,
    store,
)
from specrag.engine.cpu.avx512 import FLOATS, exp, floats, load_halves, store_halves
from specrag.engine.cpu.avx512 import load as load_floats
from specrag.engine.cpu.bfloat16 import longs
from specrag.engine.cpu.pages import use_huge_pages
from specrag.engine.cpu.threads import call_at, openmp
from specrag.errors import SpecragError

#: A gate of less than minus this lets nothing pass.
_SHUT = 80.0


def _round(builder: Any, sums: Any, out: Any) -> None:
    for half in range(2):
        store_halves(builder, load_floats(builder, sums, 64 * half), out, 32 * half)


def _round_with(builder: Any, sums: Any, out: Any, added: Any) -> None:
    for half in range(2):
        total = builder.fadd(load_floats(builder, sums, 64 * half), load_halves(builder, added, 32 * half))
        store_halves(builder, total, out, 32 * half)


def _gate(builder: Any, sums: Any, out: Any) -> None:
    gate, up = load_floats(builder, sums, 0), load_floats(builder, sums, 64)
    # Bounded, for a quotient with infinity may be computed as no number.
    power = call(builder, "minnum.v16f32", builder.fneg(gate), floats(_SHUT), result=FLOATS)
    divisor = builder.fadd(floats(1.0), exp(builder, power))
    store_halves(builder, builder.fmul(builder.fdiv(gate, divisor), up), out)


#: ``(sums, out)``: a row of a block as 32 numbers, or as 16 numbers times their gates.
round_row, gate_row = emitted(2, _round), emitted(2, _gate)
#: ``(sums, out, added)``
round_row_with = emitted(3, _round_with)


#: Bytes of the weights that are read again for every block of rows: they stay in the second cache.
_GROUP_BYTES = 600_000
#: Inputs longer than ``_LONG`` are summed in parts of ``_PART`` multiplications, whose rows stay in the first cache.
_LONG, _PART = 1024, 16
#: How far ahead weights are fetched, bytes.
_AHEAD = 8192
#: Bytes of a panel's weights for one multiplication.
_STEP_BYTES = 2 * tiles.TILE_BYTES


class TileLinear:
    """bf16 weights in the order in which tiles read them.

    Args:
        weight: ``[out, in]``, both multiples of 32.
        gated: the first half of the outputs is a gate: SiLU of it, times the second half, is what is returned.

    Raises:
        SpecragError: the weights do not fit (:meth:`fits`).
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, gated: bool = False
    ) -> None:
        if not self.fits(weight):  # and the tiles are asked for
            raise SpecragError(f"weight: no tiles for {tuple(weight.shape)}; take another layer")
        outputs, inputs = weight.shape
        weight = weight.contiguous()
        if gated:  # a panel holds gates and what they multiply
            weight = weight.view(2, outputs // BLOCK, TILE, inputs).transpose(0, 1).reshape(outputs, inputs)
        # [panel, step, half, pair, column, number of the pair]
        tiled = weight.view(outputs // BLOCK, 2, TILE, inputs // DEPTH, TILE, 2).permute(0, 3, 1, 4, 2, 5)
        self._weight = tiled.contiguous()
        use_huge_pages(self._weight.data_ptr(), self._weight.nbytes)
        self._bias = bias
        self._gated = gated
        self._outputs, self._inputs = outputs, inputs
        self._width = outputs // 2 if gated else outputs
        self._whole = tiles.setting()
        self._steps = inputs // DEPTH
        _multiply()  # compiled, or fetched from the disk, before a pass waits for it

    @staticmethod
    def fits(weight: torch.Tensor) -> bool:
        """Whether this machine computes these weights with tiles."""
        whole = weight.shape[0] % BLOCK == 0 and weight.shape[1] % DEPTH == 0
        on_cpu = weight.dtype == torch.bfloat16 and weight.device.type == "cpu"
        return on_cpu and whole and tiles.available()

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        rows = x.shape[0]
        x = x if x.stride(-1) == 1 else x.contiguous()
        # What a gate lets pass goes into the next product; all else is taken to lie side by side.
        room = (rows, self._width)
        out = empty_rows(*room) if self._gated else torch.empty(room, dtype=torch.bfloat16)
        if not rows:
            return out
        added = self._bias if residual is None else residual.contiguous()
        threads = torch.get_num_threads()
        helpers = openmp() if threads > 1 else None
        parts = threads if helpers is not None else 1
        part = self._steps if rows <= BLOCK or self._inputs <= _LONG else _PART
        group = max(_GROUP_BYTES // (part * _STEP_BYTES), 1)
        blocks = 2 if part == self._steps else -(-rows // BLOCK) * group
        sums = np.empty(parts * blocks * BLOCK_BYTES + 64, dtype=np.uint8)
        rest = tiles.setting(rows % BLOCK or BLOCK)
        given = np.array(
            [
                x.data_ptr(),
                x.stride(0) * x.itemsize,
                self._weight.data_ptr(),
                out.data_ptr(),
                out.stride(0) * out.itemsize,
                0 if added is None else added.data_ptr(),
                0 if added is None or added.dim() == 1 else added.stride(0) * added.itemsize,
                rows,
                self._steps,
                self._outputs // BLOCK,
                group,
                part,
                self._gated,
                -(-sums.ctypes.data // 64) * 64,
                self._whole.ctypes.data,
                rest.ctypes.data,
                0 if helpers is None else helpers.number,
                0 if helpers is None else helpers.count,
                blocks * BLOCK_BYTES,
            ],
            dtype=np.int64,
        )
        loop = _multiply()
        if helpers is None:
            loop.ctypes(given.ctypes.data)
        else:
            helpers.run(loop.address, given.ctypes.data, threads, 0)
        return out if residual is None or self._bias is None else out.add_(self._bias)


# The loop's arguments, 64-bit whole numbers in the order in which a call gives them; strides are in bytes:
#   0 x (address), 1 its stride, 2 the weight (address), 3 the outputs (address), 4 their stride,
#   5 what is added to them (address; 0 for nothing), 6 its stride (0 for a bias), 7 rows, 8 steps,
#   9 panels of 32 columns, 10 panels that are computed beside each other, 11 steps before the sums are put aside,
#   12 whether a panel holds 16 columns of a gate and 16 that it multiplies,
#   13 room for the sums (address): two blocks of each thread, and of each panel of a group if its sums are put aside,
#   14 and 15 settings of the tiles (addresses) for whole blocks and for the last rows,
#   16 and 17 functions that tell a thread its number and how many there are (0 if it is alone),
#   18 bytes of a thread's room for sums.


@inlined
def _finish(given: Any, sums: int, row: int, panel: int, done: int, count: int) -> None:
    """Write the outputs of some of a block's rows.

    Args:
        sums: of the block.
        row, panel: where the block begins.
        done, count: the first of its rows, and the one behind the last.
    """
    out, added = given[3] + panel * (32 if given[12] else 64), given[5] + panel * 64
    for here in range(done, count):
        place, target = sums + here * 4 * BLOCK, out + (row + here) * given[4]
        if given[12]:
            gate_row(place, target)
        elif given[5]:
            round_row_with(place, target, added + (row + here) * given[6])
        else:
            round_row(place, target)


@cache
def _multiply() -> Any:  # noqa: C901 - one compiled loop
    """The loop; compiled when it is first asked for, since no other processor knows its instructions."""

    @threaded
    def run(place: int) -> None:  # noqa: C901 - one compiled loop
        given = longs(place)
        x, x_stride, rows, steps, panels, group, part = (
            given[0], given[1], given[7], given[8], given[9], given[10], given[11],
        )  # fmt: skip
        thread, threads = (call_at(given[16]), call_at(given[17])) if given[17] else (0, 1)
        sums = given[13] + thread * given[18]
        begin, end = panels * thread // threads, panels * (thread + 1) // threads
        # The block before, of which `done` of `count` rows are written.
        last, last_row, last_panel, done, count = 0, 0, 0, 0, 0
        turn = 0
        for first in range(begin, end, group):
            for step in range(0, steps, part):
                for row in range(0, rows, BLOCK):
                    here = min(rows - row, BLOCK)
                    configure(given[14] if here == BLOCK else given[15])
                    for panel in range(first, min(first + group, end)):
                        if part < steps:
                            own = sums + (row // BLOCK * group + panel - first) * BLOCK_BYTES
                        else:  # two places by turns, since the block before is still waiting in the other
                            turn ^= 1
                            own = sums + turn * BLOCK_BYTES
                        if step == 0:
                            clear()
                        else:
                            load(own, here)
                        left = x + row * x_stride + step * 64
                        right = given[2] + (panel * steps + step) * _STEP_BYTES
                        for _ in range(min(part, steps - step)):
                            if row == 0:
                                fetch(right + _AHEAD)
                            add(left, x_stride, right, here)
                            left += 64
                            right += _STEP_BYTES
                            if done < count:
                                _finish(given, last, last_row, last_panel, done, min(done + 2, count))
                                done += 2
                        store(own, here)
                        if step + part >= steps:
                            _finish(given, last, last_row, last_panel, done, count)
                            last, last_row, last_panel, done, count = own, row, panel, 0, here
        _finish(given, last, last_row, last_panel, done, count)
        release()

    return run
