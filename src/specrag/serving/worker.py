"""The indexing process, seen from the server: started when it is needed, started anew when it has died."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from specrag.serving.guard import Bounds, Guard, Process
from specrag.serving.indexing import Order
from specrag.serving.settings import PREFIX

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
    """One indexing process; orders come from one thread, :meth:`end` from any.

    Args:
        bounds: of each order.
    """

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._process: Process | None = None
        self._lock = threading.Lock()
        self._ended = False

    def run(
        self, order: Order, progress: Callable[[str, int, int], None], unwanted: Callable[[], bool]
    ) -> Outcome:
        """Do an order and wait for its end.

        Args:
            progress: told stage, done and total.
            unwanted: whether it is to end before it is done.
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
            return outcome  # it had been done when the guard struck
        if guard.reason is not None:
            return Outcome(message=guard.reason, bad_input=True)
        return Outcome(message=f"the indexing process ended early, with status {process.returncode}")

    def end(self, *, for_good: bool = False) -> None:
        """End the process, in the middle of an order too.

        Args:
            for_good: start no other.
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
                    [sys.executable, "-m", "specrag.serving.indexing"],
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
    """Send an order and listen; None if the process has died over it."""
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
    """What the other process is told: nothing of keys and passwords."""
    return {
        name: value
        for name, value in given.items()
        if not name.upper().startswith(PREFIX) and not any(word in name.upper() for word in _SECRET)
    }
