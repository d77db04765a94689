"""``POST /v1/rerank``: documents by how well they answer a query, in the form of Cohere and Jina."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from specrag.serving.openai.answering import service_of
from specrag.serving.openai.embeddings import beside, check_texts, count_tokens, encode_in_parts, no_encoder
from specrag.serving.openai.schemas import RerankRequest
from specrag.serving.openai.streaming import unless_gone
from specrag.serving.operation.limits import JsonRoute

if TYPE_CHECKING:
    from specrag.serving.service import Service

router = APIRouter(route_class=JsonRoute, tags=["rerank"])


@router.post("/v1/rerank")
async def rerank(body: RerankRequest, request: Request) -> Response:
    """Order documents by the cosine between their vectors and the query's, the best one first."""
    service = service_of(request)
    if body.model != service.settings.encoder:
        raise no_encoder(body.model, "ranks nothing", service)
    documents = [document if isinstance(document, str) else document.text for document in body.documents]
    check_texts("query", [body.query])
    check_texts("documents", documents)
    return JSONResponse(await unless_gone(request, _ranked(service, body, documents)))


async def _ranked(service: Service, body: RerankRequest, documents: list[str]) -> dict[str, Any]:
    ticket = await service.encodings.enter(1, 0)
    try:
        encoder = await beside(service.encoder)
        query = await beside(encoder.encode_queries, [body.query])
        vectors = await encode_in_parts(encoder.encode_passages, documents)
        count = await beside(count_tokens, str(encoder.tokenizer_file), [body.query, *documents])
    finally:
        ticket.release()
    scores = vectors @ query[0]
    best = np.argsort(-scores, kind="stable")[: body.top_n]
    results: list[dict[str, Any]] = [
        {"index": int(index), "relevance_score": float(scores[index])} for index in best
    ]
    if body.return_documents is not False:
        for result in results:
            result["document"] = {"text": documents[result["index"]]}
    return {
        "id": f"rerank-{uuid.uuid4().hex}",
        "model": service.settings.encoder,
        "results": results,
        "usage": {"prompt_tokens": count, "total_tokens": count},
    }
