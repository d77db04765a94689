"""Bodies that are small to send and dear to check: refused before the work, while others are answered."""

from __future__ import annotations

import http.client
import json
import threading
import time
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi")

from specrag.serving.operation.limits import MAX_NESTED, MAX_VALUES, _holds_more
from tests.serving.hostile.measures import attacked
from tests.serving.live_server import MODEL, LiveServer

SIZE = 4 * 2**20 - 1000


def many(item: str, count: int | None = None) -> str:
    """A list of as many items as a body may hold bytes."""
    return "[" + ",".join([item] * (count or SIZE // (len(item) + 1))) + "]"


def body(**fields: str) -> bytes:
    """A request with fields that are given as JSON."""
    given = {"model": json.dumps(MODEL), "max_tokens": "1", **fields}
    return ("{" + ",".join(f'"{name}":{value}' for name, value in given.items()) + "}").encode()


HELLO = '[{"role":"user","content":"Hi"}]'
FEW, FEW_NESTED = MAX_VALUES - 100, MAX_NESTED - 100  # just not too many for the count

BODIES: dict[str, tuple[str, bytes]] = {
    "parts": ("chat/completions", body(messages='[{"role":"user","content":' + many("{}") + "}]")),
    "few parts": (
        "chat/completions",
        body(messages='[{"role":"user","content":' + many("{}", FEW_NESTED) + "}]"),
    ),
    "modalities": ("chat/completions", body(messages=HELLO, modalities=many("1"))),
    "few modalities": ("chat/completions", body(messages=HELLO, modalities=many("1", FEW))),
    "messages": ("chat/completions", body(messages=many("[]", FEW_NESTED))),
    "prompts": ("completions", body(prompt=many("[]"))),
    "few prompts": ("completions", body(prompt=many("[]", FEW_NESTED))),
    "texts": ("completions", body(prompt=many('""', FEW))),
    "unknown fields": ("completions", body(prompt='"a"', **{f"k{number}": "1" for number in range(60_000)})),
    "options": (
        "chat/completions",
        body(messages=HELLO, specrag='{"options":{"a":' + many("[]", FEW_NESTED) + "}}"),
    ),
    "inputs": ("embeddings", body(input=many("[]", FEW_NESTED))),
    "knowledge bases": ("kb", body(name='"a"', **{f"k{number}": "1" for number in range(60_000)})),
    "conditions": ("kb/wiki/search", body(query='"a"', where='{"source":' + many("1", FEW) + "}")),
}


def send(server: LiveServer, path: str, content: bytes) -> tuple[int, dict[str, Any]]:
    """One request with as little work on the client's side as can be."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=120)
    try:
        connection.request("POST", f"/v1/{path}", content, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


@pytest.mark.parametrize("name", BODIES)
def test_a_body_of_many_values_is_refused_before_it_is_checked(server: LiveServer, name: str) -> None:
    path, content = BODIES[name]
    status, answer = attacked(server._loop, lambda: send(server, path, content))
    assert status == 400, answer
    assert answer["error"]["code"] in {"invalid_value", "kb_not_found"}


def test_others_are_answered_meanwhile(server: LiveServer) -> None:
    """Four clients send what is dear to check, again and again; a fifth gets its answers."""
    ends = time.monotonic() + 2

    def attack() -> None:
        while time.monotonic() < ends:
            send(server, *BODIES["parts"])

    threads = [threading.Thread(target=attack) for _ in range(4)]
    for thread in threads:
        thread.start()
    answered = 0
    with httpx.Client(base_url=server.url) as asking:
        while time.monotonic() < ends:
            assert asking.get("/healthz").status_code == 200
            answered += 1
    for thread in threads:
        thread.join()
    assert answered >= 5  # one waited 13 seconds before


def test_marks_in_texts_are_not_counted() -> None:
    text = json.dumps({"a": ',[{:"\\' * 1000, "b": [1, 2]}).encode()
    assert not _holds_more(text, 6, 2)
    assert _holds_more(text, 5, 2)
    assert _holds_more(text, 6, 1)
    assert _holds_more(b'","' * 100, 50, 50)  # no JSON, and no more work for it


def test_a_long_text_and_many_tokens_are_taken(server: LiveServer) -> None:
    status, answer = send(server, "completions", body(prompt=many("5", 2000)))
    assert status == 200, answer
    prose = json.dumps("Cut, measured: [or so] " * 40)
    status, answer = send(
        server, "chat/completions", body(messages='[{"role":"user","content":' + prose + "}]")
    )
    assert status == 200, answer
