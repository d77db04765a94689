"""A server with a cross-encoder: it ranks documents, and orders found passages anew where a request says so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from specrag.models import catalog
from specrag.retrieval.encoder.reranker import Reranker, load_reranker
from specrag.retrieval.knowledge_base import KnowledgeBase
from tests.retrieval.encoder.tiny_networks import write_cross_encoder
from tests.serving.live_server import MODEL, LiveServer, post, running_server

QUESTION = "Who discovered radium?"
DOCUMENTS = ["Copper conducts electricity.", "Marie Curie discovered radium.", "Tea is a drink."]


@pytest.fixture(scope="module")
def folder(model_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    minilm = catalog.resolve("minilm-l6-v2").folder
    return write_cross_encoder(tmp_path_factory.mktemp("reranker"), minilm)


@pytest.fixture(scope="module")
def reranker(folder: Path) -> Reranker:
    return load_reranker(str(folder))


@pytest.fixture(scope="module")
def ranking(smollm2: Path, sample_base: Path, folder: Path) -> Iterator[LiveServer]:
    with running_server(kbs={"wiki": sample_base}, reranker=str(folder)) as server:
        yield server


@pytest.fixture(scope="module")
def expected(sample_base: Path, reranker: Reranker) -> list[tuple[int, float]]:
    """The best three passages in the reranker's order, which is another one than that of the search."""
    with KnowledgeBase.open(sample_base) as base:
        (plain,) = base.search([QUESTION], 3)
        (hits,) = base.search([QUESTION], 3, reranker=reranker)
    assert [hit.passage.id for hit in plain] != [hit.passage.id for hit in hits]
    return [(hit.passage.id, hit.score) for hit in hits]


def test_documents_are_ordered_by_its_scores(ranking: LiveServer, folder: Path, reranker: Reranker) -> None:
    body = {"model": str(folder), "query": QUESTION, "documents": DOCUMENTS, "top_n": 2}
    answer = post(ranking, "/v1/rerank", body).json()
    scores = reranker.score(QUESTION, DOCUMENTS)
    best = sorted(range(3), key=lambda place: -scores[place])[:2]
    assert [(each["index"], each["relevance_score"]) for each in answer["results"]] == [
        (place, float(scores[place])) for place in best
    ]
    assert answer["model"] == str(folder)
    assert answer["usage"]["total_tokens"] > 30


def test_the_encoder_still_ranks_by_cosines(ranking: LiveServer) -> None:
    body = {"model": "minilm-l6-v2", "query": QUESTION, "documents": DOCUMENTS}
    assert post(ranking, "/v1/rerank", body).json()["results"][0]["index"] == 1


def test_a_search_is_ordered_by_it(
    ranking: LiveServer, folder: Path, expected: list[tuple[int, float]]
) -> None:
    found = post(ranking, "/v1/kb/wiki/search", {"query": QUESTION, "k": 3, "rerank": str(folder)}).json()
    assert [(each["id"], each["score"]) for each in found["data"]] == expected


@pytest.mark.parametrize("method", ["standard-rag", "speculative-rag"])
def test_an_answers_passages_are_ordered_by_it(
    ranking: LiveServer, folder: Path, expected: list[tuple[int, float]], method: str
) -> None:
    extension = {"kb": "wiki", "method": method, "k": 3, "min_score": 0.0, "rerank": str(folder)}
    answer = chat(ranking, extension).json()
    scores = [each["score"] for each in answer["specrag"]["sources"]]
    if method == "speculative-rag":  # its sources are those of the draft that won
        assert set(scores) <= {score for _, score in expected}
    else:
        assert scores == [score for _, score in expected]


def chat(server: LiveServer, extension: dict[str, Any]) -> httpx.Response:
    messages = [{"role": "user", "content": QUESTION}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 4, "temperature": 0, "specrag": extension}
    return post(server, "/v1/chat/completions", body)


def test_it_is_listed_and_described(ranking: LiveServer, folder: Path) -> None:
    models = httpx.get(f"{ranking.url}/v1/models").json()["data"]
    assert {each["id"]: each["specrag"]["kind"] for each in models}[str(folder)] == "rerank"
    whole = httpx.get(f"{ranking.url}/openapi.json").json()
    described = whole["components"]["schemas"]["SpecragField"]["properties"]["rerank"]
    assert described["anyOf"] == [{"enum": [str(folder)]}, {"type": "null"}]


@pytest.mark.parametrize("method", ["standard-rag", "speculative-rag"])
def test_another_one_is_refused_and_not_looked_for(ranking: LiveServer, method: str) -> None:
    """A client must not make a server read any folder or fetch any model."""
    answer = chat(ranking, {"kb": "wiki", "method": method, "rerank": "/etc"})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == "specrag.rerank"
    assert "GET /v1/models" in error["message"]
    found = post(ranking, "/v1/kb/wiki/search", {"query": QUESTION, "rerank": "/etc"})
    assert (found.status_code, found.json()["error"]["param"]) == (400, "rerank")


def test_a_server_without_one_says_so(server: LiveServer) -> None:
    error = chat(server, {"kb": "wiki", "rerank": "any"}).json()["error"]
    assert "this server has none" in error["message"]
