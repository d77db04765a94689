"""The log, with a line per request, and OpenTelemetry traces, with a span per request.

Users' texts are written only if the operator asks for them, and only to the log. A line has the time, the level, the
event and its fields; lines written while a request is answered have its id. Traces need ``specrag[tracing]`` and the
setting ``tracing``; OpenTelemetry's own variables, such as ``OTEL_EXPORTER_OTLP_ENDPOINT``, say where they go.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, TextIO

import structlog
from starlette.datastructures import Headers
from starlette.types import Scope

from specrag.errors import InputError
from specrag.serving.settings import Settings

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Id of the request that is being answered."""

#: Fields that hold texts of users or answers to them.
TEXTS = frozenset({"prompt", "messages", "query", "answer", "text", "document", "input"})

# Without local variables, which may hold keys and texts.
_TRACES = structlog.processors.ExceptionRenderer(
    structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
)
_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
_LONGEST = 2000  # characters of a field


class Log:
    """Writes log lines.

    Args:
        settings: the format, the level, and whether texts are written.
        stream: where lines go; standard error by default.
    """

    def __init__(self, settings: Settings, stream: TextIO | None = None) -> None:
        self._texts = settings.log_prompts
        renderer: Any = structlog.processors.JSONRenderer()
        if settings.log_format == "text":
            renderer = structlog.dev.ConsoleRenderer(
                colors=False, exception_formatter=structlog.dev.plain_traceback
            )
        self._logger = structlog.wrap_logger(
            structlog.WriteLogger(stream or sys.stderr),
            processors=[
                _without_nothing,
                self._without_texts,
                _with_request,
                structlog.processors.add_log_level,
                structlog.processors.TimeStamper(fmt="iso", utc=True),
                _bounded,
                *([_TRACES] if settings.log_format == "json" else []),
                renderer,
            ],
            wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[settings.log_level]),
        )

    def info(self, event: str, **fields: Any) -> None:
        """Log a normal event."""
        self._logger.info(event, **fields)

    def warning(self, event: str, **fields: Any) -> None:
        """Log something that an operator may want to change."""
        self._logger.warning(event, **fields)

    def error(self, event: str, error: BaseException | None = None, **fields: Any) -> None:
        """Log something that should not have happened, with its traceback."""
        self._logger.error(event, exc_info=error, **fields)

    def _without_texts(self, _: Any, __: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        if not self._texts:
            for name in TEXTS & fields.keys():
                fields[name] = f"({len(str(fields[name]))} characters)"
        return fields


def _without_nothing(_: Any, __: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _with_request(_: Any, __: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    current = request_id.get()
    if current is not None:
        fields.setdefault("request_id", current)
    return fields


def _bounded(_: Any, __: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Shorten long fields, and escape lone surrogates, which cannot be written."""
    for name, value in fields.items():
        if isinstance(value, str):
            short = value if len(value) <= _LONGEST else f"{value[:_LONGEST]}..."
            fields[name] = short.encode("utf-8", "backslashreplace").decode()
    return fields


class _Forward(logging.Handler):
    """Forwards the lines of libraries to the log."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        if record.exc_info and record.exc_info[1] is not None:
            self._log.error(record.getMessage(), record.exc_info[1], logger=record.name)
            return
        write = self._log.info if record.levelno < logging.WARNING else self._log.warning
        write(record.getMessage(), logger=record.name)


def take_over_libraries(log: Log) -> None:
    """Send the lines of uvicorn and of our own modules to the log; uvicorn's own line per request is dropped.

    Args:
        log: where they go.
    """
    handler = _Forward(log)
    for name, level in (("uvicorn.error", "INFO"), ("uvicorn.access", "CRITICAL"), ("specrag", "INFO")):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level)


class Span(Protocol):
    """The span of a request."""

    def end(self, route: str, status: int) -> None:
        """Record how the request was answered."""


class Tracing:
    """Tracing that is off: spans do nothing, and figures are dropped."""

    @contextmanager
    def request(self, scope: Scope) -> Iterator[Span]:  # noqa: ARG002 - as the other
        """A span around a request."""
        yield _NO_SPAN

    def figures(self, values: Mapping[str, Any]) -> None:
        """Add figures to the span of the request that is being answered."""

    def close(self) -> None:
        """Send the remaining spans."""


class _NoSpan:
    def end(self, route: str, status: int) -> None:
        """Drop it."""


_NO_SPAN = _NoSpan()


class OpenTelemetry(Tracing):
    """Tracing by OpenTelemetry's own package.

    Args:
        exporter: takes finished spans; by default the one for OTLP over HTTP.

    Raises:
        InputError: the package is not installed.
    """

    def __init__(self, exporter: Any = None) -> None:
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            if exporter is None:
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

                exporter = OTLPSpanExporter()
        except ModuleNotFoundError as error:
            raise InputError(
                "tracing", True, f"{error.name} is not installed; install specrag[tracing]"
            ) from None
        self._provider = TracerProvider(resource=Resource.create({"service.name": "specrag"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("specrag.serving")
        self._propagator = TraceContextTextMapPropagator()

    @contextmanager
    def request(self, scope: Scope) -> Iterator[Span]:
        """A span around a request; a child of the caller's span if the request names one."""
        from opentelemetry.trace import SpanKind

        parent = self._propagator.extract(dict(Headers(scope=scope)))
        with self._tracer.start_as_current_span(
            scope["method"], context=parent, kind=SpanKind.SERVER, record_exception=False
        ) as span:
            yield _OpenSpan(span, scope["method"])

    def figures(self, values: Mapping[str, Any]) -> None:
        """Add figures to the span of the request that is being answered."""
        from opentelemetry.trace import get_current_span

        get_current_span().set_attributes({f"specrag.{name}": value for name, value in values.items()})

    def close(self) -> None:
        """Send the remaining spans."""
        self._provider.shutdown()


class _OpenSpan:
    def __init__(self, span: Any, method: str) -> None:
        self._span = span
        self._method = method

    def end(self, route: str, status: int) -> None:
        """Name the span by its route, and record the status."""
        from opentelemetry.trace import Status, StatusCode

        self._span.update_name(f"{self._method} {route}")
        self._span.set_attributes(
            {"http.request.method": self._method, "http.route": route, "http.response.status_code": status}
        )
        if status >= 500:
            self._span.set_status(Status(StatusCode.ERROR))
