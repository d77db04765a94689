"""Keys and values of a sequence, held in extents that sessions share by reference.

An :class:`Extent` holds one contiguous buffer per layer. A :class:`KeyValueCache` reads a chain of extents and
writes behind the last of them. A fork makes the child read its parent's extents, so nothing is copied; a cache that
would have to write rows that another cache still reads starts a new extent instead. A child with few tokens copies
them when it is first fed.

Numbers are stored as they were computed, or in 8 bits. In 8 bits, a head's numbers of one token are integers from -127
to 127, followed in the same row of bytes by the float32 scale that multiplies them: the row's largest absolute number
divided by 127. Zero bytes decode to zeros.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specrag.errors import InputError

#: The rows of an extent come in multiples of this. Attention reads an extent in these units, so that the order of
#: its sums depends only on a key's position.
ROW_UNIT = 16

#: A buffer of more than ``ROW_UNIT / GROWTH`` rows gets this share of spare rows, at most 1.1 times the bytes needed:
#: a prompt's buffer then also holds the answer, and copies are rare. Copies cost more than time: the memory that they
#: free is fragmented, and the allocator keeps it.
GROWTH = 1 / 12
#: Up to this many shared rows are copied: attention over one buffer saves more than the copy takes (two Xeon cores,
#: SmolLM2: 32 chat prompts behind a system prompt of 22 tokens are read in 2.88 s if it is shared, 2.43 s if copied).
COPIED_ROWS = 64
#: Bytes behind a row of 8-bit numbers.
SCALE_BYTES = 4
_LARGEST = 127.0


def quantize(numbers: torch.Tensor) -> torch.Tensor:
    """``[..., head_dim]`` of any floating type to int8 ``[..., head_dim + SCALE_BYTES]``.

    Each number changes by at most half a scale, 1/254 of the largest number in its row.
    """
    exact = numbers.to(torch.float32)
    scale = exact.abs().amax(dim=-1, keepdim=True) / _LARGEST
    # The scale of a row of zeros is 0.
    whole = torch.round(exact / torch.where(scale == 0, 1.0, scale)).to(torch.int8)
    return torch.cat([whole, scale.contiguous().view(torch.int8)], dim=-1)


def dequantize(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """int8 ``[..., head_dim + SCALE_BYTES]`` to ``[..., head_dim]``; the product is rounded once, to ``dtype``."""
    scale = stored[..., -SCALE_BYTES:].view(torch.float32)
    return (stored[..., :-SCALE_BYTES].to(torch.float32) * scale).to(dtype)


@dataclass(frozen=True, slots=True)
class KeyValueShape:
    """What a model keeps for a token: ``2 * layers * kv_heads`` rows of ``head_dim`` numbers.

    Attributes:
        dtype: type in which the numbers are computed.
        int8: whether they are kept in 8 bits (:func:`quantize`); ``head_dim`` is then a multiple of 4.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    int8: bool = False

    def __post_init__(self) -> None:
        if self.int8 and self.head_dim % SCALE_BYTES:  # the scale behind a row would not be aligned
            raise InputError(
                "kv_dtype", "int8", f"this model's heads have {self.head_dim} numbers; leave it out"
            )

    @property
    def stored_dtype(self) -> torch.dtype:
        """Type of the buffers."""
        return torch.int8 if self.int8 else self.dtype

    @property
    def stored_width(self) -> int:
        """Numbers of ``stored_dtype`` in a row."""
        return self.head_dim + SCALE_BYTES if self.int8 else self.head_dim

    @property
    def row_bytes(self) -> int:
        """Bytes of one head's key, or value, of a token."""
        return self.stored_width * self.stored_dtype.itemsize

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values."""
        return 2 * self.layers * self.kv_heads * self.row_bytes


class Extent:
    """One buffer per layer, ``[2, kv_heads, capacity, stored_width]``: keys, then values.

    Rows that were never written are zero, so that a masked row adds an exact zero.

    Attributes:
        addresses: memory addresses of the layers' buffers, for compiled loops.
    """

    def __init__(self, shape: KeyValueShape, capacity: int) -> None:
        self.shape = shape
        self.capacity = 0
        self.layers: list[torch.Tensor] = []
        self.addresses: list[int] = []
        self._readers: weakref.WeakSet[KeyValueCache] = weakref.WeakSet()
        self.grow(capacity)

    def grow(self, rows: int) -> None:
        """Make room for at least ``rows`` rows."""
        if rows <= self.capacity:
            return
        needed = -(-rows // ROW_UNIT) * ROW_UNIT
        # Rounded down: growth and rounding up together would exceed the bound given at GROWTH.
        capacity = max(needed, int(rows * (1 + GROWTH)) // ROW_UNIT * ROW_UNIT)
        shape = self.shape
        size = (2, shape.kv_heads, capacity, shape.stored_width)
        for layer in range(shape.layers):
            buffer = torch.zeros(size, dtype=shape.stored_dtype, device=shape.device)
            if self.capacity:
                # One layer at a time: the peak is the buffers plus one layer's copy.
                buffer[:, :, : self.capacity] = self.layers[layer]
                self.layers[layer] = buffer
            else:
                self.layers.append(buffer)
        self.addresses = [buffer.data_ptr() for buffer in self.layers]
        self.capacity = capacity

    def read(self, layer: int, rows: int) -> torch.Tensor:
        """The first rows of a layer, ``[2, kv_heads, rows, head_dim]`` in the model's type.

        A view of the buffer, or a copy of numbers kept in 8 bits.
        """
        stored = self.layers[layer][:, :, :rows]
        return dequantize(stored, self.shape.dtype) if self.shape.int8 else stored

    def write(self, layer: int, first: int, numbers: torch.Tensor) -> None:
        """Write ``[2, kv_heads, rows, head_dim]`` from row ``first`` on."""
        rows = slice(first, first + numbers.shape[2])
        self.layers[layer][:, :, rows] = quantize(numbers) if self.shape.int8 else numbers

    def share_with(self, reader: KeyValueCache) -> None:
        """Record that ``reader`` reads this extent."""
        self._readers.add(reader)

    @property
    def frozen(self) -> int:
        """Rows that another cache reads, and that must not be overwritten."""
        return max((reader.rows_read(self) for reader in self._readers), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' buffers."""
        return self.capacity * self.shape.bytes_per_token


