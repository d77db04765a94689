"""The measuring machine, and how fast it reads memory and multiplies: the floor under every pass.

The rates are the best of a few short runs of plain torch operations: what an engine built on them can reach,
not the maker's figures.
"""

from __future__ import annotations

import hashlib
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("torch", "transformers", "numpy")
_BEST_OF = 5


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Everything that a figure depends on besides the code.

    Args:
        processor: the CPU's model name.
        cores: processors that this process may use.
        threads: threads that torch uses.
        memory_gib: total memory, GiB.
        system: operating system and C library.
        python: Python's version.
        packages: ``name version`` of the packages that do the work.
        gpu: the accelerator's name, or None.
    """

    processor: str
    cores: int
    threads: int
    memory_gib: float
    system: str
    python: str
    packages: tuple[str, ...]
    gpu: str | None

    def fingerprint(self) -> str:
        """Eight hexadecimal digits that differ between machines whose times cannot be compared."""
        facts = (self.processor, self.cores, self.threads, self.gpu, self.python, self.packages)
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:8]

    def describe(self) -> str:
        """One line for readers."""
        parts = [f"{self.processor}, {self.cores} cores, {self.threads} threads, {self.memory_gib:.0f} GiB"]
        if self.gpu is not None:
            parts.append(self.gpu)
        parts += [self.system, f"Python {self.python}", *self.packages]
        return "; ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Measured rates of one device; None if the device or torch has no such operation.

    Args:
        read_gb_s: memory read, 1e9 bytes a second, by torch with all its threads.
        fp32_gflop_s, bf16_gflop_s: square matrix product, 1e9 operations a second (a multiply-add counts two).
        int8_gop_s: 8-bit product with 32-bit sums.
    """

    read_gb_s: float
    fp32_gflop_s: float
    bf16_gflop_s: float | None
    int8_gop_s: float | None


def half_precision(device: str) -> str:
    """The precision for comparing methods when precision is not the question: bf16.

    A processor without bf16 products takes ten times as long for bf16; there it is fp32.
    """
    from specrag.models import PackedLinear

    return "bf16" if device != "cpu" or PackedLinear.available() else "fp32"


def describe_machine() -> Machine:
    """Describe this machine as torch sees it now; set its threads first."""
    import torch

    return Machine(
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        memory_gib=_memory_bytes() / 2**30,
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        packages=tuple(f"{name} {found}" for name in _PACKAGES if (found := _version(name)) is not None),
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    )


def measure_rates(
    device: str = "cpu",
    *,
    read_bytes: int = 2**29,
    size: int = 1024,
    clock: Callable[[], float] = time.perf_counter,
) -> Rates:
    """Measure a device's rates; takes a few seconds on two cores.

    Args:
        device: a torch device.
        read_bytes: bytes to read at a time; must exceed the caches by far.
        size: rows and columns of the matrices.
    """
    return Rates(
        read_gb_s=_torch_read(device, read_bytes, clock),
        fp32_gflop_s=_product_rate(device, "float32", size, clock) or 0.0,
        bf16_gflop_s=_product_rate(device, "bfloat16", size, clock),
        int8_gop_s=_product_rate(device, "int8", size, clock),
    )


def _best_seconds(work: Callable[[], object], clock: Callable[[], float]) -> float:
    """The shortest of a few runs after one warm-up: other processes can only make a run longer."""
    work()
    best = float("inf")
    for _ in range(_BEST_OF):
        start = clock()
        work()
        best = min(best, clock() - start)
    return best


def _torch_read(device: str, read_bytes: int, clock: Callable[[], float]) -> float:
    """Best of a few reductions, since a single one may be bound by its arithmetic."""
    import torch

    numbers = torch.ones(read_bytes // 8, dtype=torch.int64, device=device)
    floats = numbers.view(torch.float32)
    reductions: tuple[Callable[[], object], ...] = (
        lambda: numbers.max().item(),
        lambda: floats.sum().item(),
        lambda: floats.amax().item(),
    )
    seconds = min(_best_seconds(read, clock) for read in reductions)
    return numbers.numel() * 8 / seconds / 1e9


def _product_rate(device: str, kind: str, size: int, clock: Callable[[], float]) -> float | None:
    """1e9 operations a second of a square product, or None if torch has no such product here."""
    import torch

    def product() -> None:
        result = torch._int_mm(left, right) if kind == "int8" else left @ right
        result[0, 0].item()  # waits for an accelerator

    try:
        left = torch.ones(size, size, device=device).to(getattr(torch, kind))
        right = left.clone()
        seconds = _best_seconds(product, clock)
    except (RuntimeError, NotImplementedError):
        return None
    return float(2 * size**3 / seconds / 1e9)


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
