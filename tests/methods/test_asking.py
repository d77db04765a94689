"""One call from a question to an answer, with a model by name, with one that is loaded, and with none here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import specrag
from specrag import InputError, Resources
from specrag.asking import Answerer, _load
from tests.sample import build_sample

if TYPE_CHECKING:
    from specrag import LanguageModel

QUESTION = "Who discovered radium?"


@pytest.fixture(scope="module")
def folder(model_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_sample(tmp_path_factory.mktemp("kb") / "kb")


@pytest.fixture(scope="module")
def by_name(smollm2: Path) -> Iterator[str]:
    yield "smollm2-135m"
    _load("smollm2-135m").close()
    _load.cache_clear()


def test_a_question_over_a_folder(folder: Path, by_name: str) -> None:
    result = specrag.ask(QUESTION, kb=folder, model=by_name, k=2, max_tokens=12)
    assert len(result.sources) == 2
    assert "Curie" in result.sources[0].passage.title
    assert _load(by_name) is _load(by_name)  # stays loaded
    alone = specrag.ask("Say hello.", model=by_name, max_tokens=4)
    assert (alone.sources, alone.usage.completion_tokens) == ((), 4)


def test_a_loaded_model_and_a_method(folder: Path, llm: LanguageModel) -> None:
    with specrag.KnowledgeBase.open(folder) as kb:
        result = specrag.ask(QUESTION, kb=kb, model=llm, method="sequential", max_tokens=6)
    assert result.retrieved == 2
    with pytest.raises(InputError, match="did you mean ralmspec"):
        specrag.ask(QUESTION, kb=kb, model=llm, method="ralmspek")


def test_a_drafter_beside_the_model(folder: Path, llm: LanguageModel) -> None:
    method = specrag.SpeculativeRAG(drafts=2, passages_per_draft=1, draft_tokens=16, strategy="random")
    result = specrag.ask(QUESTION, kb=folder, model=llm, drafter=llm, method=method, k=2)
    assert result.details is not None
    assert result.details.record()["verifies_itself"]


def test_models_that_are_all_elsewhere(folder: Path, llm: LanguageModel) -> None:
    """Drafter and verifier behind an endpoint: nothing is loaded here."""
    pytest.importorskip("openai")
    pytest.importorskip("uvicorn")
    from specrag.models.endpoint import open_endpoint
    from tests.models.endpoint_server import MODEL, FakeServer, ModelBackend, served

    with served(FakeServer(ModelBackend(llm))) as server, open_endpoint(f"{server.url}#{MODEL}") as endpoint:
        method = specrag.SpeculativeRAG(drafts=2, passages_per_draft=1, draft_tokens=16, strategy="random")
        result = specrag.ask(QUESTION, kb=folder, drafter=endpoint, verifier=endpoint, method=method, k=2)
        assert result.text
        assert len(result.sources) == 2
        answerer = Answerer(Resources(drafter=endpoint, verifier=endpoint))
        with specrag.KnowledgeBase.open(folder) as kb:
            again = answerer.generate(QUESTION, kb=kb, method=method, k=2)
            assert again.text == result.text
            with pytest.raises(specrag.DeadlineExceeded):
                answerer.generate(QUESTION, kb=kb, method=method, k=2, timeout=1e-6)
            with pytest.raises(InputError, match="decodes a local model; name one"):
                answerer.generate(QUESTION, kb=kb)
        answerer.resources.close()
        assert server.seen
