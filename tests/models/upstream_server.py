"""An OpenAI-compatible server without a model, over real sockets, that answers as told or misbehaves."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "words"
#: What every good answer says, one word a token.
WORDS = ("Copper ", "conducts ", "heat ", "well.")
SAID = "".join(WORDS)


class UpstreamServer:
    """A server that listens until it is killed.

    Args:
        port: 0 for a free one.

    Attributes:
        faults: of the next calls, one each; an empty text is none. ``models`` faults are for ``GET /v1/models``.
        seen: bodies that came, with ``path`` and ``authorization``.
        gone: calls whose client went away before the end.
        pause: seconds between the words of a stream.
    """

    def __init__(self, port: int = 0) -> None:
        self.faults: deque[str] = deque()
        self.models_fault = ""
        self.seen: list[dict[str, Any]] = []
        self.gone = 0
        self.pause = 0.0
        self.sockets: set[socket.socket] = set()
        outer = self

        class Handler(_Handler):
            upstream = outer

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Bodies of calls that ask for texts."""
        return [seen for seen in self.seen if seen["path"] != "/v1/models"]

    def kill(self) -> None:
        """Close everything at once, as a killed process does."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
        for connection in list(self.sockets):
            reset(connection)


def reset(connection: socket.socket) -> None:
    """Close a connection without a farewell."""
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    with suppress(OSError):
        connection.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    upstream: UpstreamServer

    def setup(self) -> None:
        super().setup()
        self.upstream.sockets.add(self.connection)

    def finish(self) -> None:
        self.upstream.sockets.discard(self.connection)
        with suppress(OSError):
            super().finish()

    def handle(self) -> None:
        with suppress(OSError):  # the client has gone, or the server was killed
            super().handle()

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        self._note({})
        fault = self.upstream.models_fault
        if fault == "html":
            self._send(200, b"<p>Welcome</p>", "text/html")
        elif fault == "other":
            self._json({"data": [{"id": "verses"}]})
        elif fault == "object":
            self._json({"hello": "world"})
        else:
            self._json({"data": [{"id": MODEL, "max_model_len": 4096}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self._note(body)
        fault = self.upstream.faults.popleft() if self.upstream.faults else ""
        status, _, rest = fault.partition(" ")
        if status.isdigit():
            pause = {"Retry-After": rest} if rest and int(status) in (429, 503) else {}
            said = f"said {self.headers.get('authorization')}"
            self._json(
                {"error": {"message": said, "code": rest if int(status) == 404 else None}}, int(status), pause
            )
        elif fault == "drop":
            reset(self.connection)
        elif fault == "silent":
            time.sleep(30)
        elif fault == "html":
            self._send(200, b"<p>Welcome</p>", "text/html")
        elif fault == "nonsense":
            self._send(200, b"{", "application/json")
        elif fault == "other-json":
            self._json({"hello": "world"})
        elif body.get("stream"):
            self._stream(fault, chat="messages" in body)
        else:
            self._whole(chat="messages" in body)

    def _whole(self, *, chat: bool) -> None:
        fields: dict[str, Any] = (
            {"message": {"role": "assistant", "content": SAID}} if chat else {"text": SAID}
        )
        usage = {"prompt_tokens": 7, "completion_tokens": len(WORDS)}
        choice = {"index": 0, **fields, "finish_reason": "stop"}
        time.sleep(self.upstream.pause * len(WORDS))
        self._json({"model": MODEL, "choices": [choice], "usage": usage})

    def _stream(self, fault: str, *, chat: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        if chat:
            self._event({"choices": [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}]})
        try:
            for number, word in enumerate(WORDS):
                if fault == f"drop {number}":
                    reset(self.connection)
                    return
                if fault == f"end {number}":
                    return
                if fault == f"done {number}":
                    self.wfile.write(b"data: [DONE]\n\n")
                    return
                if fault == f"silent {number}":
                    time.sleep(30)
                if fault == f"garbage {number}":
                    self.wfile.write(b"data: {\n\n")
                    return
                if fault == f"error {number}":
                    self._event({"error": {"message": "out of memory"}})
                    return
                fields = {"delta": {"content": word}} if chat else {"text": word}
                self._event({"choices": [{"index": 0, **fields, "finish_reason": None}]})
                time.sleep(self.upstream.pause)
            empty: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
            end = {"index": 0, **empty, "finish_reason": "stop"}
            self._event({"choices": [end]})
            self._event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": len(WORDS)}})
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            self.upstream.gone += 1
            raise

    def _note(self, body: dict[str, Any]) -> None:
        key = self.headers.get("authorization")
        self.upstream.seen.append({**body, "path": self.path, "authorization": key})

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()

    def _json(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._send(status, json.dumps(value).encode(), "application/json", headers)

    def _send(self, status: int, data: bytes, kind: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {
            **(headers or {}),
            "Content-Type": kind,
            "Content-Length": str(len(data)),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def upstream_server(port: int = 0) -> Iterator[UpstreamServer]:
    """A server, killed at the end."""
    server = UpstreamServer(port)
    try:
        yield server
    finally:
        server.kill()
