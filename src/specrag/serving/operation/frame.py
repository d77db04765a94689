"""The frame around every request: its id, its log line, its metrics, and the last handler of its errors."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specrag.serving.errors import error_response, to_api_error
from specrag.serving.operation.logs import Log, Tracing, request_id
from specrag.serving.operation.metrics import Metrics

_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
# Polled routes; they get a log line only if they fail.
_QUIET = frozenset({"/healthz", "/readyz", "/metrics", "/v1/kb/jobs/{job}"})
# Reasons for refusing a request, by status.
_REFUSALS = {
    401: "key", 403: "scope", 408: "slow", 413: "size", 421: "host", 429: "busy", 503: "unready", 507: "disk",
}  # fmt: skip
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class Activity:
    """When the server was last used; polling of its health does not count.

    Args:
        clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._running = 0
        self._last = clock()

    def begin(self) -> None:
        """Note that a request has arrived."""
        self._running += 1

    def end(self, route: str) -> None:
        """Note that a request has been answered."""
        self._running -= 1
        if route not in _QUIET:
            self._last = self._clock()

    @property
    def idle(self) -> float:
        """Seconds since a request was last answered; 0 while one is running."""
        return 0.0 if self._running else self._clock() - self._last


class RequestFrame:
    """The outermost layer of the application.

    Args:
        app: the wrapped application.
        log, metrics, tracing, activity: told of every request.
        clock: in seconds.
    """

    def __init__(
        self,
        app: ASGIApp,
        log: Log,
        metrics: Metrics,
        tracing: Tracing,
        activity: Activity,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._app = app
        self._log = log
        self._metrics = metrics
        self._tracing = tracing
        self._activity = activity
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        identifier = given if _ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = identifier
        token = request_id.set(identifier)
        started = self._clock()
        self._activity.begin()
        status = 0

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = identifier
            await send(message)

        try:
            with self._tracing.request(scope) as span:
                try:
                    await self._app(scope, receive, sending)
                except Exception as error:
                    problem = to_api_error(error)
                    if problem.status_code >= 500:
                        self._log.error("request failed", error)
                    if status:
                        raise  # the response has begun; the connection is cut
                    await error_response(problem)(scope, receive, sending)
                span.end(_route(scope), status)
        finally:
            self._activity.end(_route(scope))
            self._tell(scope, status, self._clock() - started)
            request_id.reset(token)

    def _tell(self, scope: Scope, status: int, seconds: float) -> None:
        route, method = _route(scope), scope["method"]
        self._metrics.request(route, method if method in _METHODS else "other", status, seconds)
        if route in _QUIET and status < 400:
            return
        if status in _REFUSALS:
            self._metrics.rejected(_REFUSALS[status])
        key = scope["state"].get("key")
        client = scope.get("client")
        self._log.info(
            "request",
            method=method,
            route=route,
            path=scope["path"] if route == "other" else None,
            status=status or None,
            seconds=round(seconds, 4),
            key=None if key is None else key.name,
            client=client[0] if client else None,
        )


def _route(scope: Scope) -> str:
    """The route's template, which holds no values of the request; ``other`` without a route."""
    path = getattr(scope.get("route"), "path", None)
    return path if isinstance(path, str) else "other"
