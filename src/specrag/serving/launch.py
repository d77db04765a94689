"""Starts the server and shuts it down in an orderly way."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from typing import TYPE_CHECKING

import uvicorn

from specrag.errors import InputError
from specrag.serving.keys import readable_by_all
from specrag.serving.operation.connections import watched_protocol
from specrag.serving.operation.logs import take_over_libraries
from specrag.serving.running import LOADING, RunningServer, noted
from specrag.serving.settings import Settings

if TYPE_CHECKING:
    from fastapi import FastAPI

_SPARE_FILES = 256  # besides the connections: models, indexes, uploads


class _Server(uvicorn.Server):
    """Tells the application as soon as it is asked to stop; stops by itself after being idle for long."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, settings: Settings) -> None:
        super().__init__(config)
        self._app = app
        self._seconds = settings.shutdown_seconds
        self._idle_seconds = settings.idle_seconds

    async def on_tick(self, counter: int) -> bool:
        """Whether the server should stop; called ten times a second."""
        return await super().on_tick(counter) or self._is_idle()

    def _is_idle(self) -> bool:
        if self._idle_seconds is None or self._app.state.service.state != "ready":
            return False
        idle: float = self._app.state.operation.activity.idle
        return idle >= self._idle_seconds

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop admitting requests, wait for the running ones, then end."""
        self._app.state.operation.readiness.stop()
        self._app.state.service.begin_stop(self._seconds)
        await super().shutdown(sockets)


def serve(settings: Settings, app: FastAPI | None = None) -> None:
    """Serve until a signal arrives.

    Args:
        settings: already checked.
        app: an application with its operation added; by default the complete one.

    Raises:
        InputError: the server cannot listen on the address.
        SpecragError: the model cannot be loaded.
    """
    if app is None:
        from specrag.serving.app import create_app

        app = create_app(settings)
    log = app.state.operation.log
    take_over_libraries(log)
    if settings.api_key_file is not None and readable_by_all(settings.api_key_file):
        log.warning("key file readable by all", file=str(settings.api_key_file), remedy="chmod o-r it")
    raise_file_limit(settings.max_connections + _SPARE_FILES)
    config = uvicorn.Config(
        app,
        http=watched_protocol(settings),
        ws="none",
        loop="asyncio",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=int(settings.shutdown_seconds) + 5,
    )
    with _listen(settings.host, settings.port) as listener:
        host, port = listener.getsockname()[:2]
        log.info(
            "listening",
            url=f"http://{f'[{host}]' if ':' in host else host}:{port}",
            model=settings.name,
            keys=len(settings.all_keys()),
            knowledge_bases=app.state.operation.bases.names(),
            note=None if settings.needs_key else "no API key is set: only this machine is served",
        )
        server = _Server(config, app, settings)
        service = app.state.service
        service.ended_by_failure = lambda: setattr(server, "should_exit", True)
        with _noted(settings, f"http://{host}:{port}"):
            server.run([listener])
    if service.failure is not None:
        raise service.failure


def _noted(settings: Settings, url: str) -> contextlib.AbstractContextManager[None]:
    """Let commands on this machine find the server, unless they would need a key."""
    if settings.needs_key:
        return contextlib.nullcontext()
    return noted(
        RunningServer(
            pid=os.getpid(),
            url=url,
            name=settings.name,
            model="" if settings.upstreams else settings.model,
            is_default="model" not in settings.model_fields_set,
            loading=settings.model_dump(mode="json", include=set(LOADING)),
            kbs={name: str(path.expanduser().resolve()) for name, path in settings.kbs.items()},
            background=settings.idle_seconds is not None,
        )
    )


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # asyncio turns Nagle's algorithm off only for sockets that name their protocol. With it, a small response
        # waits 40 ms for the client's delayed acknowledgement of its head.
        listener = socket.socket(family[0], family[1], socket.IPPROTO_TCP)
    except OSError as error:
        raise InputError(
            "host", host, f"{error.strerror or error}; give an address of this machine"
        ) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(family[4])
        listener.listen(2048)
        listener.set_inheritable(False)
    except OSError as error:
        listener.close()
        raise InputError("port", port, f"{(error.strerror or str(error)).lower()}; take another") from None
    return listener


def raise_file_limit(wanted: int) -> None:
    """Raise the limit of open files to ``wanted``, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
