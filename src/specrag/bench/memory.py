"""Peak memory of a block of code, and work in a separate process, whose memory it shares with nothing else.

On Linux the kernel keeps the peak itself: writing 5 to ``/proc/self/clear_refs`` resets it to the current value, and
``VmHWM`` gives it exactly and at no cost. Where that is not allowed, a thread samples the resident size every few
milliseconds and can miss shorter peaks; `Peak.exact` says which it was. The resident size includes pages of mapped
weight files, and memory that the allocator has not given back.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from specrag.errors import SpecragError

_MIB = 2**20
_SAMPLE_SECONDS = 0.002


@dataclass
class Peak:
    """Filled in when the block ends.

    Args:
        start_mib: resident memory when the block began, MiB.
        peak_mib: the largest during it, MiB.
        cuda_mib: the most that torch held on the current CUDA device, MiB; None without one.
        exact: false if `peak_mib` was sampled.
    """

    start_mib: float = 0.0
    peak_mib: float = 0.0
    cuda_mib: float | None = None
    exact: bool = False

    @property
    def grown_mib(self) -> float:
        """Memory that the block needed on top of what was in use, MiB."""
        return self.peak_mib - self.start_mib


@contextmanager
def peak_memory() -> Iterator[Peak]:
    """Measure the peak memory of a ``with`` block; do not nest it, since a process has only one mark."""
    peak = Peak()
    torch = sys.modules.get("torch")  # measuring is no reason to import it
    on_cuda = torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized()
    if torch is not None and on_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    peak.exact = _reset_high_water()
    peak.start_mib = _resident_mib()
    sampler = None if peak.exact else _Sampler(peak)
    try:
        yield peak
    finally:
        if torch is not None and on_cuda:
            peak.cuda_mib = torch.cuda.max_memory_allocated() / _MIB
        if sampler is not None:
            sampler.stop()
        else:
            peak.peak_mib = _status_mib("VmHWM")


class _Sampler:
    def __init__(self, peak: Peak) -> None:
        self._peak = peak
        self._done = threading.Event()
        peak.peak_mib = peak.start_mib
        self._thread = threading.Thread(target=self._run, name="specrag-peak-memory", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._done.wait(_SAMPLE_SECONDS):
            self._take()

    def _take(self) -> None:
        self._peak.peak_mib = max(self._peak.peak_mib, _resident_mib())

    def stop(self) -> None:
        self._done.set()
        self._thread.join()
        self._take()


def _reset_high_water() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
        # Some sandboxed kernels accept the write but do nothing, or have no such mark.
        return abs(_status_mib("VmHWM") - _status_mib("VmRSS")) < 1.0
    except (OSError, ValueError):
        return False


def _resident_mib() -> float:
    try:
        return _status_mib("VmRSS")
    except (OSError, ValueError):
        import psutil

        return float(psutil.Process().memory_info().rss) / _MIB


def _status_mib(name: str) -> float:
    """A size from ``/proc/self/status``.

    Raises:
        OSError, ValueError: the platform has no such file or line.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"no {name}")


def run_module(what: str, module: str, arguments: Sequence[str] = (), *, given: str = "") -> dict[str, float]:
    """Run a module and return the JSON object on its last output line.

    Args:
        what: what it does, for the error message.
        given: its standard input.

    Raises:
        SpecragError: it fails.
    """
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True, input=given)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise SpecragError(f"{what} failed: {lines[-1]}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures
