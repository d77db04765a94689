"""One row of stored keys or values in compiled loops: read to float32, or written; in bfloat16 or in 8 bits.

The forms are those of ``kv_numbers.py``. Whoever calls these hands ``head_dim`` and ``int8`` over as constants.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from specrag.engine.bfloat16 import floats, halves, octets, widen
from specrag.engine.compiling import inlined


@inlined
def load(block: Any, place: int, address: int, head_dim: int, int8: bool) -> None:
    """Read the row that begins at ``address`` into ``block[place]``."""
    if int8:
        numbers, scale = octets(address), floats(address + head_dim)[0]
        for i in range(head_dim):
            block[place, i] = np.float32(numbers[i]) * scale
    else:
        wide = halves(address)
        for i in range(head_dim):
            block[place, i] = widen(wide[i])


@inlined
def store(address: int, source: Any, first: int, head_dim: int, int8: bool) -> None:
    """Write the bfloat16 numbers of ``source`` from ``first`` on to the row that begins at ``address``."""
    if int8:
        largest = np.float32(0.0)
        for i in range(head_dim):
            largest = max(largest, abs(widen(source[first + i])))
        scale = largest / np.float32(127.0)
        floats(address + head_dim)[0] = scale
        share = np.float32(0.0) if scale == np.float32(0.0) else np.float32(1.0) / scale
        numbers = octets(address)
        for i in range(head_dim):
            numbers[i] = np.int8(np.rint(widen(source[first + i]) * share))
    else:
        wide = halves(address)
        for i in range(head_dim):
            wide[i] = source[first + i]
