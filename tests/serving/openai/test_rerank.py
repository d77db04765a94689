"""Documents ordered by the sentence encoder: the form of Cohere and Jina, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.serving.live_server import MODEL, LiveServer, post

DOCUMENTS = [
    "Copper conducts electricity.",
    "Marie Curie discovered radium.",
    "Radium glows in the dark.",
    "Tea is a drink.",
]


def ask(server: LiveServer, **options: Any) -> Any:
    body = {
        "model": "minilm-l6-v2",
        "query": "Who discovered radium?",
        "documents": DOCUMENTS,
        "top_n": None,
        **options,
    }
    return post(server, "/v1/rerank", body)


def test_documents_are_ordered_by_their_cosine(server: LiveServer) -> None:
    answer = ask(server).json()
    found = {result["index"]: result["relevance_score"] for result in answer["results"]}
    encoder = server.service.encoder()
    expected = encoder.encode_passages(DOCUMENTS) @ encoder.encode_queries(["Who discovered radium?"])[0]
    assert list(found) == np.argsort(-expected).tolist()
    assert [found[place] for place in range(4)] == pytest.approx(expected.tolist(), abs=1e-5)
    assert next(iter(found)) == 1
    assert all(result["document"] == {"text": DOCUMENTS[result["index"]]} for result in answer["results"])
    assert answer["usage"]["total_tokens"] > 20


def test_the_best_few_without_their_texts(server: LiveServer) -> None:
    objects = [{"text": text} for text in DOCUMENTS]
    results = ask(server, documents=objects, top_n=2, return_documents=False).json()["results"]
    assert [result["index"] for result in results] == [1, 2]
    assert all(set(result) == {"index", "relevance_score"} for result in results)


@pytest.mark.parametrize(
    ("options", "status", "param"),
    [
        ({"model": MODEL}, 404, "model"),
        ({"query": " "}, 400, "query.0"),
        ({"documents": []}, 400, "documents"),
        ({"documents": ["a", ""]}, 400, "documents.1"),
        ({"documents": ["a"] * 2049}, 400, "documents"),
        ({"top_n": 0}, 400, "top_n"),
    ],
    ids=["model", "query", "none", "empty", "many", "top"],
)
def test_what_cannot_be_ranked_is_refused(
    server: LiveServer, options: dict[str, Any], status: int, param: str
) -> None:
    answer = ask(server, **options)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_it_waits_its_turn_with_the_embeddings(server: LiveServer) -> None:
    encodings = server.service.encodings
    limit, encodings._limit = encodings._limit, 0
    encodings.running += 1
    try:
        assert ask(server).json()["error"]["code"] == "queue_full"
    finally:
        encodings._limit = limit
        encodings.running -= 1
    assert ask(server).status_code == 200
