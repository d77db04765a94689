"""Runs this process's engine as a replica of a pool: the server itself, behind a socket that only its user can open.

This way a pool has only one kind of replica. A call has the overhead of a call to a server on this machine.
"""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import uvicorn

from specrag.errors import SpecragError
from specrag.models.endpoint import Address

if TYPE_CHECKING:
    from specrag.models import Tokenizer
    from specrag.serving.service import Service
    from specrag.serving.settings import Settings

#: Overrides of settings that belong to the gateway in front of the socket and not to the engine behind it.
_IN_FRONT: dict[str, Any] = {
    "upstreams": (),
    "kbs": {},
    "tables": {},
    "kb_root": None,
    "keys": (),
    "api_key": None,
    "api_key_file": None,
    "host": "127.0.0.1",
    "cors_origins": (),
    "allowed_hosts": (),
    "idle_seconds": None,
    "page": False,
    "metrics": False,
    "tracing": False,
    "method": "adaptive",
}


class OwnEngine:
    """Serves the settings' model to this process only.

    Args:
        settings: the gateway's.
        name: the model's name behind the socket.
    """

    def __init__(self, settings: Settings, name: str) -> None:
        self._settings = settings.model_copy(update={**_IN_FRONT, "served_name": name})
        self._folder = TemporaryDirectory(prefix="specrag-")  # only this user may enter it
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self._service: Service | None = None

    @property
    def address(self) -> Address:
        """The address at which the pool reaches the engine."""
        return Address(
            "http://localhost/v1",
            socket=str(Path(self._folder.name) / "engine"),
            silence_seconds=self._settings.deadline,
        )

    def start(self) -> None:
        """Load the model and listen; takes seconds.

        Raises:
            SpecragError: the model cannot be loaded.
        """
        from specrag.serving.app import create_app

        app = create_app(self._settings)
        config = uvicorn.Config(
            app, uds=self.address.socket, ws="none", loop="asyncio", log_config=None, access_log=False
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=asyncio.run, args=(self._server.serve(),), name="specrag-own-engine", daemon=True
        )
        self._thread.start()
        self._service = service = app.state.service
        while self._thread.is_alive() and (service.state == "loading" or not self._server.started):
            time.sleep(0.02)
        if service.state != "ready":
            self.close()
            raise service.failure or SpecragError("the engine of this machine cannot be started")

    @property
    def tokenizer(self) -> Tokenizer:
        """The loaded model's tokenizer."""
        assert self._service is not None
        return self._service.llm.tokenizer

    def close(self) -> None:
        """End running requests and release the model."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = self._server.force_exit = True
            self._thread.join()
        self._folder.cleanup()
