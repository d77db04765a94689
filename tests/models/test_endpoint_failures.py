"""Endpoints that fail, in every way that they do: a clear error in time, or a retry that helps."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("openai")
pytest.importorskip("uvicorn")

from specrag.engine.executor import Executor, run
from specrag.errors import ContextLengthError, DeadlineExceeded, EndpointUnavailable, InputError
from specrag.models.endpoint import Endpoint, EndpointSettings, open_endpoint
from specrag.models.endpoint.answers import Completion, token_starts
from specrag.models.endpoint.writing import without_lead
from specrag.models.roles import ScoringRequest, TextPart, TextRequest, TextToken
from tests.models.endpoint_server import MODEL, CannedBackend, FakeServer, served

REQUEST = TextRequest("Two and two are", max_tokens=4)
SCORED = ScoringRequest("Two and two are", (TextPart("answer", " four"),))
QUICK = EndpointSettings(timeout=1.5, connect_timeout=0.5, retries=1)


@pytest.fixture(scope="module")
def running() -> Iterator[FakeServer]:
    with served(FakeServer(CannedBackend())) as server:
        yield server


@pytest.fixture
def server(running: FakeServer) -> FakeServer:
    running.can = {"prompt_logprobs", "echo", "echo-zero", "chat", "models", "continue"}
    running.faults.clear()
    running.seen.clear()
    running.most_at_once = 0
    return running


@pytest.fixture
def endpoint(server: FakeServer) -> Iterator[Endpoint]:
    with open_endpoint(f"{server.url}#{MODEL}", QUICK) as endpoint:
        yield endpoint


@pytest.mark.parametrize("fault", ["500", "drop"])
def test_one_failure_is_retried(server: FakeServer, endpoint: Endpoint, fault: str) -> None:
    server.faults.append(fault)
    (written,) = run(endpoint.generating([REQUEST]))
    assert written.text == " four"
    assert [token.text for token in written.tokens] == [" four", ""]
    assert [token.log_prob for token in written.tokens] == [-0.5, -0.25]
    assert [call["path"] for call in server.seen].count("/completions") == 2


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("500", "out of order"),
        ("drop", "cannot be reached"),
        ("slow", "no answer within 1.5 s"),
        ("drip", "no answer within 1.5 s"),
        ("nonsense", "should hold a text"),
        ("html", "should hold a JSON object"),
    ],
)
def test_a_failure_that_stays_is_a_clear_error_in_time(
    server: FakeServer, endpoint: Endpoint, fault: str, said: str
) -> None:
    server.faults.extend([fault] * 2)
    started = time.monotonic()
    with pytest.raises(EndpointUnavailable, match=said):
        run(endpoint.generating([REQUEST]))
    assert time.monotonic() - started < 4


def test_one_failing_call_ends_the_others(server: FakeServer, endpoint: Endpoint) -> None:
    server.faults.extend(["slow", "nonsense", "slow"])
    started = time.monotonic()
    with pytest.raises(EndpointUnavailable, match="should hold"):
        run(endpoint.generating([REQUEST] * 3))
    assert time.monotonic() - started < 1


def test_an_endpoint_that_dies_in_the_middle(server: FakeServer) -> None:
    with served(FakeServer(CannedBackend())) as mortal:
        endpoint = open_endpoint(f"{mortal.url}#{MODEL}", QUICK)
        run(endpoint.generating([REQUEST]))
        endpoint.check_scoring()
    with endpoint:
        with pytest.raises(EndpointUnavailable, match="is the server running"):
            run(endpoint.generating([REQUEST]))
        with pytest.raises(EndpointUnavailable, match="is the server running"):
            run(endpoint.scoring([SCORED]))


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with pytest.raises(EndpointUnavailable, match=f"127.0.0.1:{port}/v1: cannot be reached"):
        open_endpoint(f"http://127.0.0.1:{port}/v1#{MODEL}", QUICK)


def test_a_deadline_ends_a_call_at_once(server: FakeServer, endpoint: Endpoint) -> None:
    server.faults.append("slow")
    executor = Executor()
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        executor.run(executor.submit(endpoint.generating([REQUEST]), deadline=started + 0.2))
    executor.close()
    assert time.monotonic() - started < 1


@pytest.mark.parametrize("can", [set[str](), {"chat"}, {"prompt_logprobs"}, {"echo"}, {"echo", "echo-zero"}])
def test_who_can_score_is_found_out(server: FakeServer, endpoint: Endpoint, can: set[str]) -> None:
    server.can = can
    if not can - {"chat"}:
        for _ in range(2):  # asked again: a server may have been set up better meanwhile
            with pytest.raises(InputError, match="no log-probabilities of given text"):
                endpoint.check_scoring()
        return
    endpoint.check_scoring()
    asked = len(server.seen)
    endpoint.check_scoring()
    assert len(server.seen) == asked  # remembered
    (scored,) = run(endpoint.scoring([SCORED]))
    assert scored.parts["answer"].log_probs == (-1.0,) * 5
    assert len(server.seen) == asked + 1


def test_scores_that_stop_coming(server: FakeServer, endpoint: Endpoint) -> None:
    endpoint.check_scoring()
    server.faults.append("no-log-probs")
    with pytest.raises(EndpointUnavailable, match="without the log-probabilities"):
        run(endpoint.scoring([SCORED]))


def test_a_text_without_log_probs_is_still_a_text(server: FakeServer, endpoint: Endpoint) -> None:
    server.faults.append("no-log-probs")
    (written,) = run(endpoint.generating([REQUEST]))
    assert [(token.text, token.log_prob) for token in written.tokens] == [(" four", None)]


def test_a_prompt_that_is_too_long(server: FakeServer, endpoint: Endpoint) -> None:
    server.faults.append("long")
    with pytest.raises(ContextLengthError, match="maximum context length"):
        run(endpoint.generating([REQUEST]))


def test_an_answer_cannot_be_begun_everywhere(server: FakeServer, endpoint: Endpoint) -> None:
    server.can.discard("continue")
    asked = [{"role": "user", "content": "Two and two?"}]
    for _ in range(2):
        (written,) = run(endpoint.generating([TextRequest(asked, lead="It is")]))
        assert written.text == " four"
    bodies = [call for call in server.seen if call["path"] == "/chat/completions"]
    # Tried once, and remembered.
    assert ["continue_final_message" in body for body in bodies] == [True, False, False]
    assert bodies[-1]["messages"] == asked


@pytest.mark.parametrize(
    ("tokens", "lead", "text", "kept"),
    [
        (["It", " is", " four", ""], "It is", " four", [" four", ""]),
        (["\n", "It is: f", "our"], "It is:", " four", [" f", "our"]),
        ([" four", ""], "It is", " four", [" four", ""]),
        (["Is", "It is"], "It is", "IsIt is", ["Is", "It is"]),
        (["It", " is"], "It is", "", []),
    ],
)
def test_a_beginning_that_the_model_wrote_itself_is_cut_off(
    tokens: list[str], lead: str, text: str, kept: list[str]
) -> None:
    whole = tuple(TextToken(token, -1.0) for token in tokens)
    found = without_lead(Completion("".join(tokens), whole, "stop", 1, 0), lead)
    assert found.text == text
    assert [token.text for token in found.tokens] == kept


def test_calls_at_once_are_limited() -> None:
    settings = EndpointSettings(concurrency=3)
    with (
        served(FakeServer(CannedBackend(pause=0.05))) as server,
        open_endpoint(f"{server.url}#{MODEL}", settings) as endpoint,
    ):
        assert len(run(endpoint.generating([REQUEST] * 9))) == 9
        assert server.most_at_once == 3


def test_the_key_comes_from_the_environment_and_is_shown_nowhere(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "sk-secret")
    settings = EndpointSettings(key_variable="MY_KEY", retries=0)
    with open_endpoint(f"{server.url}#{MODEL}", settings) as endpoint:
        run(endpoint.generating([REQUEST]))
        assert {call["key"] for call in server.seen} == {"Bearer sk-secret"}
        server.faults.append("500")
        with pytest.raises(EndpointUnavailable) as caught:
            run(endpoint.generating([REQUEST]))
        assert "sk-secret" not in f"{caught.value!r}{settings!r}{endpoint.name}"


def test_a_model_that_is_not_served_is_named(server: FakeServer) -> None:
    with pytest.raises(InputError, match=f"serves {MODEL}"):
        open_endpoint(f"{server.url}#large", QUICK)
    server.can.discard("models")
    with open_endpoint(f"{server.url}#large", QUICK) as endpoint:  # an endpoint that lists nothing
        assert endpoint.context_length is None


@pytest.mark.parametrize(
    "address", ["http://host/v1", "host:80#model", "ftp://host/v1#m", "http://:80#m", "http://h:x/v1#m"]
)
def test_an_address_must_be_whole(address: str) -> None:
    with pytest.raises(InputError, match="give http://HOST:PORT/v1#MODEL"):
        open_endpoint(address)


def test_a_password_in_an_address_is_not_shown() -> None:
    with pytest.raises(InputError) as caught:
        open_endpoint("http://me:hunter2@host/v1#m")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"timeout": 0},
        {"timeout": float("inf")},
        {"connect_timeout": -1},
        {"retries": -1},
        {"concurrency": 0},
        {"key_variable": ""},
        {"context_length": 0},
        {"retries": True},
    ],
)
def test_settings_are_checked(change: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(change))):
        EndpointSettings(**change)  # type: ignore[arg-type]


def test_threads_end_with_the_endpoint(server: FakeServer) -> None:
    before = set(threading.enumerate())
    with open_endpoint(f"{server.url}#{MODEL}", QUICK) as endpoint:
        run(endpoint.generating([REQUEST]))
        assert {thread.name for thread in set(threading.enumerate()) - before} >= {"specrag-endpoint"}
    assert "specrag-endpoint" not in {thread.name for thread in set(threading.enumerate()) - before}
    endpoint.close()  # twice is once


@pytest.mark.parametrize(
    ("pieces", "text", "starts"),
    [
        (["A", " b", "c"], "A bc", [0, 1, 3]),
        (["<s>", "A", " b"], "A b", [-3, 0, 1]),
        (["", " b"], "A b", [0, 1]),
        (["A", "\ufffd", "\ufffd", " b"], "Aé b", [0, 1, 1, 2]),
        (["\ufffd", "\ufffd", "\ufffd", "x"], "東京x", [0, 0, 0, 2]),
        (["x", " \ufffd", "\ufffd", " \ufffd", "\ufffd", "\n"], "x 東 京\n", [0, 1, 2, 3, 4, 5]),
        (["", " x", "\ufffd", "\ufffd", "y"], "a xéy", [0, 1, 3, 3, 4]),
        (["x", "", "é"], "xé", [0, 1, 1]),
        (["say: yes", " no"], "yes no", [-5, 3]),
    ],
)
def test_tokens_are_placed(pieces: list[str], text: str, starts: list[int]) -> None:
    assert token_starts(pieces, text) == starts


def test_tokens_that_spell_another_text_are_refused() -> None:
    with pytest.raises(EndpointUnavailable, match="name a tokenizer"):
        token_starts(["A", "\ufffd", "c"], "Abbc")
