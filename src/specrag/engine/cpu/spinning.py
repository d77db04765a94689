"""Lets waiting OpenMP threads spin while the processors are ours, and sleep at once while others use them.

Between two loops of a layer a thread waits for some fifty microseconds. To wake one that sleeps takes longer than that,
above all in a virtual machine, so that on quiet processors it had better spin; but beside another busy process a
spinning thread holds the processor that the thread it waits for needs. Milliseconds a token (SmolLM2 in 8 bits, two
Xeon cores): 9.5 spinning and 21 sleeping on a quiet machine, 41 and 17 beside a busy loop.

libgomp, torch's OpenMP on Linux, reads once for how long its threads spin (``GOMP_SPINCOUNT``, which the package sets),
but cuts that to a hundred turns while its teams together have more threads than there are processors. So a further team
that does nothing is kept while others are busy (docs/log/2026-11-28-waking-threads-cost-half-of-a-token.md).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from specrag.engine.cpu.threads import openmp
from specrag.openmp import is_spin_count_ours

#: Seconds over which the others' share is taken. The kernel counts in ticks of ten milliseconds.
WINDOW = 0.25
#: After a pause as long as this a new window begins.
_PAUSE = 4 * WINDOW
#: Of a processor, that others may use beside our threads.
_SMALL = 0.2
_STAT = Path("/proc/stat")


class Spinning:
    """Watches what others use of our processors, and decides whether waiting threads may spin.

    Args:
        others: seconds of processor time that other processes have used so far.
        clock: seconds.
        spare: processors that our threads leave to others.
    """

    def __init__(
        self,
        others: Callable[[], float],
        *,
        clock: Callable[[], float] = time.monotonic,
        spare: Callable[[], int] = lambda: len(processors()) - torch.get_num_threads(),
    ) -> None:
        self._others, self._clock, self._spare = others, clock, spare
        self._lock = threading.Lock()
        self._began = self._used = float("-inf")
        self._idle_team: _IdleTeam | None = None

    @property
    def allowed(self) -> bool:
        """Whether waiting threads spin now."""
        return self._idle_team is None

    def watch(self) -> None:
        """To be called often while passes run: looks four times a second, which takes some fifty microseconds."""
        now = self._clock()
        if now - self._began < WINDOW or not self._lock.acquire(blocking=False):
            return
        try:
            passed, used = now - self._began, self._others()
            if passed < _PAUSE:
                self._allow((used - self._used) / passed < max(self._spare(), 0) + _SMALL)
            self._began, self._used = now, used
        finally:
            self._lock.release()

    def _allow(self, spins: bool) -> None:
        if spins and self._idle_team is not None:
            self._idle_team.end()
            self._idle_team = None
        elif not spins and self._idle_team is None:
            self._idle_team = _IdleTeam()


class _IdleTeam:
    """An OpenMP team of more threads than there are processors, asleep, in a thread of its own."""

    def __init__(self) -> None:
        self._there, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._hold, name="specrag-idle-team", daemon=True)
        self._thread.start()
        self._there.wait()  # a thread that begins to wait before would spin once more

    def _hold(self) -> None:
        try:
            library = openmp()
            if library is not None:
                # Any function that has no effect will do.
                library.run(library.count, None, len(processors()) + 1, 0)
        finally:
            self._there.set()
        self._ended.wait()

    def end(self) -> None:
        """End the thread, and its team with it."""
        self._ended.set()
        self._thread.join()


def processors() -> set[int]:
    """The processors that this process may use."""
    return os.sched_getaffinity(0)


def seconds_of_others(stat: Path = _STAT) -> float:
    """Processor time so far of other processes on our processors, but for those that yield to ours (nice)."""
    ours, ticks = processors(), 0
    for line in stat.read_text(encoding="ascii").splitlines():
        name, *counts = line.split()
        if name.startswith("cpu") and name != "cpu" and int(name[3:]) in ours:
            ticks += int(counts[0]) + int(counts[2])
    return ticks / os.sysconf("SC_CLK_TCK") - time.process_time()


def _watches() -> bool:
    """Whether the time to spin is the package's own, and others can be seen."""
    return is_spin_count_ours() and openmp() is not None and os.access(_STAT, os.R_OK)


_spinning = Spinning(seconds_of_others) if _watches() else None


def watch_others() -> None:
    """Called before each pass on the processors."""
    if _spinning is not None:
        _spinning.watch()
