"""Whether the server lives, and whether it should be sent requests."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from specrag.serving import metrics

_SPARE_BYTES = 32 * 2**20

router = APIRouter(tags=["operation"])
figures = APIRouter(tags=["operation"])


class Readiness:
    """Reasons why no requests should be sent here; none when the server is ready.

    Args:
        folder: that is written; it must have some space left. None where nothing is written.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._checks: dict[str, Callable[[], str | None]] = {}
        self._stopping = False

    def add(self, name: str, check: Callable[[], str | None]) -> None:
        """A condition.

        Args:
            name: what is checked, such as ``model``.
            check: gives a reason, or None while all is well; must be quick.
        """
        self._checks[name] = check

    def stop(self) -> None:
        """From now on the server only ends what it has begun."""
        self._stopping = True

    def reasons(self) -> dict[str, str]:
        """What is in the way, by what was checked."""
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
    if not reasons:
        return JSONResponse({"status": "ready"})
    known = operation.keys.find(request.headers.get("authorization")) is not None
    return JSONResponse({"status": "not ready", **({"reasons": reasons} if known else {})}, 503)


@figures.get("/metrics", summary="Figures for Prometheus", response_class=Response)
async def prometheus(request: Request) -> Response:
    """Counters, gauges and histograms in Prometheus's text format."""
    return Response(request.app.state.operation.metrics.text(), media_type=metrics.CONTENT_TYPE)
