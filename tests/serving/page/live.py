"""A server in a thread of the test's own process, on a free port."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
from fastapi import FastAPI

READY_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class LiveServer:
    """A running server.

    Attributes:
        url: where it answers, with a slash at the end.
        app: its application, to look behind the scenes.
    """

    url: str
    app: FastAPI


@contextmanager
def serve(*, ready: bool = True, **settings: Any) -> Iterator[LiveServer]:
    """Run the application with these settings until the block is left.

    Args:
        ready: wait until its model is loaded.
    """
    from specrag.serving.app import create_app
    from specrag.serving.settings import load_settings

    # Equal bits whatever is in a pass: a page's answer is compared with one that is asked for again.
    exact = {"dtype": "int8", "batch_invariant": True, "log_level": "error"}
    app = create_app(load_settings(flags={**exact, **settings}))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive())
        if ready:
            wait_until(lambda: app.state.service.state != "loading")
            assert app.state.service.state == "ready", app.state.service.failure
        port = server.servers[0].sockets[0].getsockname()[1]
        yield LiveServer(f"http://127.0.0.1:{port}/", app)
    finally:
        server.should_exit = True
        thread.join()


def wait_until(condition: Any, seconds: float = READY_SECONDS) -> None:
    """Wait for a condition, looking every 20 ms; fail after some time."""
    ended = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ended, "waited in vain"
        time.sleep(0.02)
