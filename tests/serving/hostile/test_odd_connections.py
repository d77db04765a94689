"""Requests with two lengths, clients that close one side or both, and clients that never read."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

pytest.importorskip("fastapi")

from tests.serving.ops_server import Program, program

HEALTH = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    with program(tmp_path_factory.mktemp("odd"), page=False) as running:
        yield running


def sent(server: Program, data: bytes, *, half_close: bool = False) -> bytes:
    """What the server answers until it closes, at most for two seconds."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=2) as connection:
        connection.sendall(data)
        if half_close:
            connection.shutdown(socket.SHUT_WR)
        answer = b""
        while part := connection.recv(65536):
            answer += part
        return answer


@pytest.mark.parametrize("length", [3, 100])
def test_two_lengths_end_the_connection(server: Program, length: int) -> None:
    """What stands behind the first of them is not read as another request."""
    head = f"POST /echo HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {length}\r\n".encode()
    answer = sent(server, head + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n" + HEALTH)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"connection: close" in answer.lower()
    assert answer.count(b"HTTP/1.1") == 1
    assert b"two lengths" in answer


def test_one_length_does_not(server: Program) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        for _ in range(2):
            connection.sendall(b"POST /echo HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 3\r\n\r\nabc")
            answer = b""
            while b"}" not in answer:
                part = connection.recv(65536)
                assert part
                answer += part
            assert answer.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_half_closed_client_is_answered(server: Program, version: bytes, count: int) -> None:
    request = b"POST /slow HTTP/" + version + b"\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\n\r\n"
    if version == b"1.0":
        count = 1  # it has no more
    answer = sent(server, request * count, half_close=True)
    assert answer.count(b'{"waited":true}') == count
    assert answer.count(b"HTTP/1.1 200") == count


def test_a_half_sent_request_is_not_waited_for(server: Program) -> None:
    began = time.monotonic()
    head = b"POST /slow HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 10\r\n\r\nx"
    assert b"200" not in sent(server, head, half_close=True)
    assert sent(server, b"GET /healthz HT", half_close=True) == b""
    assert time.monotonic() - began < 2


def test_a_client_that_has_gone_is_noticed(server: Program) -> None:
    """It closes both sides; what is done for it ends at once."""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=5)
    connection.sendall(b"POST /until-gone HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\n\r\n")
    time.sleep(0.3)
    connection.close()
    ends = time.monotonic() + 2
    while not httpx.get(f"{server.url}/gone").json()["gone"]:
        assert time.monotonic() < ends
        time.sleep(0.02)


def test_a_stream_that_is_never_read_ends(tmp_path: Path) -> None:
    """Past write_seconds, although the client goes on holding the connection; the server counts no error of its own."""
    with program(tmp_path, page=False, write_seconds=1.5) as server:
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect(("127.0.0.1", server.port))
            deaf.sendall(b"GET /stream HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            time.sleep(0.7)
            assert httpx.get(f"{server.url}/gone").json()["streams"] == 1
            ends = time.monotonic() + 8
            while httpx.get(f"{server.url}/gone").json()["streams"]:
                assert time.monotonic() < ends
                time.sleep(0.1)
        for line in server.log.read_text(encoding="utf-8").splitlines():
            assert json.loads(line)["level"] != "error", line
