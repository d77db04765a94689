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
from specrag.errors import SpecragError
from specrag.methods.resources import Resources
from specrag.methods.speculative_rag import SpeculativeRAG
from specrag.models.endpoint import EndpointSettings, open_endpoint
from specrag.retrieval.knowledge_base import KnowledgeBase
from specrag.serving.service import Service
from specrag.serving.settings import load_settings
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
    extension = {"kb": "wiki", "k": 2, "method": "standard-rag", "options": {"lead": ""}}
    through, direct = both(CHAT, body(QUESTION, specrag=extension, max_tokens=16), gateway, server)
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
    values: dict[str, Any] = {"drafts": 2, "draft_tokens": 32, "form": "paper"}  # whose factors all count
    extension = {"kb": "wiki", "k": 4, "method": "speculative-rag", "options": values, "events": True}
    events = streamed(gateway, {**body(QUESTION, specrag=extension), "model": "small"})
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


# -- iterative retrieval ----------------------------------------------------------------------------------------

#: Its passages change in the middle of an answer.
LONG = "Compare Marie Curie and copper: who discovered radium, and which sea does the Danube reach?"
SHORT = {"interval": 2, "query_tokens": 6, "passage_tokens": 32}
GREEDY: dict[str, Any] = {"temperature": 0}
SAMPLED: dict[str, Any] = {"temperature": 1, "seed": 3, "top_p": 0.9}


def iterative(method: str, **more: Any) -> dict[str, Any]:
    """The body of a question that is answered with a retrieval every few tokens."""
    options = {**SHORT, **more.pop("options", {})}
    extension = {"kb": "wiki", "method": method, "options": options}
    return body(LONG, specrag=extension, **more)


def through(gateway: LiveServer, asked: dict[str, Any]) -> dict[str, Any]:
    answer = post(gateway, CHAT, {**asked, "model": "small"})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.fixture(scope="module")
def sequential(gateway: LiveServer) -> dict[str, Any]:
    """Give the greedy answer of sequential retrieval."""
    return through(gateway, iterative("sequential"))


@pytest.fixture(params=["token ids", "texts"])
def telling(request: pytest.FixtureRequest, gateway: LiveServer) -> Iterator[None]:
    """Let the endpoint tell the tokens that it has written, or only their text, as others than vLLM do."""
    pool = gateway.service.upstreams.pools["small"]  # type: ignore[union-attr]
    pool.tells_tokens = request.param == "token ids"
    yield
    pool.tells_tokens = True


@pytest.mark.usefixtures("telling")
def test_sequential_retrieval_is_that_of_the_model_itself(gateway: LiveServer, server: LiveServer) -> None:
    here, direct = both(CHAT, iterative("sequential"), gateway, server)
    assert here["choices"] == direct["choices"]
    assert here["specrag"]["sources"] == direct["specrag"]["sources"]
    assert len(here["specrag"]["sources"]) > 1
    assert here["specrag"]["retrievals"] == direct["specrag"]["retrievals"] == 6
    assert here["usage"]["prompt_tokens"] == direct["usage"]["prompt_tokens"]
    assert here["usage"]["completion_tokens"] == direct["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize(
    ("options", "sampling"),
    [
        ({"stride": 3, "asynchronous": False, "prefetch": 1}, GREEDY),
        ({"stride": 3, "asynchronous": True, "prefetch": 1}, SAMPLED),
        ({"stride": "os3"}, SAMPLED),
        ({"stride": "cost-aware"}, GREEDY),
    ],
    ids=["fixed", "asynchronous", "os3", "cost-aware"],
)
def test_ralmspec_writes_what_sequential_retrieval_writes_at_the_same_endpoint(
    options: dict[str, Any], sampling: dict[str, Any], gateway: LiveServer, sequential: dict[str, Any]
) -> None:
    expected = sequential if sampling is GREEDY else through(gateway, iterative("sequential", **sampling))
    guessed = through(gateway, iterative("ralmspec", options=options, **sampling))
    assert guessed["choices"] == expected["choices"]
    assert guessed["specrag"]["sources"] == expected["specrag"]["sources"]
    assert guessed["specrag"]["retrievals"] == expected["specrag"]["retrievals"]
    right = guessed["specrag"]["guessed_right"]
    assert right < 5 if options.get("prefetch") == 1 else right == 5


