"""How the clients of the kill test judge an answer, over real sockets."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from benchmarks.gateway.clients import Outcome, Question, ask_once, ask_until
from tests.models.upstream_server import SAID, UpstreamServer, upstream_server
from tests.serving.live_server import running_server

BODY: dict[str, Any] = {"model": "quartz", "messages": [{"role": "user", "content": "What is copper?"}]}
RIGHT, WRONG = Question(BODY, SAID), Question(BODY, "Copper conducts badly.")


@pytest.fixture(scope="module")
def upstream() -> Iterator[UpstreamServer]:
    with upstream_server() as server:
        yield server


@pytest.fixture(scope="module")
def gateway(upstream: UpstreamServer) -> Iterator[str]:
    row = {"name": "quartz", "urls": [upstream.url], "silence_seconds": 0.5}
    with running_server(upstreams=[row]) as server:
        yield server.url


def wait_until_ready(gateway: str) -> None:
    """A replica that has failed is left out for a while."""
    while httpx.get(f"{gateway}/readyz").status_code != 200:
        threading.Event().wait(0.05)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("question", "fault", "outcome"),
    [(RIGHT, "", "right"), (WRONG, "", "wrong"), (RIGHT, "500", "told"), (RIGHT, "429 1", "told")],
)
def test_an_answer_is_right_wrong_or_a_clear_error(
    question: Question, fault: str, outcome: Outcome, stream: bool, gateway: str, upstream: UpstreamServer
) -> None:
    upstream.faults.extend([fault] * 3)
    with httpx.Client() as http:
        found, said = ask_once(http, gateway, question, stream=stream)
    upstream.faults.clear()
    assert found == outcome, said
    wait_until_ready(gateway)
    threading.Event().wait(1.1 if fault == "429 1" else 0)


def test_a_stream_that_breaks_off_is_told_behind_the_right_beginning_alone(
    gateway: str, upstream: UpstreamServer
) -> None:
    with httpx.Client() as http:
        for question, outcome in ((RIGHT, "told"), (WRONG, "told"), (Question(BODY, "Tin."), "lost")):
            upstream.faults.append("end 2")  # a reset might take the words before it away
            assert ask_once(http, gateway, question, stream=True)[0] == outcome
            wait_until_ready(gateway)


class _Careless(BaseHTTPRequestHandler):
    """Answers 500 without a word, or nothing."""

    def do_POST(self) -> None:
        if self.path.startswith("/silent"):
            threading.Event().wait(1)
        self.send_response(500)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def test_what_is_neither_answer_nor_clear_error_is_lost_or_late() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Careless)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    over = threading.Event()
    told: list[str] = []

    def tell(question: Question, outcome: Outcome, said: str) -> None:
        told.append(outcome)
        over.set()

    assert ask_until(over, url, [RIGHT], 1, tell=tell) == {"lost": 1}
    with httpx.Client(timeout=0.2) as http:
        assert ask_once(http, f"{url}/silent", RIGHT, stream=False)[0] == "late"
    server.shutdown()
    server.server_close()
    with httpx.Client() as http:
        assert ask_once(http, url, RIGHT, stream=True)[0] == "lost"
    assert told == ["lost"]
