"""Servers for the tests of operation: everything but a language model, which these tests do not ask for anything.

Run as a program it serves until it is killed: ``python -m tests.serving.ops_server SETTINGS.json``.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI, Request
from starlette.responses import StreamingResponse

ROOT = Path(__file__).resolve().parents[2]

READER = "reader-key-0123456789"
WRITER = "writer-key-0123456789"
MASTER = "master-key-0123456789"


def make_app(**values: Any) -> FastAPI:
    """An application without a model, with a route that reads a body and one that fails."""
    from specrag.serving.errors import add_error_handlers
    from specrag.serving.operation.setup import add_operation
    from specrag.serving.service import Service
    from specrag.serving.settings import load_settings

    app = FastAPI(docs_url=None, redoc_url=None)
    app.state.service = Service(load_settings(None, values))

    @app.post("/echo")
    async def echo(request: Request) -> dict[str, Any]:
        return {"bytes": len(await request.body())}

    @app.post("/json")
    async def take_json(body: dict[str, Any]) -> dict[str, Any]:
        return {"fields": len(body)}

    seen = {"gone": False, "streams": 0}

    @app.post("/slow")
    async def slow() -> dict[str, bool]:
        await asyncio.sleep(0.3)
        return {"waited": True}

    @app.post("/until-gone")
    async def until_gone(request: Request) -> None:
        while not await request.is_disconnected():
            await asyncio.sleep(0.02)
        seen["gone"] = True

    @app.get("/stream")
    async def stream() -> StreamingResponse:
        async def parts() -> AsyncIterator[bytes]:
            seen["streams"] += 1
            try:
                while True:
                    yield b"x" * 65536
                    await asyncio.sleep(0)
            finally:
                seen["streams"] -= 1

        return StreamingResponse(parts())

    @app.get("/gone")
    async def gone() -> dict[str, int]:
        return seen

    @app.get("/broken")
    async def broken() -> None:
        raise RuntimeError("the secret of /etc/passwd")

    @app.get("/large")
    async def large() -> dict[str, str]:
        return {"text": "x" * 8_000_000}

    add_error_handlers(app)
    add_operation(app)
    return app


def bearer(key: str) -> dict[str, str]:
    """The header that carries a key."""
    return {"Authorization": f"Bearer {key}"}


class Program:
    """A server in a process of its own.

    Args:
        folder: for its settings and its log.
        values: its settings.
    """

    def __init__(self, folder: Path, values: Mapping[str, Any]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "server.log"
        self._settings = folder / "settings.json"
        self._settings.write_text(json.dumps({**values, "port": self.port}), encoding="utf-8")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Run it and wait until it answers."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.serving.ops_server", self._settings],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        ends = time.monotonic() + 60
        while True:
            try:
                httpx.get(f"{self.url}/healthz").raise_for_status()
                return
            except httpx.HTTPError:
                assert self._process.poll() is None, self.log.read_text(encoding="utf-8")
                assert time.monotonic() < ends
                time.sleep(0.05)

    def end(self, number: int = signal.SIGKILL) -> int:
        """Send a signal and wait for the end; its exit status."""
        assert self._process is not None
        self._process.send_signal(number)
        return self._process.wait(30)

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.poll() is None


@contextmanager
def program(folder: Path, **values: Any) -> Iterator[Program]:
    """A server in a process of its own, killed behind the block."""
    server = Program(folder, values)
    server.start()
    try:
        yield server
    finally:
        if server.alive:
            server.end()


def wait_for_job(client: httpx.Client, job: str, seconds: float = 60) -> dict[str, Any]:
    """Ask for a job until it has ended."""
    ends = time.monotonic() + seconds
    while True:
        answer = client.get(f"/v1/kb/jobs/{job}")
        assert answer.status_code == 200, answer.text
        report: dict[str, Any] = answer.json()
        if report["status"] in {"done", "failed"}:
            return report
        assert time.monotonic() < ends, report
        time.sleep(0.05)


def main() -> None:
    """Serve until killed."""
    from specrag.serving.launch import serve

    values = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    app = make_app(**values)
    serve(app.state.service.settings, app)


if __name__ == "__main__":
    main()
