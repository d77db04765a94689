"""Requests with keys: a prompt is read once for all choices, and nothing of one key is seen by another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving.live_server import MODEL, LiveServer, running_server

ALICE, BOB = "alice-key-0123456789", "bob-key-0123456789-x"
CAROL, DAVE = "carol-key-0123456789", "dave-key-0123456789"


@pytest.fixture(scope="module")
def keyed(smollm2: Path, sample_base: Path) -> Iterator[LiveServer]:
    """Give a server with four keys, one of which may read the knowledge base, and nothing said of its memory."""
    keys = [
        {"name": "alice", "key": ALICE, "kbs": ["wiki"]},
        {"name": "bob", "key": BOB, "kbs": []},
        {"name": "carol", "key": CAROL, "kbs": []},
        {"name": "dave", "key": DAVE, "kbs": []},
    ]
    with running_server(kbs={"wiki": sample_base}, keys=keys) as server:
        yield server


def ask(server: LiveServer, key: str, question: str, **more: Any) -> httpx.Response:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 4,
        "temperature": 0,
        **more,
    }
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=120)


def cached(response: httpx.Response) -> int:
    assert response.status_code == 200, response.text
    tokens: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def test_choices_read_their_prompt_once(keyed: LiveServer) -> None:
    question = "Tell me about herons, please. " * 4
    answer = ask(keyed, ALICE, question, n=3, temperature=1.0, seed=1)
    assert answer.status_code == 200, answer.text
    prompt = answer.json()["usage"]["prompt_tokens"]
    others = answer.json()["specrag"]["others"]
    assert [other["usage"]["cached_tokens"] for other in others] == [prompt - 1] * 2
    assert answer.json()["usage"]["completion_tokens"] == 12
    plain = keyed.service.llm.generate(
        [{"role": "user", "content": question}], max_tokens=4, temperature=1.0, seed=1
    )
    assert answer.json()["choices"][0]["message"]["content"] == plain.text


def test_a_key_finds_its_own_prompts_and_no_others(keyed: LiveServer) -> None:
    question = "Moon and tides: tell me about them, please. " * 3
    # Every prompt begins with the chat template's own words.
    template = len(keyed.service.llm.encode([{"role": "user", "content": "?"}]))
    assert cached(ask(keyed, ALICE, question)) <= template
    assert cached(ask(keyed, BOB, question)) <= template
    again = ask(keyed, ALICE, question)
    assert cached(again) == again.json()["usage"]["prompt_tokens"] - 1


@pytest.mark.parametrize(
    ("stranger", "drawing"),
    [(CAROL, {"temperature": 0}), (DAVE, {"temperature": 1.0, "seed": 7})],
    ids=["greedy", "sampled"],
)
def test_a_second_turn_reads_only_what_is_new_and_says_the_same(
    keyed: LiveServer, stranger: str, drawing: dict[str, Any]
) -> None:
    first = [{"role": "user", "content": "Why do rivers meander? Explain it, please. " * 3}]
    fields = {"max_tokens": 24, "logprobs": True, "top_logprobs": 3, **drawing}
    opening = ask(keyed, ALICE, "", messages=first, **fields).json()
    said = opening["choices"][0]["message"]["content"]
    second = [*first, {"role": "assistant", "content": said}, {"role": "user", "content": "Shorter, please."}]
    kept = ask(keyed, ALICE, "", messages=second, **fields)
    assert cached(kept) > opening["usage"]["prompt_tokens"]  # the answer is not read again either
    read = ask(keyed, stranger, "", messages=second, **fields)
    assert cached(read) == 0  # this key has asked nothing before
    assert kept.json()["choices"] == read.json()["choices"]


def test_without_memory_for_it_a_second_turn_is_read_anew(smollm2: Path) -> None:
    with running_server(prefix_cache_bytes=0) as server:
        for _ in range(2):
            assert cached(ask(server, "none", "Name a river, please. " * 4)) == 0


def test_a_key_answers_from_its_own_knowledge_bases_only(keyed: LiveServer) -> None:
    fields = {"specrag": {"kb": "wiki", "k": 1}}
    assert ask(keyed, ALICE, "Who discovered radium?", **fields).json()["specrag"]["sources"]
    refused = ask(keyed, BOB, "Who discovered radium?", **fields)
    unknown = ask(keyed, BOB, "Who discovered radium?", specrag={"kb": "none", "k": 1})
    assert refused.status_code == unknown.status_code == 400
    # Whether it exists is not told either.
    told, untold = refused.json()["error"]["message"], unknown.json()["error"]["message"]
    assert told.replace("wiki", "none") == untold
    assert ask(keyed, "wrong-key-0123456789", "?").status_code == 401
