"""A real Milvus of one process, from the package ``milvus``, which brings the server's program."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

# There is no wheel for every Python and machine.
Packaged: Any = pytest.importorskip("milvus").MilvusServer

USER, PASSWORD = "root", "Milvus"  # as the program comes

# Waits for the end of the process that started the server, however it ends, and removes what that has left.
_GUARD = 'cat; kill -KILL "$1" 2>/dev/null; rm -rf "$0"'
_SECONDS = 120


class MilvusServer:
    """A server on ports of its own that asks for a password; its data are gone after :meth:`close`."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="specrag-milvus-"))
        self._packaged: Any = None
        self._guard: subprocess.Popen[bytes] | None = None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def address(self, name: str, password: str = PASSWORD) -> str:
        """Of a collection."""
        return f"milvus://{USER}:{password}@127.0.0.1:{self.port}/{name}"

    def start(self) -> None:
        """Start, or start again with the same data; returns when it answers."""
        made = Packaged(wait_for_started=False)
        made.set_base_dir(str(self._folder))
        made.config.update(proxy_port=self.port)
        made.config.set("authorization_enabled", True)
        made.start()
        self._packaged = made
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, str(self._folder), str(made.server_proc.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is not meant for it
        )
        end = time.monotonic() + _SECONDS
        while not _is_healthy(made.webservice_port):
            assert made.server_proc.poll() is None, "Milvus has ended"
            assert time.monotonic() < end, "Milvus does not start"
            time.sleep(0.1)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to it."""
        self._packaged.server_proc.send_signal(number)

    def kill(self) -> None:
        """End it as a crash does."""
        self.signal(signal.SIGKILL)
        self._packaged.server_proc.wait(_SECONDS)

    def close(self) -> None:
        """End it, and remove its data."""
        if self._packaged is not None and self._packaged.server_proc is not None:
            self.kill()
            self._packaged.server_proc = None
            self._packaged.stop()  # closes its files
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.close()
            self._guard.wait(_SECONDS)
        shutil.rmtree(self._folder, ignore_errors=True)


def _is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5) as answer:
            return b"OK" in answer.read()
    except (urllib.error.URLError, OSError):
        return False
