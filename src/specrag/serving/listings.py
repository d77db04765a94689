"""What is served here: ``GET /v1/models`` and ``GET /v1/specrag/methods``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from specrag.serving.methods import Lent, describe_methods
from specrag.serving.problems import ApiError
from specrag.serving.service import Service

router = APIRouter(tags=["listings"])


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """The model that writes and the one that makes embeddings."""
    service: Service = request.app.state.service
    return {"object": "list", "data": [_model(service, name) for name in _names(service)]}


@router.get("/v1/models/{model:path}")
async def show_model(model: str, request: Request) -> dict[str, Any]:
    """One of them."""
    service: Service = request.app.state.service
    if model not in _names(service):
        message = f"the model {model[:80]!r} is not served here"
        raise ApiError(404, message, code="model_not_found", param="model")
    return _model(service, model)


@router.get("/v1/specrag/methods")
async def list_methods(request: Request) -> list[dict[str, Any]]:
    """The methods that ``specrag.method`` may name, with their options."""
    service: Service = request.app.state.service
    settings, may_read = service.settings, request.state.key.may_read
    lent = Lent(
        sorted(filter(may_read, settings.datastores)),
        sorted(filter(may_read, settings.corpora)),
        settings.drafters,
    )
    return describe_methods(lent)


def _names(service: Service) -> list[str]:
    return [service.settings.name, service.settings.encoder]


def _model(service: Service, name: str) -> dict[str, Any]:
    writes = name == service.settings.name
    described: dict[str, Any] = {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "specrag",
        "specrag": {"kind": "generation" if writes else "embedding", "ready": service.state == "ready"},
    }
    if writes and service.state == "ready":
        described["max_model_len"] = service.llm.context_length
    return described
