"""Ends another process that has gone on for too long, holds too much memory, or is not wanted any more."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_PERIOD = 0.1  # seconds between two looks

Process = subprocess.Popen[str]


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a process may take.

    Attributes:
        seconds: of time.
        memory: bytes of its own; files that it maps do not count.
    """

    seconds: float
    memory: int

    def broken(self, pid: int, seconds: float) -> str | None:
        """Which of them a process is beyond that has worked for so long."""
        if seconds > self.seconds:
            return f"it took longer than {self.seconds:,g} seconds; send fewer or smaller documents"
        if own_memory(pid) > self.memory:
            return f"it took more than {self.memory / 2**20:,.0f} MiB of memory; send smaller documents"
        return None


class Guard:
    """Watches a process inside a block.

    Args:
        process: to end.
        bounds: that it has to keep.
        unwanted: whether it is to end in any case.
    """

    def __init__(self, process: Process, bounds: Bounds, unwanted: Callable[[], bool]) -> None:
        self.reason: str | None = None
        self._process = process
        self._bounds = bounds
        self._unwanted = unwanted
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="specrag-guard", daemon=True)

    def __enter__(self) -> Guard:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        started = time.monotonic()
        while not self._over.wait(_PERIOD):
            if self._unwanted():
                self.reason = "it was cancelled"
            else:
                self.reason = self._bounds.broken(self._process.pid, time.monotonic() - started)
            if self.reason is not None:
                self._process.kill()
                return


def own_memory(pid: int) -> int:
    """Bytes that a process holds and no file backs, in memory or swapped out; 0 where the system does not tell."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    wanted = ("RssAnon:", "RssShmem:", "VmSwap:")
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(wanted))
