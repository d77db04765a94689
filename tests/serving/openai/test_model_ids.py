"""Knowledge bases as ids of models: any program that speaks OpenAI's interface can ask one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.serving.live_server import MODEL, LiveServer, running_server

QUESTION: list[Any] = [{"role": "user", "content": "Who discovered radium?"}]
ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"


@pytest.fixture(scope="module")
def shared(smollm2: Path, sample_base: Path) -> Iterator[LiveServer]:
    """Give a server of two tenants, each with a knowledge base of its own."""
    keys = [
        {"name": "alice", "key": ALICE, "kbs": ["wiki"]},
        {"name": "bob", "key": BOB, "kbs": ["notes"]},
    ]
    with running_server(kbs={"wiki": sample_base, "notes": sample_base}, keys=keys) as server:
        yield server


def ask(server: LiveServer, key: str, path: str, body: dict[str, Any] | None = None) -> Any:
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=120) as client:
        return (client.get(path) if body is None else client.post(path, json=body)).json()


def test_an_id_answers_as_the_field_does(server: LiveServer) -> None:
    client = server.client()
    given: dict[str, Any] = {"messages": QUESTION, "max_tokens": 24}
    answer: Any = client.chat.completions.create(model=f"{MODEL}@wiki", **given)
    field: Any = client.chat.completions.create(model=MODEL, extra_body={"specrag": {"kb": "wiki"}}, **given)
    assert answer.model == f"{MODEL}@wiki"
    assert answer.choices[0].message.content == field.choices[0].message.content
    assert re.search(r" \[\d\]$", answer.choices[0].message.content)
    sources = answer.model_extra["specrag"]["sources"]
    assert sources == field.model_extra["specrag"]["sources"]
    assert any(source["cited"] for source in sources)


def test_tools_that_need_not_be_called_leave_the_passages_alone(server: LiveServer) -> None:
    """Open WebUI offers three dozen tools with every question."""
    tools: Any = [{"type": "function", "function": {"name": "get_time", "description": "The time. " * 200}}]
    given: dict[str, Any] = {"model": f"{MODEL}@wiki", "messages": QUESTION}
    create = server.client().chat.completions.create
    answer, expected = create(**given, tools=tools, max_tokens=12), create(**given, max_tokens=12)
    assert answer.choices[0].message.content == expected.choices[0].message.content
    assert answer.usage is not None
    assert expected.usage is not None
    assert answer.usage.prompt_tokens == expected.usage.prompt_tokens
    required = create(**given, tools=tools, tool_choice="required", max_tokens=40)
    assert [call.function.name for call in required.choices[0].message.tool_calls or ()] == ["get_time"]


def test_a_stream_ends_with_the_sources(server: LiveServer) -> None:
    chunks: Any = list(
        server.client().chat.completions.create(
            model=f"{MODEL}@wiki", messages=QUESTION, max_tokens=24, stream=True
        )
    )
    assert {chunk.model for chunk in chunks} == {f"{MODEL}@wiki"}
    assert chunks[-1].model_extra["specrag"]["sources"]


def test_completions_take_them_too(server: LiveServer) -> None:
    answer: Any = server.client().completions.create(
        model=f"{MODEL}@wiki", prompt=QUESTION[0]["content"], max_tokens=24
    )
    assert answer.model_extra["specrag"]["sources"]


def test_each_tenant_sees_its_own(shared: LiveServer) -> None:
    for key, seen, other in ((ALICE, "wiki", "notes"), (BOB, "notes", "wiki")):
        ids = [model["id"] for model in ask(shared, key, "/v1/models")["data"]]
        assert ids == [MODEL, f"{MODEL}@{seen}", "minilm-l6-v2"]
        shown = ask(shared, key, f"/v1/models/{MODEL}@{seen}")
        assert shown["specrag"] == {"kind": "generation", "ready": True, "kb": seen}
        # One that is another's is answered as one that does not exist.
        hidden, absent = (
            ask(
                shared,
                key,
                "/v1/chat/completions",
                {"model": f"{MODEL}@{name}", "messages": QUESTION, "max_tokens": 4},
            )["error"]
            for name in (other, "x" * len(other))
        )
        assert hidden["code"] == absent["code"] == "model_not_found"
        assert hidden["message"].replace(other, "x" * len(other)) == absent["message"]
        assert ask(shared, key, f"/v1/models/{MODEL}@{other}")["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("model", "near"),
    [(f"{MODEL}@wikki", f"{MODEL}@wiki"), ("smollm2-135", MODEL), ("gpt-4", None), ("@wiki", None)],
)
def test_an_unknown_id_is_refused_with_the_nearest(server: LiveServer, model: str, near: str | None) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        server.client().chat.completions.create(model=model, messages=QUESTION)
    assert caught.value.param == "model"
    assert f"did you mean {near!r}" in caught.value.message if near else "did you" not in caught.value.message


def test_two_knowledge_bases_are_one_too_many(server: LiveServer) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        server.client().chat.completions.create(
            model=f"{MODEL}@wiki", messages=QUESTION, extra_body={"specrag": {"kb": "other"}}
        )
    assert caught.value.param == "specrag.kb"
