"""The application: its routes, its lifespan, and what requests share.

What other files build on:

- ``app.state.service`` is the :class:`~specrag.serving.service.Service`; ``request.state.key`` is the
  :class:`~specrag.serving.keys.ApiKey` of the caller, set by the middleware (:data:`ANYBODY` if no keys are set).
- ``serving/operation/setup.py`` adds middleware, ``/v1/kb``, ``/healthz``, ``/readyz`` and ``/metrics``.
- ``serving/page/`` holds the page's files, served at ``/``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from specrag.errors import Cancelled, DeadlineExceeded
from specrag.serving import listings
from specrag.serving.errors import add_error_handlers, error_response, to_api_error
from specrag.serving.listings import add_options
from specrag.serving.openai import chat, completions, embeddings, rerank, responses
from specrag.serving.openai.schemas import ErrorBody
from specrag.serving.operation.setup import add_operation
from specrag.serving.service import Service

if TYPE_CHECKING:
    from specrag.retrieval.encoder import Encoders
    from specrag.serving.settings import Settings


#: Error responses of the routes, for the description of the API.
_FAILURES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 404, 408, 413, 429, 500, 503, 504)
}


def create_app(settings: Settings, encoders: Encoders | None = None) -> FastAPI:
    """Make the application. Its models are loaded in a thread when it starts; until then it answers 503.

    Args:
        settings: already checked, as :func:`~specrag.serving.settings.load_settings` returns them.
        encoders: the server's; by default they are loaded in this process.
    """
    service = Service(settings, encoders)

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        try:
            yield
        finally:
            await service.close()

    app = FastAPI(
        title="specrag",
        version=version("specrag"),
        description="An OpenAI-compatible server for answers from your own documents, made faster by speculation.",
        lifespan=life,
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    _describe_options(app, service)
    for routes in (listings, completions, chat, embeddings, rerank, responses):
        app.include_router(routes.router, responses=_FAILURES)
    add_error_handlers(app)
    for ended in (Cancelled, DeadlineExceeded):
        app.add_exception_handler(ended, _tell_end)
    add_operation(app)
    return app


def _describe_options(app: FastAPI, service: Service) -> None:
    """Add each method's options to the description of the API."""
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            add_options(describe(), service.names(lambda _: True), service.settings.method)
        return describe()

    app.openapi = openapi  # type: ignore[method-assign]


def _tell_end(_: Request, error: Exception) -> Response:
    """Answer a request that was ended: not a failure of the server, and a retry would end the same way."""
    response = error_response(to_api_error(error))
    response.headers["X-Should-Retry"] = "false"  # OpenAI's clients look at it
    return response
