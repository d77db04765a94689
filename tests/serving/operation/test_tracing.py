"""OpenTelemetry spans: one a request, with route, status and figures, never a text."""

from __future__ import annotations

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("opentelemetry.sdk")

from fastapi.testclient import TestClient
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from specrag.serving.operation.frame import RequestFrame
from specrag.serving.operation.logs import OpenTelemetry
from specrag.serving.operation.metrics import FinishedGeneration
from tests.serving.ops_server import make_app


def test_a_request_is_a_span_below_the_caller_s() -> None:
    app = make_app(page=False)
    exporter = InMemorySpanExporter()
    operation = app.state.operation
    operation.tracing = tracing = OpenTelemetry(exporter)
    for middleware in app.user_middleware:
        if middleware.cls is RequestFrame:  # type: ignore[comparison-overlap]
            middleware.kwargs["tracing"] = tracing

    @app.post("/answer")
    async def answer(body: dict[str, str]) -> dict[str, str]:
        figures = FinishedGeneration("respec", "stop", 7, 5, 2, {"suffix": 4}, {"suffix": 3}, total=0.5)
        operation.observe(figures)
        return body

    caller = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    client = TestClient(app, base_url="http://localhost", raise_server_exceptions=False)
    asked = client.post("/answer", json={"prompt": "a private question"}, headers={"traceparent": caller})
    assert asked.status_code == 200
    client.get("/broken")
    tracing.close()
    first, second = exporter.get_finished_spans()
    assert first.name == "POST /answer"
    assert first.context.trace_id == int("0af7651916cd43dd8448eb211c80319c", 16)
    assert first.parent is not None
    attributes = dict(first.attributes or {})
    assert attributes["http.response.status_code"] == 200
    assert (attributes["specrag.method"], attributes["specrag.accepted"]) == ("respec", 3)
    assert "private" not in first.to_json()
    assert second.attributes is not None
    assert second.attributes["http.response.status_code"] == 500
    assert not second.status.is_ok
    assert "passwd" not in second.to_json()


def test_figures_of_an_answer_are_counted() -> None:
    app = make_app(page=False)
    operation = app.state.operation
    operation.observe(
        FinishedGeneration(
            "respec", "stop", 7, 6, 2, {"suffix": 4, "recycling": 4}, {"suffix": 3, "recycling": 1}, total=0.5,
            cached_tokens=2, queued=0.01, first_token=0.1,
        )
    )  # fmt: skip
    operation.observe(FinishedGeneration("a-method-of-the-request", "cancelled", 7, 0, 0, {}, {}, total=0.5))
    text = operation.metrics.text().decode()
    for line in (
        'specrag_tokens_total{source="suffix"} 3.0',
        'specrag_tokens_total{source="target"} 2.0',
        'specrag_drafted_tokens_total{source="recycling"} 4.0',
        'specrag_accepted_tokens_total{source="suffix"} 3.0',
        'specrag_mean_accepted_tokens_sum{method="respec"} 3.0',
        'specrag_acceptance_sum{method="respec"} 0.5',
        'specrag_time_to_first_token_seconds_sum{method="respec"} 0.1',
        'specrag_time_per_output_token_seconds_sum{method="respec"} 0.08',
        'specrag_generations_total{method="other",reason="cancelled"} 1.0',
        "specrag_prompt_tokens_total 14.0",
        "specrag_cached_prompt_tokens_total 2.0",
    ):
        assert line in text
    assert "a-method-of-the-request" not in text
