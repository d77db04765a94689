"""Uploads that never end: they leave room for others, and the server answers meanwhile."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

pytest.importorskip("fastapi")

from tests.serving.ops_server import MASTER, WRITER, Program, bearer, program

CONNECTIONS = 40
MAKER = "maker-key-0123456789"
KEYS = [{"name": "writer", "key": WRITER, "upload": True}, {"name": "master", "key": MASTER, "upload": True}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    folder = tmp_path_factory.mktemp("slow")
    values = {"max_connections": CONNECTIONS, "body_seconds": 1.5, "max_uploads": 3, "min_body_rate": 1000}
    key = {"name": "maker", "key": MAKER, "create": True, "upload": True}
    with program(folder, page=False, kb_root=str(folder / "kb"), keys=[*KEYS, key], **values) as running:
        made = httpx.post(f"{running.url}/v1/kb", json={"name": "metals"}, headers=bearer(MAKER))
        assert made.status_code == 201, made.text
        yield running


def slow_upload(server: Program, key: str, path: str = "/v1/kb/metals/documents") -> socket.socket:
    """The head of a large upload and the first lines of its body."""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    begin = b'--b\r\nContent-Disposition: form-data; name="files"; filename="a.txt"\r\n\r\nTin'
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: multipart/form-data; boundary=b\r\nContent-Length: 1000000\r\n\r\n"
    )
    with contextlib.suppress(OSError):
        connection.sendall(head.encode() + begin)
    return connection


def told(connection: socket.socket) -> bytes:
    """An answer, whose head and body may come apart; empty where none comes."""
    answer = b""
    with contextlib.suppress(OSError):
        while b"}" not in answer and (part := connection.recv(65536)):
            answer += part
    return answer


def test_a_key_has_so_many_uploads_on_their_way(server: Program) -> None:
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(slow_upload(server, WRITER))
        time.sleep(0.2)
        refused = told(stack.enter_context(slow_upload(server, WRITER)))
        assert refused.startswith(b"HTTP/1.1 429")
        assert b"uploads_full" in refused
        files = [("files", ("a.txt", b"Tin melts."))]
        url = f"{server.url}/v1/kb/metals/documents"
        assert httpx.post(url, files=files, headers=bearer(MASTER)).status_code == 202
    time.sleep(0.3)
    assert httpx.post(url, files=files, headers=bearer(WRITER)).status_code == 202


def test_a_body_that_trickles_is_ended_and_a_slow_one_is_not(server: Program) -> None:
    with slow_upload(server, WRITER) as trickle, slow_upload(server, MASTER) as slow:
        began = time.monotonic()
        for _ in range(30):
            with contextlib.suppress(OSError):
                trickle.sendall(b"x")
            slow.sendall(b"x" * 300)
            time.sleep(0.1)
        assert told(trickle).startswith(b"HTTP/1.1 408")
        slow.settimeout(0.1)
        assert told(slow) == b""  # it goes on
        assert time.monotonic() - began < 10


@pytest.mark.parametrize("path", ["/v1/kb/metals/documents", "/echo"])
def test_bodies_that_never_end_leave_a_connection_for_others(server: Program, path: str) -> None:
    """Twice as many as there are connections, all of them sent with a valid key."""
    with ExitStack() as stack:
        for _ in range(2 * CONNECTIONS):
            stack.enter_context(slow_upload(server, WRITER, path))
        for _ in range(5):
            began = time.monotonic()
            assert httpx.get(f"{server.url}/healthz", timeout=5).status_code == 200
            assert time.monotonic() - began < 1


def test_an_address_has_so_many_connections(tmp_path: Path) -> None:
    """Another one is not ended for them; the address's own oldest is."""
    with program(tmp_path, page=False, max_client_connections=3) as server, ExitStack() as stack:
        other = socket.create_connection(("127.0.0.1", server.port), 20, source_address=("127.0.0.2", 0))
        stack.enter_context(other)
        mine = []
        for _ in range(4):
            mine.append(stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 20)))
            time.sleep(0.1)
        assert told(mine[0]) == b""
        for connection in (other, *mine[1:]):
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert told(connection).startswith(b"HTTP/1.1 200")
