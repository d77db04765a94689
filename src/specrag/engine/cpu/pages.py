"""Moves a model's weights into huge pages.

A pass reads every weight once, a page after the other. In a virtual machine each of them has to be found in two tables,
and where the hypervisor watches which memory is used, touching a small page again costs some twenty microseconds. Two
Xeon cores in such a machine, milliseconds a token in pages of 4 KB and of 2 MB: SmolLM2 18 and 15 in 8 bits, 35 and 22
in bf16, Qwen2.5-Coder-1.5B 115 and 84 (docs/log/2026-11-28-huge-pages.md).
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path
from typing import Any

_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
#: Linux 6.1 and later: collect what lies in a range into huge pages, now.
_COLLAPSE = 25


def use_huge_pages(address: int, size: int) -> None:
    """Move memory that has been written into huge pages, where the system has them.

    It is best called when the memory has just been written. What lies beside it in the first and the last page moves
    too. Nothing happens where the kernel is too old or its operator has chosen ``never``, or if no page is free.

    Args:
        address: of the memory.
        size: bytes.
    """
    page, madvise = _huge_page_bytes(), _madvise()
    if not page or madvise is None:
        return
    first, last = address // page, (address + size - 1) // page
    for number in range(first, last + 1):  # one call each: a part of a page that is not there fails alone
        madvise(number * page, page, _COLLAPSE)


@cache
def _huge_page_bytes() -> int:
    """0 if there are none."""
    try:
        if "[never]" in (_SETTINGS / "enabled").read_text(encoding="ascii"):
            return 0
        return int((_SETTINGS / "hpage_pmd_size").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0


@cache
def _madvise() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function
