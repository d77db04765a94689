"""The server over real models behind endpoints: the same answers as without it between."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from specrag.asking import Answerer
from specrag.methods.resources import Resources
from specrag.methods.speculative_rag import SpeculativeRAG
from specrag.models.endpoint import EndpointSettings, open_endpoint
from specrag.retrieval.knowledge_base import KnowledgeBase
from tests.serving.live_server import MODEL, LiveServer, post, running_server, wait_for

QUESTION = "Who discovered radium?"
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def gateway(server: LiveServer, sample_base: Path) -> Iterator[LiveServer]:
    """Give a gateway that writes, drafts and verifies by the shared server."""
    url = f"{server.url}/v1"
    rows = [
        {"name": "small", "urls": [url], "tokenizer": MODEL},
        {"name": "drafts", "urls": [url], "role": "drafter", "tokenizer": MODEL},
        {"name": "verdicts", "urls": [url], "role": "verifier", "tokenizer": MODEL},
    ]
    with running_server(upstreams=rows, kbs={"wiki": sample_base}) as gateway:
        yield gateway


def body(text: str = "What is copper?", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 12, "temperature": 0, **more}


def both(path: str, body: dict[str, Any], gateway: LiveServer, server: LiveServer) -> list[dict[str, Any]]:
    """A request's answers through the gateway and directly."""
    answers = [
        post(gateway, path, {**body, "model": "small"}),
        post(server, path, {**body, "model": MODEL}),
    ]
    assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
    return [answer.json() for answer in answers]