@dataclass(frozen=True, slots=True)
class Run:
    """The first ``rows`` rows of an extent that another cache owns or owned."""

    extent: Extent
    rows: int


class KeyValueCache:
    """The keys and values of one sequence; see :class:`specrag.engine.passes.Cache`.

    Args:
        shape: what the model keeps for a token.
        contiguous: keep everything in one own extent, so that a row's sums run in the same order whatever the
            cache's history; a fork is then copied at its first pass.
    """

    def __init__(self, shape: KeyValueShape, *, contiguous: bool = False) -> None:
        self.shape = shape
        self.contiguous = contiguous
        self.length = 0
        self.runs: list[Run] = []
        self.own: Extent | None = None
        self._reserved = 0

    @property
    def base(self) -> int:
        """Position of the first row of the extent that this cache writes."""
        return sum(run.rows for run in self.runs)

    def prepare(self, rows: int) -> Extent:
        """The extent to write ``rows`` rows into, starting at row ``length - base``."""
        if self.own is not None and self.length - self.base < self.own.frozen:
            self._freeze_own()
        if self.runs and (self.contiguous or (self.own is None and self.base <= COPIED_ROWS)):
            self._unshare(rows)
        need = max(self.length + rows, self._reserved) - self.base
        if self.own is None:
            self.own = Extent(self.shape, need)
        else:
            self.own.grow(need)
        return self.own

    @torch.inference_mode()
    def accept(self, rows: Sequence[int]) -> None:
        count = len(rows)
        if count == 0:
            return
        if isinstance(rows, range) and rows.start == 0 and rows.step == 1:
            in_place = True
        else:
            in_place = all(row == index for index, row in enumerate(rows))
        if not in_place:
            own = self.own
            assert own is not None  # a pass has written the rows
            start = self.length - self.base
            source = torch.tensor([start + row for row in rows], device=self.shape.device)
            for layer in own.layers:
                layer[:, :, start : start + count] = layer.index_select(2, source)
        self.length += count

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)
        self._reserved = 0
        while self.runs and self.base > self.length:
            # The cut lies before the extent that this cache writes, which therefore holds nothing of it any more.
            self.own = None
            last = self.runs.pop()
            left = self.length - self.base
            if left > 0:
                self.runs.append(Run(last.extent, left))

    def fork(self, length: int) -> KeyValueCache:
        child = KeyValueCache(self.shape, contiguous=self.contiguous)
        child.length = length
        left = length
        for run in self.runs:
            if left > 0:
                child.runs.append(Run(run.extent, min(run.rows, left)))
                left -= child.runs[-1].rows
        if left > 0 and self.own is not None:
            child.runs.append(Run(self.own, left))
        for run in child.runs:
            run.extent.share_with(child)
        return child

    def reserve(self, length: int) -> None:
        # The next pass allocates it, so that a context of many chunks is allocated once.
        self._reserved = length

    def rows(self, layer: int, first: int, last: int) -> torch.Tensor:
        """Keys and values of some tokens, ``[2, kv_heads, last - first, head_dim]`` in the model's type."""
        parts, start = [], 0
        for run in [*self.runs, *([] if self.own is None else [Run(self.own, self.length - self.base)])]:
            if start < last and start + run.rows > first:
                read = run.extent.read(layer, min(last - start, run.rows))
                parts.append(read[:, :, max(first - start, 0) :])
            start += run.rows
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def rows_read(self, extent: Extent) -> int:
        """How many rows of another cache's extent this cache reads."""
        return max((run.rows for run in self.runs if run.extent is extent), default=0)

    @property
    def nbytes(self) -> int:
        return 0 if self.own is None else self.own.nbytes

    def extents(self) -> list[Extent]:
        own = [] if self.own is None else [self.own]
        return [*(run.extent for run in self.runs), *own]

    def clear(self) -> None:
        self.length = 0
        self._reserved = 0
        self.runs.clear()
        self.own = None

    def _freeze_own(self) -> None:
        """Leave the own extent to its readers and continue in a new one."""
        assert self.own is not None
        rows = self.length - self.base
        if rows > 0:
            self.own.share_with(self)
            self.runs.append(Run(self.own, rows))
        self.own = None

    def _unshare(self, rows: int) -> None:
        """Copy the shared rows into a new own extent."""
        extent = Extent(self.shape, max(self.length + rows, self._reserved))
        start = 0
        parts = list(self.runs)
        if self.own is not None:
            parts.append(Run(self.own, self.length - self.base))
        for part in parts:
            for target, source in zip(extent.layers, part.extent.layers, strict=True):
                target[:, :, start : start + part.rows] = source[:, :, : part.rows]
            start += part.rows
        self.runs.clear()
        self.own = extent