def test_token_ids_are_told_whole_and_streamed_where_they_are_asked_for(server: LiveServer) -> None:
    from specrag.models.catalog import resolve
    from specrag.models.tokenizer import Tokenizer

    asked = {"model": MODEL, "prompt": "Copper is", "max_tokens": 6, "temperature": 0}
    (plain,) = post(server, "/v1/completions", asked).json()["choices"]
    assert "token_ids" not in plain
    asked["return_token_ids"] = True
    (whole,) = post(server, "/v1/completions", asked).json()["choices"]
    assert len(whole["token_ids"]) == 6
    assert Tokenizer(resolve(MODEL)).decode(whole["token_ids"]) == whole["text"] == plain["text"]
    lines = post(server, "/v1/completions", {**asked, "stream": True}).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line]
    told = [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"]]
    assert told == whole["token_ids"]


def test_text_that_nothing_takes_back_is_streamed_chunk_by_chunk(
    gateway: LiveServer, sequential: dict[str, Any]
) -> None:
    chunks = streamed(gateway, {**iterative("ralmspec"), "model": "small"})
    said = [chunk["choices"][0]["delta"].get("content") for chunk in chunks if chunk["choices"]]
    assert sum(bool(text) for text in said) > 3
    assert "".join(text or "" for text in said) == sequential["choices"][0]["message"]["content"]


def test_a_stop_string_across_two_calls_ends_the_text(
    gateway: LiveServer, sequential: dict[str, Any]
) -> None:
    text = sequential["choices"][0]["message"]["content"]
    place = len(text) // 2
    stop = text[place - 6 : place + 6]
    (cut,) = through(gateway, iterative("sequential", stop=stop))["choices"]
    assert cut["finish_reason"] == "stop"
    assert cut["message"]["content"] == text[: text.index(stop)]


def test_calls_that_bring_no_whole_character_ask_for_more_tokens_until_the_text_ends(
    gateway: LiveServer,
) -> None:
    """A bias forces the first byte of a character again and again."""
    from specrag.models.catalog import resolve
    from specrag.models.tokenizer import Tokenizer

    half = Tokenizer(resolve(MODEL)).encode("\u07f7", special=False)[0]
    pool = gateway.service.upstreams.pools["small"]  # type: ignore[union-attr]
    calls, pool.tells_tokens = pool.replicas[0].calls, False
    asked = iterative("sequential", max_tokens=6, ignore_eos=True, logit_bias={str(half): 100})
    (choice,) = through(gateway, asked)["choices"]
    pool.tells_tokens = True
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    assert pool.replicas[0].calls - calls == 3  # for 2, 4 and 6 tokens


@pytest.mark.parametrize(
    ("more", "field", "said"),
    [
        ({"options": {"decoder": "respec"}}, "decoder", "an endpoint decides it for itself"),
        ({"options": {"reuse": False}}, "reuse", "an endpoint decides it for itself"),
        ({"presence_penalty": 0.5}, "presence_penalty", "count only what they write in one call"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "count only what they write in one call"),
    ],
)
def test_what_an_endpoint_cannot_do_is_refused_before_any_call(
    more: dict[str, Any], field: str, said: str, gateway: LiveServer
) -> None:
    pool = gateway.service.upstreams.pools["small"]  # type: ignore[union-attr]
    calls = pool.replicas[0].calls
    response = post(gateway, CHAT, {**iterative("sequential", **more), "model": "small"})
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert field in message
    assert said in message
    assert pool.replicas[0].calls == calls


def test_without_the_endpoints_tokenizer_iterative_retrieval_says_what_to_name(
    server: LiveServer, sample_base: Path
) -> None:
    with running_server(upstreams=(f"small={server.url}/v1",), kbs={"wiki": sample_base}) as gateway:
        response = post(gateway, CHAT, {**iterative("ralmspec"), "model": "small"})
    assert response.status_code == 400
    assert "as tokenizer of their [[upstreams]] (small)" in response.json()["error"]["message"]


# -- a pool with the model of this machine ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixed(server: LiveServer, sample_base: Path) -> Iterator[LiveServer]:
    """Give a gateway whose pool is the shared server and a model of its own."""
    rows = [f"small={server.url}/v1,local"]
    own = {"model": MODEL, "dtype": "int8", "batch_invariant": True}
    with running_server(upstreams=rows, kbs={"wiki": sample_base}, **own) as gateway:
        yield gateway


def test_a_pool_of_a_remote_and_the_own_model_lets_both_work(mixed: LiveServer, server: LiveServer) -> None:
    asked = [body(f"Name {number} metals.", max_tokens=4) for number in range(2, 6)]
    alone = [post(server, CHAT, {**each, "model": MODEL}).json()["choices"] for each in asked]
    pool = mixed.service.upstreams.pools["small"]  # type: ignore[union-attr]
    before = [replica.calls for replica in pool.replicas]
    with ThreadPoolExecutor(len(asked)) as clients:
        answers = list(clients.map(lambda each: through(mixed, each), asked))
    assert [answer["choices"] for answer in answers] == alone
    assert all(replica.calls > calls for replica, calls in zip(pool.replicas, before, strict=True))
    assert not pool.replicas[1].failed


def test_the_own_model_answers_what_other_replicas_do_not(
    mixed: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokenizer is the pool's, so that iterative retrieval runs without another word."""
    pool = mixed.service.upstreams.pools["small"]  # type: ignore[union-attr]
    remote, own = pool.replicas
    monkeypatch.setattr(remote, "weight", 1e-9)
    before, asked = own.calls, remote.calls
    answer = through(mixed, iterative("sequential", max_tokens=4))
    assert answer["specrag"]["retrievals"] == 2
    assert own.calls - before == 2
    assert remote.calls == asked


def test_a_stream_of_the_own_model_comes_word_by_word(
    mixed: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = mixed.service.upstreams.pools["small"]  # type: ignore[union-attr]
    monkeypatch.setattr(pool.replicas[0], "weight", 1e-9)
    chunks = streamed(mixed, {**body(), "model": "small"})
    said = [chunk["choices"][0]["delta"].get("content") for chunk in chunks if chunk["choices"]]
    assert sum(bool(text) for text in said) > 2


def test_the_own_models_socket_is_gone_with_the_server(server: LiveServer) -> None:
    with running_server(upstreams=["small=local"], model=MODEL, dtype="int8") as gateway:
        engine = gateway.service.upstreams._engine  # type: ignore[union-attr]
        assert engine is not None
        socket_file = Path(engine.address.socket)
        assert socket_file.is_socket()
        assert socket_file.parent.stat().st_mode & 0o077 == 0
    assert not socket_file.parent.exists()


def test_a_model_that_cannot_be_loaded_ends_a_mixed_gateway_with_its_reason() -> None:
    service = Service(load_settings(None, {"upstreams": ["small=local"], "model": "/nowhere/at-all"}))
    with pytest.raises(SpecragError, match="/nowhere/at-all"):
        service.load()


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
