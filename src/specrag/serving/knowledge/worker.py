"""The indexing process, seen from the server: started when it is needed, and again after it has died.

It is ended when an order takes too long, when it holds too much memory, or when it is no longer wanted.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specrag.serving.knowledge.indexing import Order
from specrag.serving.settings import PREFIX

_PERIOD = 0.1  # seconds between two checks

Process = subprocess.Popen[str]


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of the process.

    Attributes:
        seconds: for an order.
        memory: bytes of its own; files that it maps do not count.
    """

    seconds: float
    memory: int

    def broken(self, pid: int, seconds: float) -> str | None:
        """Why a process that has worked for ``seconds`` is over a limit; None if it is not."""
        if seconds > self.seconds:
            return f"it took longer than {self.seconds:,g} seconds; send fewer or smaller documents"
        if own_memory(pid) > self.memory:
            return f"it took more than {self.memory / 2**20:,.0f} MiB of memory; send smaller documents"
        return None


class Guard:
    """Watches a process inside a block, and kills it if it breaks a limit or is unwanted.

    Args:
        process: the one to watch.
        bounds: the limits.
        unwanted: whether to kill it in any case.
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
    """Bytes that a process holds and no file backs, in memory or swapped out; 0 if the system does not tell."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    wanted = ("RssAnon:", "RssShmem:", "VmSwap:")
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(wanted))


_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an order ended.

    Attributes:
        report: what was changed; None if it failed.
        message: why it failed.
        bad_input: whether the documents are to blame.
    """

    report: dict[str, Any] | None = None
    message: str = ""
    bad_input: bool = False


class Worker:
    """One indexing process; :meth:`run` is called from one thread, :meth:`end` from any.

    Args:
        bounds: limits of each order.
    """

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._process: Process | None = None
        self._lock = threading.Lock()
        self._ended = False

    def run(
        self, order: Order, progress: Callable[[str, int, int], None], unwanted: Callable[[], bool]
    ) -> Outcome:
        """Run an order and wait for its end.

        Args:
            progress: called with stage, done and total.
            unwanted: whether to end it before it is done.
        """
        process = self._start()
        if process is None:
            return Outcome(message="the server is being stopped")
        with Guard(process, self._bounds, unwanted) as guard:
            outcome = _exchange(process, order, progress)
        if outcome is not None and guard.reason is None:
            return outcome
        self._kill()
        if outcome is not None:
            return outcome  # it was done before the guard killed the process
        if guard.reason is not None:
            return Outcome(message=guard.reason, bad_input=True)
        return Outcome(message=f"the indexing process ended early, with status {process.returncode}")

    def end(self, *, for_good: bool = False) -> None:
        """End the process, even in the middle of an order.

        Args:
            for_good: never start another one.
        """
        with self._lock:
            self._ended = self._ended or for_good
            if self._process is not None:
                self._process.kill()
        if not for_good:
            self._kill()

    def _start(self) -> Process | None:
        with self._lock:
            if self._ended:
                return None
            if self._process is None or self._process.poll() is not None:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "specrag.serving.knowledge.indexing"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    env=_environment(os.environ),
                )
            return self._process

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        process.wait()


def _exchange(process: Process, order: Order, progress: Callable[[str, int, int], None]) -> Outcome | None:
    """Send an order and read messages until it ends; None if the process died."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(f"{json.dumps(asdict(order))}\n")
        process.stdin.flush()
        for line in process.stdout:
            message = json.loads(line)
            if "report" in message:
                return Outcome(message["report"])
            if "error" in message:
                error = message["error"]
                return Outcome(message=error["message"], bad_input=error["kind"] == "input")
            now = message["progress"]
            progress(now["stage"], now["done"], now["total"])
    except (BrokenPipeError, ValueError):
        pass  # it died while it read or wrote
    return None


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    """The environment of the indexing process, without keys and passwords."""
    return {
        name: value
        for name, value in given.items()
        if not name.upper().startswith(PREFIX) and not any(word in name.upper() for word in _SECRET)
    }
