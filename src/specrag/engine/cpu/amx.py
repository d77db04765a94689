"""Intel AMX matrix tiles as numba intrinsics.

A thread has eight tiles of 16 rows of 64 bytes. Here the first four hold sums. In bfloat16 these are two by two blocks
of 16 rows and 16 columns; then two tiles hold rows of the left matrix, 32 numbers of each, and two hold the right one,
of which every row is 16 pairs of numbers that are neighbours along the sum. What a tile computes depends on its own
numbers alone, and pairs are added in their order.

In 8 bits the four sums are 16 rows of a panel of 64 columns, so that weights are read in the order in which they lie:
one tile holds rows of the left matrix, and three hold the right one in turns.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from specrag.engine.compiling import inlined

#: Rows and columns of a tile of sums, and numbers that one multiplication adds to each.
TILE, DEPTH = 16, 32
#: Rows and columns of two by two tiles of sums.
BLOCK = 2 * TILE
#: 8-bit numbers that one multiplication adds to each sum, of which four lie side by side in a tile on the right; and
#: bytes of such a row of a panel (``vnni.PANEL``), or of its sums.
OCTETS, PANEL_ROW = 64, 256
#: Bytes of a tile.
TILE_BYTES = TILE * 64
#: Bytes of the sums of a block, ``[BLOCK, BLOCK]`` float32, and of what configures the tiles.
BLOCK_BYTES, SETTING_BYTES = 4 * TILE_BYTES, 64

_BYTE, _INT32, _INT64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_ADDRESS = _BYTE.as_pointer()
_SUMS, _LEFT, _RIGHT = (0, 1, 2, 3), (4, 5), (6, 7)
#: What holds 16 columns each of a panel's 64.
_PANEL_COLUMNS = (5, 6, 7, 5)

# Linux lends the tiles to a process that asks for them: ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA.
_ARCH_PRCTL, _ASK_FOR, _TILE_DATA = 158, 0x1023, 18


@cache
def features() -> Mapping[str, bool]:
    """What this processor has, by LLVM's names; nothing where numba does not compile for it, or off Linux on x86-64."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return {}
    if any(os.environ.get(f"NUMBA_{name}") for name in ("CPU_NAME", "CPU_FEATURES", "DISABLE_JIT")):
        return {}  # compiled for another processor, or not at all
    return dict(binding.get_host_cpu_features())


@cache
def available() -> bool:
    """Whether this machine has AMX tiles for bfloat16, and Linux lets this process use them."""
    if not all(features().get(name) for name in ("amx-tile", "amx-bf16", "avx512f", "avx512bf16")):
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ASK_FOR, _TILE_DATA) == 0)


def has_octets() -> bool:
    """Whether its tiles multiply 8-bit numbers, too."""
    return available() and bool(features().get("amx-int8"))


def row_bytes(size: int) -> int:
    """Bytes from row to row that tiles will read, of rows of ``size`` bytes.

    Rows of whole kilobytes lie a little further apart: they would otherwise meet in few sets of the first cache.
    """
    return size + 64 if size % 1024 == 0 else size


@cache
def setting(rows: int = BLOCK) -> np.ndarray:
    """The tile configuration for a block of so many rows, at least 1: ``[SETTING_BYTES]``, uint8; not to be changed."""
    upper, lower = min(rows, TILE), max(rows - TILE, 1)
    return _setting(upper, upper, lower, lower, upper, lower, TILE, TILE)


@cache
def panel_setting(rows: int = TILE) -> np.ndarray:
    """The same for so many rows of a panel, 1 to :data:`TILE`."""
    return _setting(rows, rows, rows, rows, rows, TILE, TILE, TILE)


def _setting(*rows: int) -> np.ndarray:
    made = np.zeros(SETTING_BYTES, dtype=np.uint8)
    made[0] = 1  # the only palette
    made[16:32].view(np.uint16)[:] = 64  # bytes of each tile's rows
    made[48:56] = rows
    made.setflags(write=False)
    return made


def empty_rows(rows: int, size: int) -> torch.Tensor:
    """Uninitialised bfloat16 rows that tiles will read if there are any, ``[rows, size]``."""
    apart = row_bytes(2 * size) // 2 if available() else size
    return torch.empty((rows, apart), dtype=torch.bfloat16)[:, :size]


def emitted(count: int, emit: Callable[..., None]) -> Any:
    """An intrinsic that takes up to three addresses or numbers and returns nothing."""

    def generate(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        emit(builder, *arguments)
        return target.get_dummy_value()

    made = types.void(*(types.int64,) * count), generate

    # numba counts the parameters of what it is given.
    def none(_context: Any) -> Any:
        return made

    def one(_context: Any, _first: Any) -> Any:
        return made

    def two(_context: Any, _first: Any, _second: Any) -> Any:
        return made

    def three(_context: Any, _first: Any, _second: Any, _third: Any) -> Any:
        return made

    return intrinsic((none, one, two, three)[count])


def call(builder: Any, name: str, *arguments: Any, result: Any = None) -> Any:
    """Call an LLVM intrinsic."""
    kind = ir.FunctionType(ir.VoidType() if result is None else result, [given.type for given in arguments])
    function: Any = cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}")  # type: ignore[no-untyped-call]
    return builder.call(function, arguments)


def address(builder: Any, place: Any, offset: int = 0) -> Any:
    """A pointer to ``offset`` bytes behind an address."""
    moved = builder.add(place, ir.Constant(_INT64, offset)) if offset else place
    return builder.inttoptr(moved, _ADDRESS)


