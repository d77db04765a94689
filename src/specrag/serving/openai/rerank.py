"""``POST /v1/rerank``: ranks documents by how well they answer a query, in the form of Cohere and Jina."""

from __future__ import annotations

import uuid
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from specrag.serving.openai.answering import service_of
from specrag.serving.openai.embeddings import beside, check_texts, count_tokens, encode_in_parts, no_encoder
from specrag.serving.openai.schemas import RerankRequest
from specrag.serving.openai.streaming import until_gone
from specrag.serving.operation.limits import JsonRoute

if TYPE_CHECKING:
    from specrag.retrieval.encoder import Encoder, Reranker
    from specrag.serving.service import Service

router = APIRouter(route_class=JsonRoute, tags=["rerank"])


@router.post("/v1/rerank")
async def rerank(body: RerankRequest, request: Request) -> Response:
    """Order documents by how well they fit a query, the best one first.

    By the server's cross-encoder, or by the cosine between the vectors of its sentence encoder.
    """
    service = service_of(request)
    settings = service.settings
    if body.model not in (settings.encoder, settings.reranker):
        raise no_encoder(body.model, "ranks nothing", service)
    documents = [document if isinstance(document, str) else document.text for document in body.documents]
    check_texts("query", [body.query])
    check_texts("documents", documents)
    return JSONResponse(await until_gone(request.receive, _ranked(service, body, documents)))


async def _ranked(service: Service, body: RerankRequest, documents: list[str]) -> dict[str, Any]:
    ticket = await service.encodings.enter(1, 0)
    try:
        if body.model == service.settings.reranker:
            scores, count = await _fits(await beside(service.reranker, body.model), body.query, documents)
        else:
            scores, count = await _cosines(await beside(service.encoder), body.query, documents)
    finally:
        ticket.release()
    best = np.argsort(-scores, kind="stable")[: body.top_n]
    results: list[dict[str, Any]] = [
        {"index": int(index), "relevance_score": float(scores[index])} for index in best
    ]
    if body.return_documents is not False:
        for result in results:
            result["document"] = {"text": documents[result["index"]]}
    answer: dict[str, Any] = {"id": f"rerank-{uuid.uuid4().hex}", "model": body.model, "results": results}
    if count is not None:
        answer["usage"] = {"prompt_tokens": count, "total_tokens": count}
    return answer


async def _fits(reranker: Reranker, query: str, documents: list[str]) -> tuple[np.ndarray, int | None]:
    """Scores by a cross-encoder, and the number of its input tokens if its files allow counting them."""
    scores = await encode_in_parts(partial(reranker.score, query), documents)
    if reranker.tokenizer_file is None:
        return scores, None
    given = [query] * len(documents) + documents
    return scores, await beside(count_tokens, str(reranker.tokenizer_file), given)


async def _cosines(encoder: Encoder, query: str, documents: list[str]) -> tuple[np.ndarray, int]:
    (vector,) = await beside(encoder.encode_queries, [query])
    vectors = await encode_in_parts(encoder.encode_passages, documents)
    return vectors @ vector, await beside(count_tokens, str(encoder.tokenizer_file), [query, *documents])
