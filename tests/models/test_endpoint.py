"""A model behind an endpoint gives the texts and scores of the same model here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("openai")
pytest.importorskip("uvicorn")

from specrag.engine.executor import run
from specrag.engine.passes import Coroutine, Emit
from specrag.errors import InputError
from specrag.methods.generator import LocalGenerator
from specrag.models.endpoint import Endpoint, open_endpoint
from specrag.models.endpoint.connection import EndpointSettings
from specrag.models.roles import (
    AnswerFormat,
    ScoringRequest,
    TextDelta,
    TextDone,
    TextGenerator,
    TextPart,
    TextPrompt,
    TextRequest,
    TextScorer,
)
from specrag.models.scoring import LocalScorer
from tests.models.endpoint_server import MODEL, FakeServer, ModelBackend, served

if TYPE_CHECKING:
    from specrag import LanguageModel

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
PARTS = (
    TextPart("before", "\nAnswer:", scored=False),
    TextPart("answer", " Zürich, 東京 and 😀 Paris"),
    TextPart("nothing", ""),
    TextPart("rationale", "\nRationale: it says so."),
    TextPart("yes", " Yes"),
)


@pytest.fixture(scope="module")
def exact(smollm2: Path) -> Iterator[LanguageModel]:
    """Give SmolLM2 so that scores do not depend on what else is in a pass."""
    import specrag

    llm = specrag.load("smollm2-135m", device="cpu", batch_invariant=True)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def running(exact: LanguageModel) -> Iterator[FakeServer]:
    with served(FakeServer(ModelBackend(exact))) as server:
        yield server


@pytest.fixture
def server(running: FakeServer) -> FakeServer:
    running.can = {"prompt_logprobs", "echo", "echo-zero", "chat", "models", "continue"}
    running.seen.clear()
    return running


def opened(server: FakeServer, tokenizer: str | None = None) -> Endpoint:
    return open_endpoint(f"{server.url}#{MODEL}", EndpointSettings(tokenizer=tokenizer, timeout=60))


def test_it_has_both_roles_and_learns_its_context(server: FakeServer) -> None:
    with opened(server) as endpoint:
        assert isinstance(endpoint, TextGenerator)
        assert isinstance(endpoint, TextScorer)
        assert endpoint.context_length == 2048
        assert endpoint.name == f"{server.url}#{MODEL}"


@pytest.mark.parametrize("prompt", [QUESTION, "The capital of France is"], ids=["messages", "text"])
@pytest.mark.parametrize("way", ["prompt_logprobs", "echo-zero", "echo"])
@pytest.mark.parametrize("tokenizer", ["smollm2-135m", None], ids=["token ids", "server's tokens"])
def test_scores_are_those_of_the_local_model(
    server: FakeServer, exact: LanguageModel, prompt: TextPrompt, way: str, tokenizer: str | None
) -> None:
    server.can = {"chat", "continue", way} | ({"echo"} if way == "echo-zero" else set())
    if tokenizer is None and prompt is QUESTION and way != "prompt_logprobs":
        pytest.skip("only prompt_logprobs scores a conversation that the server's template writes")
    request = ScoringRequest(prompt, PARTS)
    (expected,) = run(LocalScorer(exact.loaded).scoring([request]))
    with opened(server, tokenizer) as endpoint:
        endpoint.check_scoring()
        (found,) = run(endpoint.scoring([request]))
    assert found.parts.keys() == expected.parts.keys() == {"answer", "nothing", "rationale", "yes"}
    for name, part in expected.parts.items():
        assert found.parts[name].log_probs == pytest.approx(part.log_probs, abs=1e-4), name
    assert found.parts["answer"].count > 8  # characters of several tokens
    assert found.parts["nothing"].count == 0
    assert found.prompt_tokens == expected.prompt_tokens


@pytest.mark.parametrize(
    ("prompt", "lead"),
    [(QUESTION, ""), (QUESTION, "It is called"), ("The capital of France is", "")],
    ids=["messages", "messages with a lead", "text"],
)
@pytest.mark.parametrize("tokenizer", ["smollm2-135m", None], ids=["token ids", "server's tokens"])
def test_texts_are_those_of_the_local_model(
    server: FakeServer, exact: LanguageModel, prompt: TextPrompt, lead: str, tokenizer: str | None
) -> None:
    requests = [
        TextRequest(prompt, lead, max_tokens=6),
        TextRequest(prompt, lead, max_tokens=12, stop=(".",), temperature=0.9, seed=3),
    ]
    expected = run(LocalGenerator(exact).generating(requests))
    with opened(server, tokenizer) as endpoint:
        found = run(endpoint.generating(requests))
    for ours, theirs in zip(expected, found, strict=True):
        assert theirs.text == ours.text
        assert theirs.finish_reason == ours.finish_reason
        assert theirs.prompt_tokens == theirs.read_tokens == ours.prompt_tokens
        assert "".join(token.text for token in theirs.tokens).startswith(theirs.text)
        assert [token.log_prob for token in theirs.tokens] == pytest.approx(
            [token.log_prob for token in ours.tokens], abs=1e-4
        )


@pytest.mark.parametrize("tokenizer", ["smollm2-135m", None], ids=["token ids", "server's tokens"])
def test_a_cue_is_kept_to_in_two_calls(
    server: FakeServer, exact: LanguageModel, tokenizer: str | None
) -> None:
    cue = "\nAnswer:"
    shown = "Question: What colour is gold?\nRationale: Gold is yellow.\nAnswer: yellow\n\n"
    prompt = f"{shown}Question: What is the capital of France?\n"
    request = TextRequest(prompt, "Rationale:", max_tokens=16, answer_format=AnswerFormat(cue, within=8))
    (local,) = run(LocalGenerator(exact).generating([request]))
    with opened(server, tokenizer) as endpoint:
        (found,) = run(endpoint.generating([request]))
    assert found.text.count("\n") == 1
    assert "".join(token.text for token in found.tokens).startswith(found.text)
    first, _, second = found.text.partition(cue)
    assert first == local.text.partition(cue)[0].rstrip()
    assert second.strip()
    asked = [call["max_tokens"] for call in server.seen if "max_tokens" in call]
    assert asked[0] == 8
    assert len(asked) == 2
    assert found.prompt_tokens == local.prompt_tokens
    assert found.read_tokens > found.prompt_tokens  # the second call reads the prompt again
    scored = [token.log_prob for token in found.tokens if token.text != cue]
    assert None not in scored
    ours = [token.log_prob for token in local.tokens][:4]
    assert scored[:4] == pytest.approx(ours, abs=1e-3)


def test_events_come_as_texts_end(server: FakeServer) -> None:
    def emitted(coroutine: Coroutine[Any]) -> list[object]:
        """Run a coroutine by hand; everything that it asks for is a search."""
        events: list[object] = []
        answer: object = None
        try:
            while True:
                request = coroutine.send(answer)
                answer = None
                if isinstance(request, Emit):
                    events.append(request.value)
                else:
                    answer = request.function()  # type: ignore[union-attr]
        except StopIteration:
            return events

    with opened(server) as endpoint:
        events = emitted(endpoint.generating([TextRequest("One, two,", max_tokens=4) for _ in range(3)]))
    assert sorted(event.request for event in events if isinstance(event, TextDelta)) == [0, 1, 2]
    assert sorted(event.request for event in events if isinstance(event, TextDone)) == [0, 1, 2]


def test_a_conversation_is_not_scored_as_a_text(server: FakeServer) -> None:
    server.can = {"echo", "echo-zero", "chat"}
    with opened(server) as endpoint:
        endpoint.check_scoring()
        with pytest.raises(InputError, match="name the tokenizer"):
            run(endpoint.scoring([ScoringRequest(QUESTION, PARTS)]))


def test_counting_is_exact_with_a_tokenizer_and_high_without(
    server: FakeServer, exact: LanguageModel
) -> None:
    expected = LocalScorer(exact.loaded).count(QUESTION, " Paris")
    with opened(server, "smollm2-135m") as endpoint:
        assert endpoint.count(QUESTION, " Paris") == expected
    with opened(server) as endpoint:
        text = "The quick brown fox jumps over the lazy dog near 東京. " * 20
        assert endpoint.count(text) >= LocalScorer(exact.loaded).count(text)
        assert endpoint.count([{"role": "user", "content": text}]) >= LocalScorer(exact.loaded).count(text)
