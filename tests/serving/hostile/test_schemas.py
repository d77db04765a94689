"""Schemas that are dear to compile or hold what JSON cannot: refused in time, and others keep their deadlines."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

pytest.importorskip("fastapi")

from tests.serving.hostile.measures import measured
from tests.serving.hostile.test_large_bodies import HELLO, body, send
from tests.serving.live_server import EXACT, MODEL, LiveServer, post, running_server

#: 400 patterns, each compared with each: a minute.
DEAR = {
    "type": "object",
    "patternProperties": {
        f"^(a|b)*a(a|b){{{10 + number % 20}}}c{{{number + 1}}}$": {"type": "string"} for number in range(400)
    },
}


def formed(schema: str, **fields: str) -> bytes:
    """A chat request whose answer is to keep to a schema."""
    form = '{"type":"json_schema","json_schema":{"name":"a","schema":' + schema + "}}"
    return body(messages=HELLO, response_format=form, **fields)


def called(schema: str) -> bytes:
    """A chat request with a tool whose parameters keep to a schema."""
    tool = '{"type":"function","function":{"name":"a","parameters":' + schema + "}}"
    return body(messages=HELLO, tools=f"[{tool}]")


def test_a_schema_that_is_dear_to_compile_is_refused_and_deadlines_are_kept(server: LiveServer) -> None:
    answers: list[tuple[int, dict[str, Any]]] = []
    threads = [
        threading.Thread(
            target=lambda: answers.append(send(server, "chat/completions", formed(json.dumps(DEAR))))
        )
        for _ in range(4)
    ]
    with measured(server._loop) as cost:
        for thread in threads:
            thread.start()
        while server.service.preparations.running < 2:
            time.sleep(0.01)
        began = time.monotonic()
        status, answer = send(server, "chat/completions", body(messages=HELLO, specrag='{"deadline":1}'))
        waited = time.monotonic() - began
        for thread in threads:
            thread.join(60)
    assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
    assert waited < 1.5
    assert [status for status, _ in answers] == [400] * 4
    assert all("simplify it" in answer["error"]["message"] for _, answer in answers)
    cost.check()
    server.wait_until_idle()
    assert server.service.preparations.running == 0


def test_the_first_schema_of_a_server_stalls_nobody() -> None:
    """What the library makes of a vocabulary takes 0.15 s of one thread that lets no other in: made before requests."""
    with running_server(**EXACT) as fresh:
        post(fresh, "/v1/completions", {"model": MODEL, "prompt": "Hi", "max_tokens": 1})
        with measured(fresh._loop) as cost:
            status, answer = send(fresh, "chat/completions", formed('{"type":"object"}', max_tokens="2"))
    assert status == 200, answer
    cost.check()


def test_a_schema_of_usual_size_is_followed(server: LiveServer) -> None:
    fields = {f"field_{number}": {"type": "string", "maxLength": 5} for number in range(60)}
    schema = {"type": "object", "properties": fields}
    assert len(json.dumps(schema)) > 1000
    status, answer = send(server, "chat/completions", formed(json.dumps(schema)))
    assert status == 200, answer


WRONG = {
    "not a number": '{"const":NaN}',
    "infinity": '{"minimum":-Infinity}',
    "a large number": '{"const":1' + "0" * 400 + "}",
    "half a character": '{"const":"\\ud800"}',
    "half a character as a name": '{"properties":{"\\ud800":{"type":"string"}}}',
    "depth 100": '{"type":"array","items":' * 100 + "{}" + "}" * 100,
    "depth 200": '{"type":"array","items":' * 200 + "{}" + "}" * 200,
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("place", ["response_format", "tools"])
def test_a_schema_that_cannot_be_read_is_no_failure_of_the_server(
    server: LiveServer, name: str, place: str
) -> None:
    made = formed if place == "response_format" else called
    status, answer = send(server, "chat/completions", made(WRONG[name]))
    if name == "depth 100":
        assert status in {200, 400}, answer
    else:
        assert status == 400, answer
    if status == 400:
        assert place in answer["error"]["param"] or answer["error"]["param"] in {"schema", "tools"}, answer


@pytest.mark.parametrize("value", [json.dumps(["a"] * 100_000), '{"=":' + "[" * 900 + "]" * 900 + "}", "NaN"])
def test_a_condition_that_cannot_be_compared_is_refused(server: LiveServer, value: str) -> None:
    content = b'{"query":"a","k":1,"where":{"source":' + value.encode() + b"}}"
    status, answer = send(server, "kb/wiki/search", content)
    assert status == 400, answer
    assert "where" in answer["error"]["message"]
