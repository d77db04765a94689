"""Adds what it takes to operate the application: keys, limits, log, metrics, health, knowledge bases, the page."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
from fastapi import APIRouter, FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response

from specrag.serving.keys import KeyRing
from specrag.serving.knowledge.bases import KnowledgeBases
from specrag.serving.knowledge.documents import router as documents
from specrag.serving.knowledge.jobs import Jobs
from specrag.serving.knowledge.routes import router as knowledge_bases
from specrag.serving.operation.access import Authentication, SecurityHeaders, SiteGuard
from specrag.serving.operation.frame import Activity, RequestFrame
from specrag.serving.operation.limits import BodyLimits
from specrag.serving.operation.logs import Log, OpenTelemetry, Tracing
from specrag.serving.operation.metrics import CONTENT_TYPE, FinishedGeneration, Metrics
from specrag.serving.page.routes import page_routes
from specrag.serving.settings import Settings

if TYPE_CHECKING:
    from specrag.retrieval.encoder import Encoders
    from specrag.serving.service import Service

_SPARE_BYTES = 32 * 2**20

router = APIRouter(tags=["operation"])
figures = APIRouter(tags=["operation"])


class Readiness:
    """Reasons why no requests should be sent here; none when the server is ready.

    Args:
        folder: the folder that is written, which must have some space left; None if nothing is written.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._checks: dict[str, Callable[[], str | None]] = {}
        self._stopping = False

    def add(self, name: str, check: Callable[[], str | None]) -> None:
        """Add a condition.

        Args:
            name: what is checked, such as ``model``.
            check: returns a reason, or None while all is well; must be quick.
        """
        self._checks[name] = check

    def stop(self) -> None:
        """Report the server as stopping: it only finishes what it has begun."""
        self._stopping = True

    def reasons(self) -> dict[str, str]:
        """The reasons why the server is not ready, by what was checked."""
        found = {name: reason for name, check in self._checks.items() if (reason := check()) is not None}
        if self._stopping:
            found["server"] = "it is being stopped"
        if self._folder is not None and not _has_space(self._folder):
            found["disk"] = "no space is left for uploads"
        return found


def _has_space(folder: Path) -> bool:
    try:
        return shutil.disk_usage(folder).free >= _SPARE_BYTES
    except OSError:
        return False


@router.get("/healthz", summary="Whether the process answers")
async def healthz() -> dict[str, str]:
    """Always ok; where this does not answer the process should be restarted."""
    return {"status": "ok"}


@router.get("/readyz", summary="Whether requests should be sent here")
async def readyz(request: Request) -> JSONResponse:
    """200 when requests are welcome, else 503, for whoever has a key with the reasons."""
    operation = request.app.state.operation
    reasons = operation.readiness.reasons()
    known = operation.keys.find(request.headers.get("authorization")) is not None
    upstreams = request.app.state.service.upstreams
    told = {} if upstreams is None or not known else {"upstreams": upstreams.report()}
    if not reasons:
        return JSONResponse({"status": "ready", **told})
    return JSONResponse({"status": "not ready", **({"reasons": reasons} if known else {}), **told}, 503)


@figures.get("/metrics", summary="Figures for Prometheus", response_class=Response)
async def prometheus(request: Request) -> Response:
    """Counters, gauges and histograms in Prometheus's text format."""
    return Response(request.app.state.operation.metrics.text(), media_type=CONTENT_TYPE)


_SEARCHES = 4  # at the same time; more would only take turns


class Operation:
    """The parts that routes and middleware share.

    Args:
        settings: the server's.
        encoders: encode questions.
        log: where lines go; by default standard error.
    """

    def __init__(self, settings: Settings, encoders: Encoders | None = None, log: Log | None = None) -> None:
        self.settings = settings
        self.log = log or Log(settings)
        self.metrics = Metrics()
        self.activity = Activity()
        self.tracing: Tracing = OpenTelemetry() if settings.tracing else Tracing()
        self.keys = KeyRing(settings.all_keys())
        self.bases = KnowledgeBases(settings, encoders)
        self.jobs = Jobs(self.bases, self.metrics, self.log, settings)
        self.readiness = Readiness(settings.kb_root)
        self.searches = anyio.CapacityLimiter(_SEARCHES)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run jobs inside the block."""
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
        """Record a finished answer in metrics, trace and log."""
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
        app: has its ``state.service``.
    """
    service: Service = app.state.service
    settings = service.settings
    operation = Operation(settings, service.encoders)
    app.state.operation = operation
    service.knowledge_bases = operation.bases
    service.observers.append(operation.observe)
    service.searches = operation.metrics.search
    service.packed_passes = operation.metrics.packed_pass
    operation.readiness.add("model", lambda: None if service.state == "ready" else service.state)
    if service.upstreams is not None:
        operation.readiness.add("upstreams", service.upstreams.reason)
        operation.metrics.registry.register(service.upstreams)
    _watch(operation, service)
    app.include_router(documents)
    app.include_router(knowledge_bases)
    app.include_router(router)
    if settings.metrics:
        app.include_router(figures)
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
    """Resident bytes of the process; 0 if the system does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * 4096
    except OSError:
        return 0


def _add_middleware(app: FastAPI, operation: Operation) -> None:
    """Add the middleware, innermost first."""
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
    app.add_middleware(
        RequestFrame,
        log=operation.log,
        metrics=operation.metrics,
        tracing=operation.tracing,
        activity=operation.activity,
    )


def _join_life(app: FastAPI, operation: Operation) -> None:
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def life(running: FastAPI) -> AsyncIterator[object]:
        async with operation.running(), inner(running) as state:
            yield state
        operation.bases.close()

    app.router.lifespan_context = life  # type: ignore[assignment]
