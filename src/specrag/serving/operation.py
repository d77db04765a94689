"""What makes an application fit to be run: keys, limits, headers, log, figures, health, knowledge bases, the page."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio
from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from specrag.serving import document_routes, health, kb_routes
from specrag.serving.authentication import Authentication
from specrag.serving.headers import SecurityHeaders, SiteGuard
from specrag.serving.health import Readiness
from specrag.serving.jobs import Jobs
from specrag.serving.keys import KeyRing
from specrag.serving.knowledge import KnowledgeBases
from specrag.serving.limits import BodyLimits
from specrag.serving.logs import Log
from specrag.serving.metrics import FinishedGeneration, Metrics
from specrag.serving.page import page_routes
from specrag.serving.requests import RequestFrame
from specrag.serving.settings import Settings
from specrag.serving.tracing import OpenTelemetry, Tracing

if TYPE_CHECKING:
    from specrag.retrieval.encoder import Encoder
    from specrag.serving.service import Service

_SEARCHES = 4  # at the same time; more would only take turns


class Operation:
    """The parts that routes and middleware share.

    Args:
        settings: of the server.
        encoder: the server's own, loaded on first use.
        log: where lines go; by default standard error.
    """

    def __init__(
        self, settings: Settings, encoder: Callable[[], Encoder] | None = None, log: Log | None = None
    ) -> None:
        self.settings = settings
        self.log = log or Log(settings)
        self.metrics = Metrics()
        self.tracing: Tracing = OpenTelemetry() if settings.tracing else Tracing()
        self.keys = KeyRing(settings.all_keys())
        self.bases = KnowledgeBases(settings, encoder)
        self.jobs = Jobs(self.bases, self.metrics, self.log, settings)
        self.readiness = Readiness(settings.kb_root)
        self.searches = anyio.CapacityLimiter(_SEARCHES)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Inside the block jobs are done."""
        root = self.settings.kb_root
        if root is not None:
            await anyio.to_thread.run_sync(lambda: root.mkdir(parents=True, exist_ok=True))
            await anyio.to_thread.run_sync(self.bases.remove_deleted)
        await anyio.to_thread.run_sync(self.jobs.start)
        try:
            yield
        finally:
            self.readiness.stop()
            await anyio.to_thread.run_sync(self.jobs.stop)
            self.tracing.close()

    def observe(self, done: FinishedGeneration) -> None:
        """An answer has ended."""
        self.metrics.generation(done)
        figures = {
            "method": done.method,
            "reason": done.reason,
            "prompt_tokens": done.prompt_tokens,
            "completion_tokens": done.completion_tokens,
            "passes": done.passes,
            "drafted": sum(done.drafted_by.values()),
            "accepted": sum(done.accepted_by.values()),
            "seconds": round(done.total, 4),
        }
        self.tracing.figures(figures)
        self.log.info("generation", **figures, prompt=done.prompt, answer=done.answer)


def add_operation(app: FastAPI) -> None:
    """Add middleware, ``/v1/kb``, ``/healthz``, ``/readyz``, ``/metrics`` and the page to an application.

    Args:
        app: with its ``state.service``.
    """
    service: Service = app.state.service
    settings = service.settings
    operation = Operation(settings, service.encoder)
    app.state.operation = operation
    service.knowledge_bases = operation.bases
    service.observers.append(operation.observe)
    service.searches = operation.metrics.search
    service.packed_passes = operation.metrics.packed_pass
    operation.readiness.add("model", lambda: None if service.state == "ready" else service.state)
    _watch(operation, service)
    app.include_router(document_routes.router)
    app.include_router(kb_routes.router)
    app.include_router(health.router)
    if settings.metrics:
        app.include_router(health.figures)
    if settings.page:
        app.router.routes.extend(page_routes())
    _add_middleware(app, operation)
    _join_life(app, operation)


def _watch(operation: Operation, service: Service) -> None:
    watch = operation.metrics.watch
    watch("running_texts", "Texts that are being written now.", lambda: service.admission.running)
    watch("queue_length", "Requests that wait for a place.", lambda: service.admission.waiting)
    watch("kv_reserved_bytes", "Reserved for keys and values.", lambda: service.admission.reserved)
    watch("kv_budget_bytes", "That may be reserved.", lambda: service.admission.budget or 0)
    watch("index_jobs_pending", "Uploads that are not indexed yet.", lambda: operation.jobs.pending)
    watch("ready", "1 when requests are welcome.", lambda: float(not operation.readiness.reasons()))
    watch("resident_bytes", "Memory of the process.", resident_bytes)


def resident_bytes() -> float:
    """Memory that the process holds; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * 4096
    except OSError:
        return 0


def _add_middleware(app: FastAPI, operation: Operation) -> None:
    """The innermost first."""
    settings = operation.settings
    app.add_middleware(BodyLimits, settings=settings)
    app.add_middleware(Authentication, keys=operation.keys)
    app.add_middleware(SiteGuard, settings=settings)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["Authorization", "Content-Type", "X-Request-Id"],
            expose_headers=["X-Request-Id", "Retry-After", "Location"],
        )
    app.add_middleware(SecurityHeaders, shared=bool(settings.cors_origins))
    app.add_middleware(RequestFrame, log=operation.log, metrics=operation.metrics, tracing=operation.tracing)


def _join_life(app: FastAPI, operation: Operation) -> None:
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def life(running: FastAPI) -> AsyncIterator[object]:
        async with operation.running(), inner(running) as state:
            yield state
        operation.bases.close()

    app.router.lifespan_context = life  # type: ignore[assignment]
