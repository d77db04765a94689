"""A server whose drafts are written by another model than the one that judges them."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

import specrag
from specrag.cli.serve import check_settings
from specrag.errors import InputError, ModelFilesError
from specrag.methods.passages import retrieval
from specrag.methods.resources import Resources
from specrag.methods.speculative_rag import SpeculativeRAG
from specrag.methods.speculative_rag.pipeline import SpeculativeRAGPipeline
from specrag.request import Request, SearchOptions
from specrag.retrieval.knowledge_base import KnowledgeBase
from specrag.serving.service import split_drafter
from specrag.serving.settings import load_settings
from tests.methods.run import answer_of
from tests.serving.live_server import EXACT, MODEL, post, running_server

ADAPTER = "smollm2-135m-drafter"
OPTIONS = {"drafts": 3, "passages_per_draft": 1, "draft_tokens": 48, "strategy": "multi-perspective"}


def test_the_tuned_drafter_drafts_and_the_model_judges(smollm2: Path, sample_base: Path) -> None:
    question = "Who discovered radium?"
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": question}],
        "specrag": {"kb": "wiki", "k": 4, "method": "speculative-rag", "options": OPTIONS, "events": True},
        "stream": True,
    }
    settings = {**EXACT, "kbs": {"wiki": sample_base}, "rag_drafter": f"{MODEL}+{ADAPTER}"}
    with running_server(**settings) as server:
        drafter = server.service.rag_drafter
        assert drafter is not None
        assert drafter.loaded.drafter_form == "paper"
        response = post(server, "/v1/chat/completions", body)
        assert response.status_code == 200, response.text
        # It is the small model that a cascade needs, too.
        assert "cascade" in {one["name"] for one in httpx.get(f"{server.url}/v1/specrag/methods").json()}
        server.wait_until_idle()
    lines = [
        line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: {")
    ]
    told = [json.loads(line).get("specrag", {}) for line in lines]
    drafts = {event["index"]: event["answer"] for event in told if event.get("event") == "draft"}
    kind: dict[str, Any] = {"dtype": "int8", "batch_invariant": True, "device": "cpu"}
    with (
        closing(specrag.load(MODEL, **kind)) as judge,
        closing(specrag.load(MODEL, **kind, adapter=ADAPTER)) as writer,
        KnowledgeBase.open(sample_base) as base,
    ):
        request = Request(question, search=SearchOptions(k=4))
        found = retrieval(request, Resources(retriever=base), "speculative-rag")
        options = SpeculativeRAG.Options(form="paper", drafts=3, passages_per_draft=1, draft_tokens=48)
        expected = answer_of(SpeculativeRAGPipeline(writer, judge, found, options), question)
        untuned = answer_of(SpeculativeRAGPipeline(judge, judge, found, options), question)
    answers = [draft.answer for draft in expected.drafts]
    assert [drafts[index] for index in range(3)] == answers
    assert [draft.answer for draft in untuned.drafts] != answers


def test_plain_is_the_model_without_an_adapter_as_in_the_options() -> None:
    assert split_drafter(f"{MODEL}+plain") == split_drafter(MODEL) == (MODEL, None)
    assert split_drafter(f"{MODEL}+{ADAPTER}") == (MODEL, ADAPTER)
    check_settings(load_settings(flags={"rag_drafter": f"{MODEL}+plain"}))


def test_an_adapter_that_is_not_there_is_told_before_anything_is_loaded() -> None:
    with pytest.raises(InputError, match="no such folder"):
        check_settings(load_settings(flags={"rag_drafter": f"{MODEL}+nowhere"}))
    for given in (f"{MODEL}+", f"+{ADAPTER}"):
        with pytest.raises(InputError, match=r"give MODEL or MODEL\+ADAPTER"):
            check_settings(load_settings(flags={"rag_drafter": given}))
    with pytest.raises(ModelFilesError, match="was trained for"):
        check_settings(load_settings(flags={"rag_drafter": f"gemma-3-270m+{ADAPTER}"}))
