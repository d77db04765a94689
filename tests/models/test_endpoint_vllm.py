"""The same scores from vLLM as from our own engine: both in fp32, with the same weights.

Runs where ``SPECRAG_VLLM_PYTHON`` names the Python of an environment that has vLLM:

    SPECRAG_VLLM_PYTHON=~/vllm/bin/python pytest -s tests/models/test_endpoint_vllm.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("openai")

from specrag.engine.executor import run
from specrag.methods.generator import LocalGenerator
from specrag.models.endpoint import open_endpoint
from specrag.models.endpoint.connection import EndpointSettings
from specrag.models.roles import ScoringRequest, TextPart, TextPrompt, TextRequest
from specrag.models.scoring import LocalScorer
from tests.models.vllm_server import VARIABLE, vllm_server

if TYPE_CHECKING:
    from specrag import LanguageModel

pytestmark = [
    pytest.mark.skipif(VARIABLE not in os.environ, reason=f"{VARIABLE} names no Python with vLLM"),
    pytest.mark.slow,
]

#: Nats a token.
TOLERANCE = 1e-3

TEXT = "Question: Which composer wrote the opera Jenůfa?"
DRAFTS = (
    (" Leoš Janáček", " Passage 1 says that Janáček was slow to finish Jenůfa, first heard in Brno in 1904."),
    (" Antonín Dvořák", " The passages name Dvořák as the teacher of many Czech composers. 東京 😀"),
    (" It is not known", " No passage says so."),
)


def request(prompt: TextPrompt, answer: str, rationale: str) -> ScoringRequest:
    return ScoringRequest(
        prompt,
        (
            TextPart("before", "\nAnswer:", scored=False),
            TextPart("answer", answer),
            TextPart("between", "\nRationale:", scored=False),
            TextPart("rationale", rationale),
            TextPart("statement", "\nDo you think the explanation supports the answers? (Yes or No)", False),
            TextPart("yes", " Yes"),
        ),
    )


@pytest.fixture(scope="module")
def exact(smollm2: Path) -> Iterator[LanguageModel]:
    import specrag

    llm = specrag.load("smollm2-135m", dtype="fp32", device="cpu")
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def url(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("vllm") / "log.txt"
    with vllm_server(os.environ[VARIABLE], smollm2, log) as url:
        yield url


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("tokenizer", "chat"),
    [("smollm2-135m", False), ("smollm2-135m", True), (None, False), (None, True)],
    ids=["token ids, text", "token ids, chat", "server's tokens, text", "server's tokens, chat"],
)
def test_scores_agree(url: str, exact: LanguageModel, tokenizer: str | None, chat: bool) -> None:
    prompt: TextPrompt = [{"role": "user", "content": TEXT}] if chat else TEXT
    requests = [request(prompt, *draft) for draft in DRAFTS]
    expected = run(LocalScorer(exact.loaded).scoring(requests))
    with open_endpoint(f"{url}#small", EndpointSettings(tokenizer=tokenizer)) as endpoint:
        endpoint.check_scoring()
        found = run(endpoint.scoring(requests))
        assert endpoint.context_length == 2048
    differences = []
    for ours, theirs in zip(expected, found, strict=True):
        for name, part in ours.parts.items():
            log_probs = theirs.parts[name].log_probs
            assert len(log_probs) == part.count, name
            differences += [abs(a - b) for a, b in zip(part.log_probs, log_probs, strict=True)]
    print(f"{len(differences)} tokens, largest difference {max(differences):.2e} nats")
    assert max(differences) < TOLERANCE


@pytest.mark.timeout(600)
@pytest.mark.parametrize("tokenizer", ["smollm2-135m", None], ids=["token ids", "server's tokens"])
def test_texts_agree(url: str, exact: LanguageModel, tokenizer: str | None) -> None:
    prompt = [{"role": "user", "content": TEXT}]
    requests = [
        TextRequest(prompt, max_tokens=20),
        TextRequest(prompt, "The opera was", max_tokens=20, stop=(".",)),
    ]
    expected = run(LocalGenerator(exact).generating(requests))
    with open_endpoint(f"{url}#small", EndpointSettings(tokenizer=tokenizer)) as endpoint:
        found = run(endpoint.generating(requests))
    for ours, theirs in zip(expected, found, strict=True):
        assert theirs.text == ours.text
        assert theirs.finish_reason == ours.finish_reason
        assert theirs.prompt_tokens == ours.prompt_tokens
        assert [token.log_prob for token in theirs.tokens] == pytest.approx(
            [token.log_prob for token in ours.tokens], abs=TOLERANCE
        )
