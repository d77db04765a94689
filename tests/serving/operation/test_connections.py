"""Slow and half-open clients, against a real server on a real socket."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

pytest.importorskip("fastapi")

from tests.serving.ops_server import Program, program

SECONDS = 1.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    limits = {"header_seconds": SECONDS, "body_seconds": SECONDS, "write_seconds": SECONDS}
    folder = tmp_path_factory.mktemp("connections")
    with program(folder, max_connections=64, page=False, kb_root=str(folder / "kb"), **limits) as running:
        yield running


def connect(server: Program) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


def read_to_end(connection: socket.socket) -> bytes:
    """All that comes until the server closes."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            data += part
    return data


def head(path: str, length: int | str) -> bytes:
    kind = b"Transfer-Encoding: chunked" if length == "chunked" else f"Content-Length: {length}".encode()
    return f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n".encode() + kind + b"\r\n\r\n"


def is_alive(server: Program) -> bool:
    return server.alive and httpx.get(f"{server.url}/healthz", timeout=20).status_code == 200


def test_a_head_that_does_not_arrive_ends_the_connection(server: Program) -> None:
    started = time.monotonic()
    with connect(server) as silent, connect(server) as slow:
        for _ in range(3):  # a byte now and then buys no time
            slow.sendall(b"G")
            time.sleep(0.3)
        assert read_to_end(silent) == b""
        assert read_to_end(slow) == b""
    assert time.monotonic() - started < SECONDS + 10
    assert is_alive(server)


@pytest.mark.parametrize("length", [1000, "chunked"])
@pytest.mark.parametrize("path", ["/echo", "/json"])
def test_a_body_that_does_not_arrive_is_told_so(server: Program, path: str, length: int | str) -> None:
    with connect(server) as slow:
        slow.sendall(head(path, length))
        for _ in range(3):
            slow.sendall(b"1\r\nx\r\n" if length == "chunked" else b"x")
            time.sleep(0.1)
        answer = read_to_end(slow)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b'"code": "request_timeout"' in answer


def test_a_body_behind_the_answer_is_not_waited_for(server: Program) -> None:
    with connect(server) as slow:
        slow.sendall(head("/nothing", 1000) + b"x")
        assert read_to_end(slow).startswith(b"HTTP/1.1 404")


def test_an_answer_before_the_end_of_the_body_arrives(server: Program) -> None:
    """Also where the client sends all of it before it reads."""
    with connect(server) as eager:
        eager.sendall(head("/echo", 8_000_000) + b"x" * 8_000_000)
        answer = eager.recv(65536)
        assert answer.startswith(b"HTTP/1.1 413")
        eager.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert eager.recv(65536).startswith(b"HTTP/1.1 200")


def test_an_answer_that_is_not_read_ends_the_connection(server: Program) -> None:
    with connect(server) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.sendall(b"GET /large HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        time.sleep(2 * SECONDS + 2)
        assert len(read_to_end(slow)) < 8_000_000
    assert is_alive(server)


def test_half_requests_make_room_for_whole_ones(server: Program) -> None:
    """Many times more connections than are allowed, all of them half-open; whoever asks in full is answered."""
    with contextlib.ExitStack() as stack:
        for _ in range(640):
            half = stack.enter_context(connect(server))
            with contextlib.suppress(OSError):
                half.sendall(b"POST /echo HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        for _ in range(5):
            assert is_alive(server)


def test_a_small_answer_does_not_wait_for_an_acknowledgement(server: Program) -> None:
    """Nagle's algorithm would hold each one back for 40 ms, behind the first few of a connection."""
    with httpx.Client(base_url=server.url, timeout=20) as client:
        took = []
        for _ in range(20):
            started = time.perf_counter()
            client.get("/healthz").raise_for_status()
            took.append(time.perf_counter() - started)
    assert min(took[10:]) < 0.03


def test_what_is_no_http_is_refused(server: Program) -> None:
    for data in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
        b"POST /echo HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n" + b"f" * 50 + b"\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX: a\nB: c\rD\x00: e\r\n\r\n",
        b"GET http://169.254.169.254/latest HTTP/1.1\r\nHost: 169.254.169.254\r\n\r\n",
        b"CONNECT example.org:80 HTTP/1.1\r\nHost: example.org\r\n\r\n",
    ):
        with connect(server) as odd:
            odd.sendall(data)
            odd.shutdown(socket.SHUT_WR)
            answer = read_to_end(odd)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 4"), (data[:60], answer[:200])
    assert is_alive(server)


def test_a_signal_ends_the_server_in_order(tmp_path: Path) -> None:
    import signal

    with program(tmp_path, page=False, shutdown_seconds=5) as server:
        assert is_alive(server)
        assert server.end(signal.SIGTERM) == 0 or not server.alive
        assert "Application shutdown complete" in server.log.read_text(encoding="utf-8")
        assert "no API key is set" in server.log.read_text(encoding="utf-8")
