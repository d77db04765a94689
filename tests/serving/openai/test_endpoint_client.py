"""Drafter and verifier behind ``specrag serve``: our client and our server understand each other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from specrag.engine.executor import run
from specrag.methods.speculative_rag.pipeline import SpeculativeRAGPipeline
from specrag.models.endpoint import Endpoint, open_endpoint
from specrag.models.endpoint.connection import EndpointSettings
from specrag.models.roles import ScoringRequest, TextPart, TextRequest
from specrag.models.scoring import LocalScorer
from specrag.retrieval.passage import Passage
from tests.methods.rag_toys import among, paper
from tests.methods.run import answer_of
from tests.serving.live_server import LiveServer

MODEL = "smollm2-135m"
PASSAGES = [
    Passage(number, "notes", title, "", text, {})
    for number, (title, text) in enumerate(
        [
            ("Bronze", "Bronze is an alloy of copper and tin. It is harder than copper."),
            ("Tin", "Tin is a silvery metal. It melts at 232 degrees Celsius."),
            ("Danube", "The Danube flows from the Black Forest to the Black Sea."),
        ]
    )
]


@pytest.fixture(params=[MODEL, None], ids=["token ids", "server's tokens"])
def endpoint(server: LiveServer, request: pytest.FixtureRequest) -> Iterator[Endpoint]:
    settings = EndpointSettings(tokenizer=request.param, timeout=100)
    with open_endpoint(f"{server.url}/v1#{MODEL}", settings) as endpoint:
        yield endpoint


def test_it_scores_and_writes_as_the_model_itself(server: LiveServer, endpoint: Endpoint) -> None:
    llm = server.service.llm
    assert endpoint.context_length == llm.context_length
    request = ScoringRequest(
        "Question: what is bronze made of?", (TextPart("answer", " Copper and tin"), TextPart("yes", "\nYes"))
    )
    endpoint.check_scoring()
    (found,) = run(endpoint.scoring([request]))
    (expected,) = run(LocalScorer(llm.loaded).scoring([request]))
    for name, part in expected.parts.items():
        assert found.parts[name].log_probs == pytest.approx(part.log_probs, abs=0.1)  # bf16
    (written,) = run(endpoint.generating([TextRequest("Copper is a", max_tokens=8)]))
    assert written.text == llm.generate("Copper is a", raw=True, max_tokens=8).text
    assert len([token for token in written.tokens if token.log_prob is not None]) == 8


def test_drafts_and_their_verification_over_http(endpoint: Endpoint) -> None:
    options = paper(drafts=2, passages_per_draft=1, draft_tokens=48, rationale_tokens=32)
    rag = SpeculativeRAGPipeline(endpoint, endpoint, among(PASSAGES), options)
    answer = answer_of(rag, "What is bronze made of?")
    rag.executor.close()
    assert len(answer.drafts) == 2
    assert all(draft.completion_tokens > 1 for draft in answer.drafts)
    assert answer.text
    if endpoint.settings.tokenizer is None:
        # Our server goes on from no beginning: the form is left to the prompt, and what comes of it is told.
        assert (answer.fallback is None) == (answer.malformed < 2)
        return
    assert answer.malformed == 0
    assert answer.usage.verifier_read_tokens > 20 * 2
    assert all(draft.scores is not None and draft.scores.total < 0 for draft in answer.drafts)