def _tile(number: int) -> Any:
    return ir.Constant(_BYTE, number)


def _configure(builder: Any, place: Any) -> None:
    call(builder, "x86.ldtilecfg", address(builder, place))


def _release(builder: Any) -> None:
    call(builder, "x86.tilerelease")


def _clear(builder: Any) -> None:
    for tile in _SUMS:
        call(builder, "x86.tilezero", _tile(tile))


def _moving(name: str, tiles: int) -> Callable[..., None]:
    """Move sums from or to a block's place in memory, the upper two tiles or all four."""

    def emit(builder: Any, place: Any) -> None:
        row = 4 * BLOCK  # bytes
        for tile, offset in zip(_SUMS[:tiles], (0, 64, TILE * row, TILE * row + 64), strict=False):
            call(builder, name, _tile(tile), address(builder, place, offset), ir.Constant(_INT64, row))

    return emit


def _adding(lefts: int) -> Callable[..., None]:
    """Add the products of a tile's numbers to the sums of one or both halves of the rows."""
    product = "x86.tdpbf16ps"

    def emit(builder: Any, left: Any, stride: Any, right: Any) -> None:
        row = ir.Constant(_INT64, 64)
        lower = builder.add(left, builder.mul(stride, ir.Constant(_INT64, TILE)))
        # The right matrix passes by the fastest cache, which the rows of the left one need.
        call(builder, "x86.tileloaddt164", _tile(_RIGHT[0]), address(builder, right), row)
        call(builder, "x86.tileloadd64", _tile(_LEFT[0]), address(builder, left), stride)
        call(builder, product, _tile(_SUMS[0]), _tile(_LEFT[0]), _tile(_RIGHT[0]))
        call(builder, "x86.tileloaddt164", _tile(_RIGHT[1]), address(builder, right, TILE_BYTES), row)
        call(builder, product, _tile(_SUMS[1]), _tile(_LEFT[0]), _tile(_RIGHT[1]))
        if lefts == 2:
            call(builder, "x86.tileloadd64", _tile(_LEFT[1]), address(builder, lower), stride)
            call(builder, product, _tile(_SUMS[2]), _tile(_LEFT[1]), _tile(_RIGHT[0]))
            call(builder, product, _tile(_SUMS[3]), _tile(_LEFT[1]), _tile(_RIGHT[1]))

    return emit


def _add_panel(builder: Any, left: Any, stride: Any, right: Any) -> None:
    """Add the products of a tile's 8-bit numbers and a panel's to the sums."""
    row = ir.Constant(_INT64, PANEL_ROW)
    call(builder, "x86.tileloadd64", _tile(_LEFT[0]), address(builder, left), stride)
    for number, column in enumerate(_PANEL_COLUMNS):
        call(builder, "x86.tileloaddt164", _tile(column), address(builder, right, 64 * number), row)
        # Numbers without a sign times numbers with one.
        call(builder, "x86.tdpbusd", _tile(_SUMS[number]), _tile(_LEFT[0]), _tile(column))


def _store_panel(builder: Any, place: Any) -> None:
    row = ir.Constant(_INT64, PANEL_ROW)
    for number, tile in enumerate(_SUMS):
        call(builder, "x86.tilestored64", _tile(tile), address(builder, place, 64 * number), row)


def _fetch(builder: Any, place: Any) -> None:
    """Into the second cache."""
    read, second, data = (ir.Constant(_INT32, number) for number in (0, 2, 1))
    for offset in range(0, 2 * TILE_BYTES, 64):
        call(builder, "prefetch.p0", address(builder, place, offset), read, second, data)


#: ``configure(setting)`` comes first, ``release()`` last, on every thread.
configure, release = emitted(1, _configure), emitted(0, _release)
#: All sums 0.
clear = emitted(0, _clear)
_load_half, _load_block = emitted(1, _moving("x86.tileloadd64", 2)), emitted(1, _moving("x86.tileloadd64", 4))
_store_half, _store_block = (
    emitted(1, _moving("x86.tilestored64", 2)),
    emitted(1, _moving("x86.tilestored64", 4)),
)
_add_half, _add_block = emitted(3, _adding(1)), emitted(3, _adding(2))
#: ``(left, stride, right)``: add the products of rows, of which :data:`OCTETS` uint8 numbers are multiplied, ``stride``
#: bytes apart, and a panel's int8 numbers, ``[OCTETS / 4, 64, 4]``, to the sums.
add_panel = emitted(3, _add_panel)
#: ``(place)``: store those sums, int32 ``[rows, 64]``.
store_panel = emitted(1, _store_panel)
#: ``(right)``: what one multiplication reads of the right matrix will soon be read.
fetch = emitted(1, _fetch)


@inlined
def load(place: int, rows: int) -> None:
    """Load the sums of a block of so many rows into the tiles."""
    if rows > TILE:
        _load_block(place)
    else:
        _load_half(place)


@inlined
def store(place: int, rows: int) -> None:
    """Store the sums of a block of so many rows."""
    if rows > TILE:
        _store_block(place)
    else:
        _store_half(place)


@inlined
def add(left: int, stride: int, right: int, rows: int) -> None:
    """Add the product of so many rows, ``stride`` bytes apart, and two tiles that lie side by side to the sums."""
    if rows > TILE:
        _add_block(left, stride, right)
    else:
        _add_half(left, stride, right)
