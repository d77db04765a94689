"""The server over upstreams that answer without a model and misbehave over real sockets."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from specrag.errors import InputError
from specrag.methods.base import Needs
from specrag.methods.registry import method_class, own_names
from specrag.serving.settings import load_settings
from tests.models.upstream_server import SAID, UpstreamServer, upstream_server
from tests.serving.live_server import LiveServer, post, running_server, wait_for

KEY, LEFT, RIGHT = "sk-of-the-upstream-77", "sk-of-the-left-tenant-1", "sk-of-the-right-tenant"
BODY: dict[str, Any] = {"model": "quartz", "messages": [{"role": "user", "content": "What is copper?"}]}


@pytest.fixture(scope="module")
def upstream() -> Iterator[UpstreamServer]:
    with upstream_server() as server:
        yield server


@pytest.fixture(scope="module")
def gateway(upstream: UpstreamServer) -> Iterator[LiveServer]:
    """Give a gateway over one upstream; its replica may be out after a test, for a second."""
    row = {"name": "quartz", "urls": [upstream.url], "key": KEY, "silence_seconds": 0.5}
    tenants = [{"name": name, "key": key} for name, key in (("left", LEFT), ("right", RIGHT))]
    with running_server(upstreams=[row], keys=tenants, max_output_tokens=64) as server:
        yield server


@pytest.fixture(autouse=True)
def well(gateway: LiveServer, upstream: UpstreamServer) -> Iterator[None]:
    """Let every test begin and leave with a replica that is in."""
    upstreams = gateway.service.upstreams
    assert upstreams is not None
    wait_for(lambda: upstreams.pools["quartz"].replicas[0].breaker.is_ready)
    upstream.seen.clear()
    yield
    upstream.faults.clear()
    upstream.pause = 0.0
    gateway.wait_until_idle()


def ask(
    gateway: LiveServer, body: dict[str, Any] | None = None, key: str = LEFT, **more: Any
) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(
        f"{gateway.url}/v1/chat/completions", json={**(body or BODY), **more}, headers=headers, timeout=30
    )


def get(gateway: LiveServer, path: str) -> httpx.Response:
    return httpx.get(f"{gateway.url}{path}", headers={"Authorization": f"Bearer {LEFT}"}, timeout=30)


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def said_in(events: list[dict[str, Any]]) -> str:
    choices = [choice for event in events for choice in event.get("choices", ())]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


# -- what is passed on ------------------------------------------------------------------------------------------


def test_an_answer_comes_back_under_the_gateways_own_head(gateway: LiveServer) -> None:
    answer = ask(gateway).json()
    assert answer["model"] == "quartz"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["choices"][0]["message"]["content"] == SAID
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["prompt_tokens"] == 7
    assert answer["usage"]["completion_tokens"] == 4
    assert answer["specrag"]["method"] == "plain"


def test_a_stream_comes_word_by_word_with_its_counts(gateway: LiveServer) -> None:
    events = events_of(
        ask(gateway, stream=True, stream_options={"include_usage": True}, specrag={"events": True})
    )
    assert said_in(events) == SAID
    told = [event["specrag"]["event"] for event in events if "specrag" in event]
    assert told == ["step"] * 4 + ["done"]
    assert events[-1]["usage"]["completion_tokens"] == 4
    assert events[-1]["usage"]["prompt_tokens"] == 7  # as the upstream counts them, behind its last token
    assert [event["choices"][0]["finish_reason"] for event in events if event["choices"]].count("stop") == 1


def test_fields_of_a_chat_are_passed_on_and_those_that_tell_who_asks_are_not(
    gateway: LiveServer, upstream: UpstreamServer
) -> None:
    function = {"name": "weigh", "parameters": {"type": "object", "properties": {"gram": {"default": None}}}}
    passed_on: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "seed": 3,
        "stop": ["x"],
        "logprobs": True,
        "top_logprobs": 2,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "s", "schema": {"type": "object"}},
        },
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "auto",
        "presence_penalty": 0.1,
        "logit_bias": {"5": 1.0},
        "reasoning_effort": "low",
    }
    kept: dict[str, Any] = {"user": "ann", "metadata": {"a": "b"}, "store": False, "safety_identifier": "ann"}
    assert ask(gateway, max_tokens=500, **passed_on, **kept).status_code == 200
    seen = upstream.calls[0]
    assert {name: seen[name] for name in passed_on} == passed_on
    assert seen["max_tokens"] == 64  # the server's limit
    assert seen["model"] == "words"  # as the upstream calls it
    assert not kept.keys() & seen.keys()
    assert "specrag" not in seen


def test_nothing_is_added_to_what_a_client_leaves_out(gateway: LiveServer, upstream: UpstreamServer) -> None:
    ask(gateway)
    assert upstream.calls[0].keys() == {"messages", "max_tokens", "model", "path", "authorization"}


def test_completions_are_passed_on_too(gateway: LiveServer, upstream: UpstreamServer) -> None:
    body = {"model": "quartz", "prompt": "Copper is", "logprobs": 1}
    headers = {"Authorization": f"Bearer {LEFT}"}
    answer = httpx.post(f"{gateway.url}/v1/completions", json=body, headers=headers, timeout=30).json()
    assert answer["choices"][0]["text"] == SAID
    assert (upstream.calls[0]["path"], upstream.calls[0]["logprobs"]) == ("/v1/completions", 1)


def test_responses_are_written_by_the_upstream(gateway: LiveServer) -> None:
    headers = {"Authorization": f"Bearer {LEFT}"}
    body = {"model": "quartz", "input": "What is copper?"}
    answer = httpx.post(f"{gateway.url}/v1/responses", json=body, headers=headers, timeout=30).json()
    assert answer["output"][0]["content"][0]["text"] == SAID
    tool = {"type": "function", "name": "weigh"}
    refused = httpx.post(
        f"{gateway.url}/v1/responses", json={**body, "tools": [tool]}, headers=headers, timeout=30
    )
    assert refused.status_code == 400
    assert "/v1/chat/completions" in refused.json()["error"]["message"]


# -- what is listed and refused ---------------------------------------------------------------------------------


def test_models_and_methods_are_those_that_run_over_endpoints(gateway: LiveServer) -> None:
    models = {model["id"]: model for model in get(gateway, "/v1/models").json()["data"]}
    assert models["quartz"]["max_model_len"] == 4096  # as the upstream tells
    methods = {method["name"]: method for method in get(gateway, "/v1/specrag/methods").json()}
    assert methods.keys() >= {"plain", "standard-rag", "speculative-rag"}
    assert methods["plain"]["default"]
    assert not any(Needs.SESSIONS in method_class(name).needs for name in methods)
    assert not {"decoder", "drafter", "verifier"} & methods["speculative-rag"]["options"].keys()
    schema = get(gateway, "/openapi.json").json()["components"]["schemas"]
    assert "respec.Options" not in schema
    assert "speculative-rag.Options" in schema


@pytest.mark.parametrize("name", [name for name in own_names() if Needs.SESSIONS in method_class(name).needs])
def test_a_method_of_the_engine_is_refused_with_the_way_to_it(
    name: str, gateway: LiveServer, upstream: UpstreamServer
) -> None:
    response = ask(gateway, specrag={"method": name})
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    drafts = {
        "adaptive",
        "respec",
        "prompt-lookup",
        "sam-decoding",
        "token-recycling",
        "eagle-2",
        "draft-model",
    }
    way = "install its drafter there (docs/vllm.md)" if name in drafts else "serve one without upstreams"
    assert f"{name} " in message
    assert way in message
    assert not upstream.calls


def test_no_field_of_a_request_names_an_address(gateway: LiveServer, upstream: UpstreamServer) -> None:
    with upstream_server() as other:
        address = f"{other.url}#words"
        for more in (
            {"model": address},
            {"base_url": other.url},
            {"specrag": {"method": "speculative-rag", "options": {"drafter": address}}},
            {"specrag": {"method": "speculative-rag", "options": {"verifier": address}}},
            {"specrag": {"kb": other.url}},
        ):
            assert ask(gateway, **more).status_code in (400, 404), more
        assert not other.seen
    assert not upstream.calls


# -- bad upstreams ----------------------------------------------------------------------------------------------

BAD = [
    ("500", 502, "it answers 500"),
    ("503", 502, "it answers 503"),
    ("429 7", 429, "it is too busy"),
    ("503 7", 429, "it is too busy"),
    ("403", 502, "it refuses the gateway's key"),
    ("404 model_not_found", 502, "it does not serve the model"),
    ("400", 400, "it refuses the request: said Bearer ***"),
    ("html", 502, "no JSON"),
    ("nonsense", 502, "no JSON"),
    ("other-json", 502, "it should hold choices"),
    ("drop", 502, "the connection broke off"),
]


@pytest.mark.parametrize(("fault", "status", "reason"), BAD)
def test_a_bad_upstream_is_told_by_its_name_and_nothing_secret(
    fault: str, status: int, reason: str, gateway: LiveServer, upstream: UpstreamServer
) -> None:
    upstream.faults.extend([fault] * 3)
    response = ask(gateway)
    error = response.json()["error"]
    assert response.status_code == status, error
    assert "upstream quartz: " in error["message"]
    assert reason in error["message"]
    assert KEY not in response.text
    assert str(upstream.port) not in response.text
    if status == 429:
        assert 5 <= int(response.headers["Retry-After"]) <= 7
        replica = gateway.service.upstreams.pools["quartz"].replicas[0]  # type: ignore[union-attr]
        replica.breaker._busy_until = 0.0  # other tests need not wait


@pytest.mark.parametrize("fault", ["drop 2", "end 2", "garbage 2", "silent 2", "error 2"])
def test_a_stream_that_breaks_off_ends_with_an_error_behind_what_came(
    fault: str, gateway: LiveServer, upstream: UpstreamServer
) -> None:
    upstream.faults.append(fault)
    events = events_of(ask(gateway, stream=True))
    assert said_in(events) == "Copper conducts "
    assert "upstream quartz: " in events[-1]["error"]["message"]
    assert "after the first token" in events[-1]["error"]["message"]


def test_a_stream_of_silence_ends_in_time(gateway: LiveServer, upstream: UpstreamServer) -> None:
    upstream.faults.extend(["silent 0"] * 3)
    response = ask(gateway, stream=True)
    assert response.status_code == 504
    assert "upstream quartz: nothing came for 0.5 s" in response.json()["error"]["message"]


# -- cancellation and deadlines -------------------------------------------------------------------------------


def test_a_client_that_goes_away_is_told_to_the_upstream(
    gateway: LiveServer, upstream: UpstreamServer
) -> None:
    upstream.pause, gone = 0.3, upstream.gone
    headers = {"Authorization": f"Bearer {LEFT}"}
    with httpx.stream(
        "POST", f"{gateway.url}/v1/chat/completions", json={**BODY, "stream": True}, headers=headers
    ) as response:
        next(response.iter_lines())
    wait_for(lambda: upstream.gone == gone + 1)


def test_a_deadline_ends_the_call_of_the_upstream(gateway: LiveServer, upstream: UpstreamServer) -> None:
    upstream.pause, gone = 0.3, upstream.gone
    began = time.monotonic()
    events = events_of(ask(gateway, stream=True, specrag={"deadline": 0.5}))
    assert time.monotonic() - began < 1.1
    assert events[-1]["error"]["code"] == "deadline_exceeded"
    wait_for(lambda: upstream.gone == gone + 1)


# -- keys -------------------------------------------------------------------------------------------------------


def test_keys_of_tenants_never_reach_an_upstream(
    gateway: LiveServer, upstream: UpstreamServer, capfd: pytest.CaptureFixture[str]
) -> None:
    upstream.faults.extend(["400", "500"])
    answers = [ask(gateway, key=key) for key in (LEFT, RIGHT, LEFT, RIGHT)]
    assert [answer.status_code for answer in answers[2:]] == [200, 200]
    assert {seen["authorization"] for seen in upstream.calls} == {f"Bearer {KEY}"}
    sent = json.dumps(upstream.seen)
    assert LEFT not in sent
    assert RIGHT not in sent
    shown = "".join([*(answer.text for answer in answers), *capfd.readouterr()])
    for path in ("/v1/models", "/readyz", "/metrics", "/openapi.json"):
        shown += get(gateway, path).text
    assert KEY not in shown
    assert str(upstream.port) not in shown


def test_without_a_key_nobody_is_served(gateway: LiveServer, upstream: UpstreamServer) -> None:
    assert ask(gateway, key=KEY).status_code == 401  # the upstream's opens nothing here
    assert not upstream.calls


# -- health and figures -----------------------------------------------------------------------------------------


def test_readiness_says_which_pools_have_a_healthy_replica(upstream: UpstreamServer) -> None:
    with upstream_server() as mortal:
        rows = (f"quartz={mortal.url},http://127.0.0.1:9/v1", f"beryl={upstream.url}")
        with running_server(upstreams=rows) as gateway:
            told = httpx.get(f"{gateway.url}/readyz").json()
            assert told["status"] == "ready"
            assert told["upstreams"]["quartz"]["healthy"] == 1
            assert told["upstreams"]["quartz"]["reasons"] == ["2: it cannot be reached"]
            assert [model["id"] for model in httpx.get(f"{gateway.url}/v1/models").json()["data"]][:2] == [
                "quartz",
                "beryl",
            ]
            mortal.kill()
            response = post(gateway, "/v1/chat/completions", BODY)
            assert response.status_code == 503
            assert response.headers["Retry-After"]
            told = httpx.get(f"{gateway.url}/readyz").json()
            assert told["status"] == "ready"  # for the other model
            assert told["upstreams"]["quartz"]["healthy"] == 0
            figures = httpx.get(f"{gateway.url}/metrics").text
            assert 'specrag_upstream_healthy{replica="1",upstream="quartz"} 0.0' in figures
            assert 'specrag_upstream_healthy{replica="1",upstream="beryl"} 1.0' in figures
            assert 'specrag_upstream_failures_total{replica="1",upstream="quartz"}' in figures


def test_without_any_healthy_replica_no_requests_are_welcome() -> None:
    with running_server(upstreams=("quartz=http://127.0.0.1:9/v1",)) as gateway:
        response = httpx.get(f"{gateway.url}/readyz")
        assert response.status_code == 503
        assert response.json()["reasons"] == {"upstreams": "no generator has a replica that answers"}


def test_no_model_is_loaded(upstream: UpstreamServer) -> None:
    code = (
        "import sys\n"
        "from tests.serving.live_server import post, running_server\n"
        f"with running_server(upstreams=('quartz={upstream.url}',)) as gateway:\n"
        f"    assert post(gateway, '/v1/chat/completions', {BODY!r}).status_code == 200\n"
        "print(sorted({'torch', 'transformers', 'numba'} & sys.modules.keys()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert "torch" not in done.stdout
    assert "transformers" not in done.stdout


# -- settings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (["quartz"], "give NAME=URL"),
        (["quartz="], "at least 1 item"),
        (["quartz=ftp://host/v1"], "give http://HOST:PORT/v1"),
        (["quartz=http://host:none/v1"], "give http://HOST:PORT/v1"),
        (["quartz=http://ann:hunter2@host/v1"], "leave the password out"),
        (["my quartz=http://host/v1"], "name"),
        ([{"name": "a", "urls": ["http://host/v1"], "wait": 1}], "Extra inputs"),
        ([{"name": "a", "urls": ["http://host/v1"], "weight": 0}], "greater than 0"),
        ([{"name": "a", "urls": ["http://host/v1"], "role": "drafter"}], "role generator"),
        ([{"name": "a", "urls": ["http://host/v1"], "key": "k", "key_file": "f"}], "not both"),
        (
            ["a=http://host/v1", {"name": "a", "urls": ["http://b/v1"], "role": "verifier"}],
            "one name has one role",
        ),
        (
            ["a=http://host/v1", *({"name": n, "urls": ["http://b/v1"], "role": "verifier"} for n in "bc")],
            "there is one verifier",
        ),
    ],
)
def test_settings_that_cannot_be_used_are_refused(rows: list[Any], said: str) -> None:
    with pytest.raises(InputError, match=r"upstream.*") as told:
        load_settings(None, {"upstreams": rows})
    assert said in str(told.value)
    assert "hunter2" not in str(told.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [("model", "smollm2-135m"), ("rag_drafter", "smollm2-135m"), ("drafters", ("model:x",))],
)
def test_a_setting_of_a_local_model_is_refused_beside_upstreams(field: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"^{field}: .*upstreams take a model's place"):
        load_settings(None, {"upstreams": ["quartz=http://host/v1"], field: value})


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"upstreams": ["a=local,local"]}, "give it once"),
        ({"upstreams": ["a=local", "b=local"]}, "give it once"),
        ({"upstreams": ["a=local"], "rag_drafter": "smollm2-135m"}, "upstreams take a model's place"),
        ({"upstreams": ["a=http://host/v1"], "model": "smollm2-135m"}, "to have both, give NAME=local,URL"),
    ],
)
def test_the_own_model_beside_upstreams_is_one_replica(more: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        load_settings(None, {"model": "smollm2-135m", **more} if "rag_drafter" not in more else more)


def test_the_own_model_keeps_its_settings_beside_upstreams() -> None:
    settings = load_settings(
        None, {"upstreams": ["quartz=http://host/v1,local"], "model": "smollm2-135m", "dtype": "int8"}
    )
    assert (settings.name, settings.model, settings.method) == ("quartz", "smollm2-135m", "plain")
    assert [row.is_local for row in settings.upstreams] == [True]


def test_upstreams_stand_in_a_file_as_a_table(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(f"{KEY}\n")
    (tmp_path / "key").chmod(0o600)
    file = tmp_path / "gateway.toml"
    file.write_text(
        '[[upstreams]]\nname = "qwen"\nurls = ["http://a:8000/v1"]\nweight = 2\nmodel = "Qwen/Qwen3"\n'
        f'key_file = "{tmp_path / "key"}"\n'
        '[[upstreams]]\nname = "small"\nurls = ["http://b:8000/v1/"]\nrole = "drafter"\n'
    )
    settings = load_settings(file)
    assert (settings.name, settings.method) == ("qwen", "plain")
    qwen, small = settings.upstreams
    assert (qwen.weight, qwen.model, qwen.secret()) == (2, "Qwen/Qwen3", KEY)
    assert (small.urls, small.role, small.secret()) == (("http://b:8000/v1",), "drafter", "")
    assert KEY not in repr(settings)
