"""The whole server with a real model, in a thread of the test's own process."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    import openai

    from specrag.serving.service import Service

MODEL = "smollm2-135m"

#: Equal bits whatever else is in a pass, so that answers can be compared under load.
EXACT: dict[str, Any] = {"model": MODEL, "dtype": "int8", "batch_invariant": True, "page": False}


class LiveServer:
    """A server that listens.

    Attributes:
        url: of its root.
        service: its inner parts, to be looked at.
    """

    def __init__(self, url: str, service: Service, loop: asyncio.AbstractEventLoop) -> None:
        self.url = url
        self.service = service
        self._loop = loop

    def client(self, **options: Any) -> openai.OpenAI:
        """The official client."""
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120, **options)

    def async_client(self, **options: Any) -> openai.AsyncOpenAI:
        """The official client for asyncio."""
        import openai

        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120, **options
        )

    def in_loop(self, function: Callable[[], Any]) -> None:
        """Call a function in the server's event loop."""
        self._loop.call_soon_threadsafe(function)

    @property
    def idle(self) -> bool:
        """Whether nothing runs, waits, or holds memory."""
        admission = self.service.admission
        upstreams = self.service.upstreams
        executor = self.service.llm.executor if upstreams is None else upstreams.executor
        tasks = executor._tasks
        return not (admission.running or admission.waiting or admission.reserved or tasks)

    def wait_until_idle(self, seconds: float = 20.0) -> None:
        """Fail if something is left over."""
        wait_for(lambda: self.idle, seconds)


def wait_for(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Fail if a condition does not come true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.005)


@contextmanager
def running_server(**settings: Any) -> Iterator[LiveServer]:
    """Start a server, wait until it is ready, and stop it afterwards."""
    import uvicorn

    from specrag.serving.app import create_app
    from specrag.serving.settings import load_settings

    # A server that has loaded freezes all that lives, which no collection looks at again: what has died since goes.
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    usual = {"page": False} if "upstreams" in settings else EXACT
    app = create_app(load_settings(None, {**usual, "log_level": "error", **settings}))
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    config = uvicorn.Config(
        app, log_config=None, access_log=False, ws="none", timeout_graceful_shutdown=10, loop="asyncio"
    )
    server = uvicorn.Server(config)
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve([listener])

    thread = threading.Thread(target=asyncio.run, args=(serve(),), name="live-server")
    thread.start()
    try:
        wait_for(lambda: loops and server.started, 60)
        service: Service = app.state.service
        wait_for(lambda: service.state != "loading", 120)
        assert service.state == "ready", service.failure
        yield LiveServer(f"http://127.0.0.1:{port}", service, loops[0])
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()
    assert not thread.is_alive()


def post(server: LiveServer, path: str, body: dict[str, Any], timeout: float = 120) -> httpx.Response:
    """One request without any client's help."""
    return httpx.post(f"{server.url}{path}", json=body, timeout=timeout)
