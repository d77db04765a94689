"""Answers that are dear to write down: others are answered meanwhile."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from itertools import accumulate
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("fastapi")

from specrag.engine.outputs import Row
from specrag.serving.openai.logprobs import PromptScored, TokenNames, completion_log_probs
from specrag.serving.openai.streaming import to_json
from tests.processor import slowness
from tests.serving.hostile.measures import ATTEMPTS
from tests.serving.live_server import MODEL, LiveServer, post

TOKENS = 300
TEXTS = 4


def body(**more: Any) -> dict[str, Any]:
    prompts = [[1 + (number + text) % 40000 for number in range(TOKENS)] for text in range(TEXTS)]
    return {"model": MODEL, "prompt": prompts, "max_tokens": 0, "echo": True, "logprobs": 20, **more}


def test_a_scored_prompt_is_written_beside_the_loop(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever writes down the answer, and makes JSON of it, does so in another thread than the loop's."""
    threads = []

    def noted(function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            threads.append(threading.current_thread().name)
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(
        "specrag.serving.openai.completions.completion_log_probs", noted(completion_log_probs)
    )
    monkeypatch.setattr("specrag.serving.openai.answering.to_json", noted(to_json))
    answer = post(server, "/v1/completions", body())
    assert answer.status_code == 200, answer.text[:300]
    assert len(threads) == TEXTS + 1
    assert "live-server" not in threads
    choices = answer.json()["choices"]
    assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [TOKENS] * TEXTS


def test_a_streamed_one_comes_in_pieces(server: LiveServer) -> None:
    whole = post(server, "/v1/completions", body()).json()
    pieces: dict[int, list[dict[str, Any]]] = {index: [] for index in range(TEXTS)}
    sent = body(stream=True)
    with httpx.stream("POST", f"{server.url}/v1/completions", json=sent, timeout=120) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                choice = json.loads(line[6:])["choices"][0]
                pieces[choice["index"]].append(choice)
    for choice in whole["choices"]:
        parts = [part for part in pieces[choice["index"]] if part["logprobs"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert max(len(part["logprobs"]["tokens"]) for part in parts) <= 128
        for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            joined = [entry for part in parts for entry in part["logprobs"][field]]
            assert joined == choice["logprobs"][field], field
        lengths = accumulate((len(token) for token in choice["logprobs"]["tokens"]), initial=0)
        assert list(lengths)[:-1] == choice["logprobs"]["text_offset"]


def test_a_large_answer_holds_nobody_up(server: LiveServer) -> None:
    """16 texts of 2,000 tokens with 20 log-probabilities each; the tokenizer is the only thing asked of the server."""
    names = TokenNames(server.service.llm.tokenizer)
    top, own = np.arange(100, 120), np.array([-1.0])
    rows = [Row(top_tokens=top, top_log_probs=-np.arange(20.0), log_probs=own) for _ in range(1999)]
    scored = [PromptScored(range(100, 2100), rows) for _ in range(16)]

    def write() -> int:
        tokens = (prompt.described(0, len(prompt)) for prompt in scored)
        return len(to_json([completion_log_probs(names, told, 0, from_start=True) for told in tokens]))

    async def stalls() -> list[float]:
        writing = asyncio.ensure_future(asyncio.to_thread(write))
        found = []
        while not writing.done():
            began, computed = time.perf_counter(), time.process_time()
            await asyncio.sleep(0.005)
            # On a busy machine the whole process waits; only what it computed meanwhile is a stall.
            found.append(min(time.perf_counter() - began, time.process_time() - computed))
        assert await writing > 2**20
        return found

    # A collector in a test's process visits far more than in a server, which has frozen what it has loaded.
    gc.collect()
    gc.freeze()
    # What the writing does it does each time; what else the machine does, it does not.
    assert min(max(asyncio.run(stalls())) / slowness() for _ in range(ATTEMPTS)) < 0.1


def test_what_stands_twice_is_written_twice() -> None:
    shared = {"a": [1, [2]], "b": {}}
    assert (
        to_json([shared, {"c": shared}, shared["a"]])
        == b'[{"a":[1,[2]],"b":{}},{"c":{"a":[1,[2]],"b":{}}},[1,[2]]]'
    )
    assert shared == {"a": [1, [2]], "b": {}}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)


@given(VALUES)
def test_the_bytes_are_those_of_the_standard_encoder(value: Any) -> None:
    from starlette.responses import JSONResponse

    try:
        expected = JSONResponse(value).body
    except UnicodeEncodeError:
        return
    assert to_json(value) == expected
