"""``POST /v1/embeddings``: vectors of texts by the server's sentence encoder."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from specrag.engine import use_one_thread
from specrag.errors import InputError
from specrag.serving.errors import ApiError
from specrag.serving.openai.answering import service_of
from specrag.serving.openai.planning import check_text
from specrag.serving.openai.schemas import EmbeddingRequest
from specrag.serving.openai.streaming import until_gone
from specrag.serving.operation.limits import JsonRoute

if TYPE_CHECKING:
    from specrag.serving.service import Service

T = TypeVar("T")

router = APIRouter(route_class=JsonRoute, tags=["embeddings"])

#: Texts encoded at once.
_BATCH = 64


@router.post("/v1/embeddings")
async def create_embeddings(body: EmbeddingRequest, request: Request) -> Response:
    """Encode one or several texts."""
    service = service_of(request)
    if body.model not in (service.settings.encoder, service.settings.name):
        raise no_encoder(body.model, "makes no embeddings", service)
    texts = [body.input] if isinstance(body.input, str) else body.input
    check_texts("input", texts)
    return JSONResponse(await until_gone(request.receive, _encode(service, texts, body)))


def no_encoder(model: str, what: str, service: Service) -> ApiError:
    """The error for a request that names a model which does not encode.

    Args:
        what: says what it does not do.
    """
    message = f"the model {model[:80]!r} {what} here; take {service.settings.encoder!r}"
    return ApiError(404, message, code="model_not_found", param="model")


def check_texts(field: str, texts: Sequence[str]) -> None:
    """Raise InputError if one of the texts is empty or cannot be encoded."""
    for place, text in enumerate(texts):
        if not check_text(f"{field}.{place}", text).strip():
            raise InputError(f"{field}.{place}", text[:20], "give at least one character")


async def encode_in_parts(encode: Callable[[list[str]], np.ndarray], texts: list[str]) -> np.ndarray:
    """Vectors of texts, made outside the event loop in batches, so that a client's going away ends the rest."""
    parts = [await beside(encode, texts[start : start + _BATCH]) for start in range(0, len(texts), _BATCH)]
    return np.concatenate(parts)


async def _encode(service: Service, texts: list[str], body: EmbeddingRequest) -> dict[str, Any]:
    ticket = await service.encodings.enter(1, 0)
    try:
        encoder = await beside(service.encoder)
        if body.dimensions is not None and body.dimensions != encoder.dimension:
            raise InputError("dimensions", body.dimensions, f"leave it out; vectors have {encoder.dimension}")
        vectors = await encode_in_parts(encoder.encode_passages, texts)
        count = await beside(count_tokens, str(encoder.tokenizer_file), texts)
    finally:
        ticket.release()
    return {
        "object": "list",
        "model": service.settings.encoder,
        "data": [
            {"object": "embedding", "index": index, "embedding": _written(vector, body.encoding_format)}
            for index, vector in enumerate(vectors)
        ],
        "usage": {"prompt_tokens": count, "total_tokens": count},
    }


async def beside(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a thread, outside the event loop and the passes."""

    def work() -> T:
        use_one_thread()
        return function(*arguments)

    return await asyncio.to_thread(work)


def count_tokens(tokenizer_file: str, texts: list[str]) -> int:
    """Tokens of the texts, including those beyond what the encoder reads."""
    return sum(len(encoded.ids) for encoded in _tokenizer(tokenizer_file).encode_batch(texts))


@lru_cache(maxsize=2)
def _tokenizer(file: str) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(file)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _written(vector: np.ndarray, form: str | None) -> str | list[float]:
    if form == "base64":
        return base64.b64encode(np.asarray(vector, dtype="<f4").tobytes()).decode("ascii")
    return [float(value) for value in vector]
