"""Weights lie in huge pages where the system has them."""

from __future__ import annotations

import mmap
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specrag.engine.cpu import pages
from specrag.models import int8_product, linear
from specrag.models.linear import Int8Linear, PackedLinear
from tests.processor import PACKED_BF16

MEGABYTE = 2**20


def huge_bytes(address: int, size: int) -> int:
    """In huge pages, of the mappings that hold a range."""
    found = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) ")
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := found.match(line):
            inside = int(bounds[1], 16) < address + size and address < int(bounds[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            total += 1024 * int(line.split()[1])
    return total


def private_memory(size: int) -> np.ndarray:
    """Of bytes in small pages; numpy asks for huge ones itself."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(memory, dtype=np.uint8)


@pytest.fixture
def page() -> int:
    """Bytes of a huge page, on a system that gives one to those who ask, and to nobody else."""
    memory = mmap.mmap(-1, 8 * MEGABYTE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(bytes(8 * MEGABYTE))
    address = np.frombuffer(memory, dtype=np.uint8).ctypes.data
    try:
        if "[madvise]" not in (pages._SETTINGS / "enabled").read_text():
            pytest.skip("this system does not leave the choice to programs")
        memory.madvise(pages._COLLAPSE, -address % (2 * MEGABYTE), 4 * MEGABYTE)
    except OSError as error:
        pytest.skip(f"this system gives no huge pages: {error}")
    return pages._huge_page_bytes()


def test_written_memory_moves_and_keeps_its_bytes(page: int) -> None:
    memory = private_memory(8 * MEGABYTE)
    memory[:] = numbers = np.frombuffer(np.random.default_rng(0).bytes(8 * MEGABYTE), dtype=np.uint8)
    before = huge_bytes(memory.ctypes.data, memory.nbytes)  # of what lies beside it in the same mapping
    pages.use_huge_pages(memory.ctypes.data, memory.nbytes)
    assert huge_bytes(memory.ctypes.data, memory.nbytes) - before >= 3 * page
    assert np.array_equal(memory, numbers)


@pytest.mark.parametrize("layer", [Int8Linear, pytest.param(PackedLinear, marks=PACKED_BF16)])
def test_weights_move_when_they_are_packed(layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[tuple[int, int]] = []
    for module in (linear, int8_product):
        monkeypatch.setattr(module, "use_huge_pages", lambda *place: moved.append(place))
    made = layer(torch.randn(128, 64, dtype=torch.bfloat16), None)
    loop = getattr(made, "loop", None)
    place = loop._kept[0].data_ptr() if loop else torch.ops.mkldnn.data_ptr(made._weight)
    assert moved == [(place, 128 * 64 * (1 if layer is Int8Linear else 2))]
    assert place


def test_an_operator_who_wants_none_gets_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    (tmp_path / "hpage_pmd_size").write_text("2097152\n")
    monkeypatch.setattr(pages, "_SETTINGS", tmp_path)
    assert pages._huge_page_bytes.__wrapped__() == 0
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    assert pages._huge_page_bytes.__wrapped__() == 2 * MEGABYTE
    (tmp_path / "hpage_pmd_size").unlink()
    assert pages._huge_page_bytes.__wrapped__() == 0


def test_memory_that_is_not_there_is_left_alone() -> None:
    pages.use_huge_pages(2**40 + 1, 3 * MEGABYTE)
    pages.use_huge_pages(2**40, 0)
