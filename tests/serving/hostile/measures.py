"""What an attack costs a server in this process: how long its event loop stood still, and how much memory it took.

The loop is sent a beat every few milliseconds. A late beat alone proves nothing on a busy machine, where the whole
process may have been waiting for a processor; a stall is the part of the delay for which the process was computing.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tests.processor import slowness

#: What no request may stall the loop for, in milliseconds where :func:`slowness` is 1, and what none may take, in MiB.
MOST_STALL_MS, MOST_MIB = 100.0, 300.0

#: How often an attack may be repeated.
ATTEMPTS = 3

_BEAT = 0.005

T = TypeVar("T")


@dataclass(slots=True)
class Cost:
    """What happened inside a block of :func:`measured`.

    Attributes:
        stall_ms: longest time for which the loop stood still while the process was computing.
        mib: by how much the memory of the process grew at its highest.
    """

    stall_ms: float = 0.0
    mib: float = 0.0

    @property
    def kept(self) -> bool:
        """Whether the promise was kept."""
        is_short = self.stall_ms < MOST_STALL_MS or self.stall_ms < MOST_STALL_MS * slowness()
        return is_short and self.mib < MOST_MIB

    def check(self) -> None:
        """Fail if the promise was broken."""
        assert self.kept, self


@contextmanager
def measured(loop: asyncio.AbstractEventLoop) -> Iterator[Cost]:
    """Measure a block that attacks the server whose loop this is; the figures are there behind it."""
    cost = Cost()
    ended = threading.Event()
    last = (0.0, 0.0)

    def beat() -> None:
        nonlocal last
        now = (time.perf_counter(), time.process_time())
        if last != (0.0, 0.0):
            late, computed = now[0] - last[0] - _BEAT, now[1] - last[1]
            cost.stall_ms = max(cost.stall_ms, 1000 * min(late, computed))
        last = now
        if not ended.is_set():
            loop.call_later(_BEAT, beat)

    # A test's process holds far more than a server, which has frozen what it has loaded.
    gc.collect()
    gc.freeze()
    _forget_peak()
    before = _kib("VmRSS")
    loop.call_soon_threadsafe(beat)
    try:
        yield cost
    finally:
        ended.set()
        done = threading.Event()
        loop.call_soon_threadsafe(beat)
        loop.call_soon_threadsafe(done.set)
        assert done.wait(120)
        cost.mib = (_kib("VmHWM") - before) / 1024


def attacked(loop: asyncio.AbstractEventLoop, attack: Callable[[], T]) -> T:
    """What an attack gives; fails if the promise was broken each of three times.

    Whatever else the machine does stalls a loop now and then; what the attack does, it does every time.
    """
    for attempt in range(ATTEMPTS):
        with measured(loop) as cost:
            given = attack()
        if attempt + 1 == ATTEMPTS or cost.kept:
            break
    cost.check()
    return given


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _kib(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise AssertionError(f"the system tells no {field}")
