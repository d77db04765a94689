"""Prompts that are far too long: refused before they are tokenized, and what is tokenized holds nobody up."""

from __future__ import annotations

import json
import time

import pytest

pytest.importorskip("fastapi")

from tests.serving.hostile.measures import attacked
from tests.serving.hostile.test_large_bodies import body, send
from tests.serving.live_server import LiveServer


@pytest.mark.parametrize("size", [4_000_000, 500_000])
@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_a_prompt_that_cannot_fit_is_refused_at_once(server: LiveServer, route: str, size: int) -> None:
    text = json.dumps("1" * size)
    fields = (
        {"prompt": text} if route == "completions" else {"messages": f'[{{"role":"user","content":{text}}}]'}
    )
    content = body(**fields)
    before = time.process_time()
    status, answer = send(server, route, content)
    assert time.process_time() - before < 2  # tokenizing all of it takes 4 to 20 s
    status, answer = attacked(server._loop, lambda: send(server, route, content))
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


def test_a_long_prompt_that_is_tokenized_lets_others_run(server: LiveServer) -> None:
    tokenizer = server.service.llm.tokenizer
    text = "1" * 100_000
    tokens = attacked(server._loop, lambda: tokenizer.encode(text, special=False))
    assert len(tokens) == 100_000
    assert tokens[:3000] == tokenizer.encode(text[:3000], special=False)


def test_a_prompt_that_just_fits_is_taken(server: LiveServer) -> None:
    """Many characters a token: the bytes are those of ten times the context, the tokens are not."""
    text = "\n" + " " * 60
    length = server.service.llm.context_length
    assert (
        len(server.service.llm.tokenizer.encode(text * 1400, special=False)) < length < len(text * 1400) // 10
    )
    status, answer = send(server, "completions", body(prompt=json.dumps(text * 700)))
    assert status == 200, answer
