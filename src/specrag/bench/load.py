"""Watches how much of the machine other processes use, since ratios from a busy machine mislead.

The share is of all processors that the kernel reports, used by processes outside this one's tree and including time
stolen by a hypervisor. In a container, the kernel may report the whole host.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from specrag.extras import needed_by

BUSY_SHARE = 0.10
"""Share of the machine above which the report warns."""

OWN_SERVERS: set[int] = set()
"""Processes that this one started but that are no longer its children, such as a database; not counted as others."""

_SHORTEST_WINDOW = 0.5  # seconds; the kernel counts processor time in ticks of 10 ms


class LoadMonitor(Protocol):
    """Reports how much of the machine others use."""

    def other_share(self) -> float | None:
        """Share of the machine, 0 to 1, that others used since the last call; None if unknown."""
        ...


@dataclass(frozen=True)
class ProcessorTimes:
    """Seconds of processor time since some start: of all processes, of this process's tree, and in all."""

    busy: float
    own: float
    capacity: float


class ProcessorLoad:
    """Reads the processor times with psutil.

    Args:
        sleep: waits for the given seconds; used only by `before`.

    Raises:
        SpecragError: psutil is not installed.
    """

    def __init__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        self.sleep = sleep
        self._last = read_times()
        self._share: float | None = None

    def before(self, seconds: float = 1.0) -> float:
        """Share that others use while this process sleeps."""
        self._last = read_times()
        self.sleep(max(seconds, _SHORTEST_WINDOW))
        return self.other_share() or 0.0

    def other_share(self) -> float | None:
        """Share since the last call, or the last share again if that call was less than half a second ago."""
        now = read_times()
        share = _share(self._last, now)
        if share is not None:
            self._last, self._share = now, share
        return self._share


def _share(start: ProcessorTimes, end: ProcessorTimes) -> float | None:
    import psutil

    capacity = end.capacity - start.capacity
    if capacity < _SHORTEST_WINDOW * (psutil.cpu_count() or 1):
        return None
    others = (end.busy - start.busy) - (end.own - start.own)
    return min(max(others / capacity, 0.0), 1.0)


def read_times() -> ProcessorTimes:
    """The processor times so far; own times include children, both running and waited for.

    Raises:
        SpecragError: psutil is not installed.
    """
    with needed_by("bench"):
        import psutil

    times = psutil.cpu_times()
    # Linux also counts guest time in user time; iowait is idle time.
    idle = times.idle + getattr(times, "iowait", 0.0)
    total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    own = 0.0
    for pid in (os.getpid(), *OWN_SERVERS):
        try:
            root = psutil.Process(pid)
            tree = [root, *root.children(recursive=True)]
        except psutil.Error:
            continue
        for process in tree:
            try:
                mine = process.cpu_times()
            except psutil.Error:
                continue
            own += mine.user + mine.system + getattr(mine, "children_user", 0.0)
            own += getattr(mine, "children_system", 0.0)
    return ProcessorTimes(busy=total - idle, own=own, capacity=total)


@dataclass(frozen=True)
class LoadNote:
    """What a report says about the machine's load.

    Args:
        before: others' share before the run.
        worst: their largest share during it.
        busy, runs: records measured above `BUSY_SHARE`, and all records with a known share.
    """

    before: float | None
    worst: float | None
    busy: int
    runs: int

    @property
    def is_busy(self) -> bool:
        return self.busy > 0 or (self.before or 0.0) > BUSY_SHARE


def load_note(before: float | None, shares: list[float]) -> LoadNote:
    """Summarise others' shares, one per record."""
    return LoadNote(before, max(shares, default=None), sum(s > BUSY_SHARE for s in shares), len(shares))
