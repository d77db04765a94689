"""``specrag serve --background``: a server that outlives the command, and ends itself after being idle for long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from specrag.cli import common
from specrag.errors import SpecragError
from specrag.serving import RunningServer, folder, running_servers

#: Seconds without a request after which a background server ends itself.
IDLE_SECONDS = 1800

_BEAT = 0.1


def start(words: Sequence[str]) -> RunningServer:
    """Start ``specrag serve`` with these words in a process of its own, and wait until it answers.

    Raises:
        SpecragError: it has ended instead; the message has its last line of output.
    """
    log = folder() / "background.log"
    log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    command = [sys.executable, "-m", "specrag", "serve", "--idle-seconds", str(IDLE_SECONDS), *words]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    with common.status("the server is loading"):
        while process.poll() is None:
            for server in running_servers():
                if server.pid == process.pid and is_ready(server):
                    return server
            time.sleep(_BEAT)
    raise SpecragError(f"the server has ended: {_last_line(log)} (all it said is in {log})")


def stop() -> list[RunningServer]:
    """End this user's background servers, and wait until they have ended."""
    found = [server for server in running_servers() if server.background]
    for server in found:
        os.kill(server.pid, signal.SIGTERM)
    with common.status("the server is stopping"):
        while any(server in running_servers() for server in found):
            time.sleep(_BEAT)
    return found


def wait_until_ready(server: RunningServer) -> bool:
    """Wait for a server that is still loading; returns whether it answers."""
    if is_ready(server):
        return True
    with common.status(f"waiting for the server at {server.url}, which is loading"):
        while server in running_servers():
            if is_ready(server):
                return True
            time.sleep(_BEAT)
    return False


def is_ready(server: RunningServer) -> bool:
    """Whether the server takes requests."""
    try:
        with urllib.request.urlopen(f"{server.url}/readyz", timeout=5) as answer:  # noqa: S310 - http
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "without a word"
