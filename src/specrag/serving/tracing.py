"""OpenTelemetry traces, for those who have installed ``specrag[tracing]`` and set ``tracing``.

Where traces go is told by OpenTelemetry's own variables, such as ``OTEL_EXPORTER_OTLP_ENDPOINT``. A span of a request
holds its route, status and figures, never its texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from starlette.datastructures import Headers
from starlette.types import Scope

from specrag.errors import InputError


class Span(Protocol):
    """What a request's span is told."""

    def end(self, route: str, status: int) -> None:
        """How the request was answered."""


class Tracing:
    """Traces of nothing; the figures of answers are dropped."""

    @contextmanager
    def request(self, scope: Scope) -> Iterator[Span]:  # noqa: ARG002 - as the other
        """A span around a request."""
        yield _NO_SPAN

    def figures(self, values: Mapping[str, Any]) -> None:
        """Add to the span of the request that is being answered."""

    def close(self) -> None:
        """Send what is left."""


class _NoSpan:
    def end(self, route: str, status: int) -> None:
        """Drop it."""


_NO_SPAN = _NoSpan()


class OpenTelemetry(Tracing):
    """Traces by OpenTelemetry's own package.

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
        """A span around a request, a child of the caller's if it says which."""
        from opentelemetry.trace import SpanKind

        parent = self._propagator.extract(dict(Headers(scope=scope)))
        with self._tracer.start_as_current_span(
            scope["method"], context=parent, kind=SpanKind.SERVER, record_exception=False
        ) as span:
            yield _OpenSpan(span, scope["method"])

    def figures(self, values: Mapping[str, Any]) -> None:
        """Add to the span of the request that is being answered."""
        from opentelemetry.trace import get_current_span

        get_current_span().set_attributes({f"specrag.{name}": value for name, value in values.items()})

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


class _OpenSpan:
    def __init__(self, span: Any, method: str) -> None:
        self._span = span
        self._method = method

    def end(self, route: str, status: int) -> None:
        """Name it by its route."""
        from opentelemetry.trace import Status, StatusCode

        self._span.update_name(f"{self._method} {route}")
        self._span.set_attributes(
            {"http.request.method": self._method, "http.route": route, "http.response.status_code": status}
        )
        if status >= 500:
            self._span.set_status(Status(StatusCode.ERROR))