def streamed(gateway: LiveServer, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a streamed answer."""
    response = post(gateway, CHAT, {**body, "stream": True})
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"temperature": 1, "seed": 7, "n": 2},
        {"logprobs": True, "top_logprobs": 2},
        {"response_format": {"type": "json_object"}, "max_tokens": 24},
        {"messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Tin?"}]},
    ],
)
def test_chat_is_that_of_the_model_itself(
    more: dict[str, Any], gateway: LiveServer, server: LiveServer
) -> None:
    through, direct = both(CHAT, body(**more), gateway, server)
    assert through["choices"] == direct["choices"]
    assert through["usage"]["completion_tokens"] == direct["usage"]["completion_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_called_through_the_gateway(stream: bool, gateway: LiveServer, server: LiveServer) -> None:
    parameters = {"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}
    asked = body("What is the weather in Paris?", tools=[tool], tool_choice="required", max_tokens=200)
    called = []
    for served, model in ((gateway, "small"), (server, MODEL)):
        with served.client() as client, client.chat.completions.stream(model=model, **asked) as events:
            streamed = events.get_final_completion()
            whole = streamed if stream else client.chat.completions.create(model=model, **asked)
        (choice,) = whole.choices
        assert choice.finish_reason == "tool_calls"
        called.append(
            [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
        )
    assert called[0] == called[1]


def test_the_official_client_reads_a_stream_of_the_same_text(gateway: LiveServer, server: LiveServer) -> None:
    texts = []
    for served, model in ((gateway, "small"), (server, MODEL)):
        with served.client() as client:
            chunks = list(client.chat.completions.create(model=model, stream=True, **body(max_tokens=12)))
        assert len(chunks) > 8  # word by word
        texts.append("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
    assert texts[0] == texts[1]


def test_completions_are_those_of_the_model_itself(gateway: LiveServer, server: LiveServer) -> None:
    asked = {
        "prompt": ["Copper is", "Tin is"],
        "max_tokens": 6,
        "temperature": 0,
        "logprobs": 1,
        "echo": True,
    }
    through, direct = both("/v1/completions", asked, gateway, server)
    assert through["choices"] == direct["choices"]


def test_standard_rag_finds_and_answers_as_the_model_itself(gateway: LiveServer, server: LiveServer) -> None:
    # A model behind an endpoint begins its own answers.
    wish = {"kb": "wiki", "k": 2, "method": "standard-rag", "options": {"lead": ""}}
    through, direct = both(CHAT, body(QUESTION, specrag=wish, max_tokens=16), gateway, server)
    assert through["choices"] == direct["choices"]
    assert through["specrag"]["sources"] == direct["specrag"]["sources"]
    assert through["usage"]["prompt_tokens"] == direct["usage"]["prompt_tokens"]


def test_a_knowledge_base_in_the_models_name_streams_sources_and_text(gateway: LiveServer) -> None:
    asked = {**body(QUESTION), "model": "small@wiki", "specrag": {"events": True}}
    events = [event["specrag"] for event in streamed(gateway, asked) if "specrag" in event]
    assert events[0]["event"] == "sources"
    assert "Curie" in json.dumps(events[0]["sources"])
    assert events[-1]["event"] == "done"
    assert sum(event["event"] == "step" for event in events) > 1
    listed = [model["id"] for model in httpx.get(f"{gateway.url}/v1/models").json()["data"]]
    assert listed[:2] == ["small", "small@wiki"]
    assert not any("drafts" in name or "verdicts" in name for name in listed)


def test_a_follow_up_question_is_made_complete_by_the_upstream(gateway: LiveServer) -> None:
    history = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "Marie Curie."},
        {"role": "user", "content": "Where was she born?"},
    ]
    asked = {**body(), "messages": history, "model": "small@wiki"}
    answer = post(gateway, CHAT, asked).json()
    assert answer["specrag"]["usage"]["seconds"]["rewrite"] > 0.0


def test_forms_are_refused_over_a_knowledge_base(gateway: LiveServer) -> None:
    for more in ({"logprobs": True}, {"response_format": {"type": "json_object"}}):
        response = post(gateway, CHAT, {**body(QUESTION, **more), "model": "small@wiki"})
        assert response.status_code == 400
        assert "only plain /v1/chat/completions" in response.json()["error"]["message"]


def test_speculative_rag_drafts_and_verifies_by_its_pools(
    gateway: LiveServer, server: LiveServer, sample_base: Path
) -> None:
    values: dict[str, Any] = {"drafts": 2, "draft_tokens": 32}
    wish = {"kb": "wiki", "k": 4, "method": "speculative-rag", "options": values, "events": True}
    events = streamed(gateway, {**body(QUESTION, specrag=wish), "model": "small"})
    told = {event["specrag"]["event"]: event["specrag"] for event in events if "specrag" in event}
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    with (
        open_endpoint(f"{server.url}/v1#{MODEL}", EndpointSettings(tokenizer=MODEL)) as endpoint,
        closing(Resources(drafter=endpoint, verifier=endpoint)) as host,
        KnowledgeBase.open(sample_base) as base,
    ):
        direct = Answerer(host).generate(QUESTION, method=SpeculativeRAG(**values), kb=base, k=4)
    assert text == direct.text
    assert direct.details is not None
    scores = [draft["scores"] for draft in direct.details.record()["drafts"] if draft["scores"]]
    assert scores
    assert [each["draft"] for each in told["scores"]["scores"]] == pytest.approx(
        [each["draft"] for each in scores], abs=1e-6
    )
    assert [each["self_reflection"] for each in told["scores"]["scores"]] == pytest.approx(
        [each["self_reflect"] for each in scores], abs=1e-6
    )
    pools = gateway.service.upstreams.pools  # type: ignore[union-attr]
    assert pools["drafts"].replicas[0].calls >= 2
    assert pools["verdicts"].replicas[0].calls >= 2


# -- a process that is killed -----------------------------------------------------------------------------------


@pytest.fixture
def process(smollm2: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Give a server in a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["-m", "specrag", "serve", "--model", MODEL, "--dtype", "int8", "--batch-invariant"]
    started = subprocess.Popen(
        [sys.executable, *command, "--port", str(port), "--log-level", "error"],
        env=os.environ,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        try:
            return httpx.get(f"{url}/readyz").status_code == 200
        except httpx.HTTPError:
            return False

    try:
        wait_for(is_ready, 120)
        yield url, started
    finally:
        started.kill()
        started.wait()


def test_no_answer_is_wrong_or_lost_when_a_replica_is_killed(
    process: tuple[str, subprocess.Popen[bytes]], server: LiveServer
) -> None:
    url, replica = process
    questions = [f"Name {number} metals." for number in range(2, 10)]
    alone = [
        post(server, CHAT, {**body(question), "model": MODEL}).json()["choices"] for question in questions
    ]
    with running_server(upstreams=(f"small={url}/v1,{server.url}/v1",)) as gateway:
        pool = gateway.service.upstreams.pools["small"]  # type: ignore[union-attr]
        with ThreadPoolExecutor(len(questions)) as clients:
            asked = [
                clients.submit(post, gateway, CHAT, {**body(question), "model": "small"})
                for question in questions
            ]
            wait_for(lambda: pool.replicas[0].outstanding and pool.replicas[1].outstanding)
            replica.send_signal(signal.SIGKILL)
            answers = [call.result() for call in asked]
        assert [answer.status_code for answer in answers] == [200] * len(questions)
        assert [answer.json()["choices"] for answer in answers] == alone
        assert pool.retries
        assert pool.healthy == 1
