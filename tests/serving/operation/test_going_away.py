"""Clients that go away, times that are over, a queue that is full, a server that stops: nothing is left behind."""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import Any

import httpx
import openai
import pytest

from tests.serving.live_server import MODEL, LiveServer, post, running_server, wait_for

LONG: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Tell a long story about the sea."}],
    "temperature": 0,
    "max_tokens": 4000,
    "ignore_eos": True,
}


def tasks(server: LiveServer) -> int:
    """Coroutines that the executor looks after."""
    return len(server.service.llm.executor._tasks)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_goes_away_frees_its_session(server: LiveServer, stream: bool) -> None:
    address = server.url.removeprefix("http://").split(":")
    body = json.dumps({**LONG, "stream": stream}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {':'.join(address)}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    executor = server.service.llm.executor
    counted, behind = executor.on_pass, [0]

    def count(texts: int, rows: int) -> None:
        assert counted is not None
        counted(texts, rows)
        behind[0] += 1

    with socket.create_connection((address[0], int(address[1]))) as connection:
        connection.sendall(head.encode() + body)
        wait_for(lambda: server.service.admission.running == 1 and tasks(server) == 1)
        if stream:
            assert b"200 OK" in connection.recv(4096)
        executor.on_pass = count
    server.wait_until_idle(5)
    executor.on_pass = counted
    # The pass that ran when the connection closed, and the one that began before the server was told.
    assert behind[0] <= 3


def test_the_official_client_ends_a_stream_early(server: LiveServer) -> None:
    stream = server.client().chat.completions.create(
        model=MODEL, messages=LONG["messages"], stream=True, max_tokens=4000, extra_body={"ignore_eos": True}
    )
    for count, _ in enumerate(stream):
        if count == 3:
            stream.close()
            break
    server.wait_until_idle(5)


def test_a_deadline_ends_an_answer_by_its_status_or_in_its_stream(server: LiveServer) -> None:
    late = {**LONG, "specrag": {"deadline": 0.4}}
    response = post(server, "/v1/chat/completions", late)
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "deadline_exceeded"
    late = {**LONG, "stream": True, "specrag": {"deadline": 2.5}}
    streamed = post(server, "/v1/chat/completions", late)
    events = [line.removeprefix("data: ") for line in streamed.text.split("\n\n") if line]
    assert streamed.status_code == 200
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["code"] == "deadline_exceeded"
    with pytest.raises(openai.InternalServerError, match="deadline") as caught:
        # With the client's own retries, which would only repeat it.
        server.client().with_options(max_retries=3).chat.completions.create(
            model=MODEL,
            messages=LONG["messages"],
            max_tokens=4000,
            extra_body={"ignore_eos": True, "specrag": {"deadline": 0.4}},
        )
    assert caught.value.response.headers["x-should-retry"] == "false"
    server.wait_until_idle(5)


def test_a_prompt_that_is_longer_than_the_operator_allows_is_refused(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = server.service.settings.model_copy(update={"max_prompt_tokens": 40})
    monkeypatch.setattr(server.service, "settings", settings)
    short, long = (
        post(server, "/v1/completions", {"model": MODEL, "prompt": "sea " * words, "max_tokens": 2})
        for words in (20, 60)
    )
    assert short.status_code == 200
    assert long.status_code == 400
    assert "at most 40 tokens" in long.json()["error"]["message"]


def test_memory_and_the_queue_have_limits(server: LiveServer) -> None:
    admission = server.service.admission
    budget, limit = admission.budget, admission._limit
    need = server.service.served(MODEL).bytes_for(4000)
    try:
        admission.budget = need // 2
        response = post(server, "/v1/chat/completions", LONG)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "request_too_large"
        # Room for one of them: the second waits, the third finds the queue full.
        admission.budget, admission._limit = need + need // 2, 1
        with httpx.Client(timeout=60) as client:
            opened = [threading.Event(), threading.Event()]
            stop = threading.Event()
            answers: list[int] = []

            def read(event: threading.Event) -> None:
                body = {**LONG, "stream": True}
                with client.stream("POST", f"{server.url}/v1/chat/completions", json=body) as stream:
                    answers.append(stream.status_code)
                    for _ in stream.iter_raw():
                        event.set()
                        if stop.is_set():
                            return

            first = threading.Thread(target=read, args=(opened[0],))
            first.start()
            assert opened[0].wait(20)
            second = threading.Thread(target=read, args=(opened[1],))
            second.start()
            wait_for(lambda: admission.waiting == 1)
            third = post(server, "/v1/chat/completions", LONG)
            assert third.status_code == 429
            assert int(third.headers["retry-after"]) >= 1
            assert not opened[1].is_set()
            stop.set()
            assert opened[1].wait(20)
            first.join(20)
            second.join(20)
        assert answers == [200, 200]
    finally:
        admission.budget, admission._limit = budget, limit
    server.wait_until_idle(5)


def test_short_requests_are_not_held_up_by_long_prompts(server: LiveServer) -> None:
    long = {"model": MODEL, "prompt": "The sea is wide and deep. " * 220, "max_tokens": 1}
    short = {"model": MODEL, "prompt": "Copper is", "max_tokens": 2, "temperature": 0}
    done: list[str] = []

    def ask(name: str, body: dict[str, Any]) -> None:
        assert post(server, "/v1/completions", body).status_code == 200
        done.append(name)

    threads = [threading.Thread(target=ask, args=(f"long {number}", long)) for number in range(2)]
    for thread in threads:
        thread.start()
    wait_for(lambda: tasks(server) == 2)
    last = threading.Thread(target=ask, args=("short", short))
    last.start()
    for thread in [*threads, last]:
        thread.join(120)
    assert done[0] == "short"


@pytest.mark.parametrize("tokens", [60, 4000])
def test_a_client_that_reads_a_byte_a_second_holds_nobody_up(server: LiveServer, tokens: int) -> None:
    """A stream's session is its own: it runs to its end, or ends with the client, while others are answered."""
    address = server.url.removeprefix("http://").split(":")
    body = json.dumps({**LONG, "stream": True, "max_tokens": tokens}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {':'.join(address)}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((address[0], int(address[1]))) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.sendall(head.encode() + body)
        for _ in range(3):
            assert slow.recv(1)
            time.sleep(1)
            quick = post(server, "/v1/chat/completions", {**LONG, "max_tokens": 4})
            assert quick.status_code == 200
        if tokens == 60:
            server.wait_until_idle()
    server.wait_until_idle(5)


def test_a_server_that_stops_lets_a_short_stream_finish(smollm2: object) -> None:
    received: list[str] = []
    with running_server() as stopping, httpx.Client(timeout=60) as client:
        body = {**LONG, "max_tokens": 40, "stream": True}
        with client.stream("POST", f"{stopping.url}/v1/chat/completions", json=body) as stream:
            for text in stream.iter_text():
                if not received:
                    stopping.in_loop(lambda: stopping.service.begin_stop(30))
                received.append(text)
        assert stopping.service.state == "stopping"
        stopping.wait_until_idle(5)
    text = "".join(received)
    assert text.endswith("data: [DONE]\n\n")
    last = json.loads(text.split("data: ")[-2])
    assert last["choices"][0]["finish_reason"] == "length"


def test_a_server_that_stops_ends_its_streams_properly(smollm2: object) -> None:
    received: list[str] = []
    with running_server() as stopping, httpx.Client(timeout=60) as client:
        started = threading.Event()

        def read() -> None:
            body = {**LONG, "stream": True}
            with client.stream("POST", f"{stopping.url}/v1/chat/completions", json=body) as stream:
                for text in stream.iter_text():
                    received.append(text)
                    started.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert started.wait(30)
        stopping.in_loop(lambda: stopping.service.begin_stop(0.2))
        wait_for(lambda: stopping.service.state == "stopping")
        refused = post(stopping, "/v1/chat/completions", LONG)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "stopping"
        reader.join(30)
        assert not reader.is_alive()
        stopping.wait_until_idle(5)
    text = "".join(received)
    assert text.endswith("data: [DONE]\n\n")
    assert json.loads(text.split("data: ")[-2])["error"]["code"] == "stopping"


def test_a_client_that_goes_as_its_place_comes_leaves_nothing_running(server: LiveServer) -> None:
    """Closed 0 to 2 ms behind a request, while it is prepared or let in, no text is written to its end."""
    address = server.url.removeprefix("http://").split(":")
    body = json.dumps({"model": MODEL, "prompt": "The sea", "max_tokens": 4000, "ignore_eos": True}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {':'.join(address)}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    for delay in (0.0, 0.001, 0.002) * 5:
        with socket.create_connection((address[0], int(address[1]))) as connection:
            connection.sendall(head.encode() + body)
            time.sleep(delay)
    post(server, "/v1/completions", {"model": MODEL, "prompt": "Copper", "max_tokens": 1})
    server.wait_until_idle(5)
