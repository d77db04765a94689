"""Who gets an answer: keys, hosts, other sites' pages; what every answer carries; how long a body may be."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")

from fastapi import FastAPI
from fastapi.testclient import TestClient

from specrag.serving.operation.logs import Log
from tests.serving.ops_server import MASTER, READER, bearer, make_app

HOST = "127.0.0.1:8000"


def client(app: FastAPI) -> TestClient:
    return TestClient(app, base_url=f"http://{HOST}", raise_server_exceptions=False)


@pytest.fixture(scope="module")
def keyed() -> TestClient:
    keys = [{"name": "alice", "key": READER, "kbs": ["*"]}, {"name": "master", "key": MASTER}]
    return client(make_app(keys=keys, max_body_bytes=1000, page=False))


@pytest.fixture(scope="module")
def keyless() -> TestClient:
    return client(make_app(max_body_bytes=1000, cors_origins=["https://app.example.org"]))


def test_every_route_but_health_and_page_asks_for_a_key(keyed: TestClient) -> None:
    assert keyed.get("/healthz").json() == {"status": "ok"}
    assert keyed.get("/readyz").json() == {"status": "not ready"}
    told = keyed.get("/readyz", headers=bearer(READER))
    assert (told.status_code, told.json()["reasons"]) == (503, {"model": "loading"})
    for path in (
        "/v1/kb",
        "/v1/kb/x",
        "/metrics",
        "/openapi.json",
        "/nothing",
        "/v1/models",
        "/healthz/",
        "/page",
    ):
        answer = keyed.get(path)
        assert answer.status_code == 401, path
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
    assert keyed.get("/v1/kb", headers=bearer(READER)).status_code == 200
    assert keyed.get("/v1/kb", headers=bearer("wrong-key-0123456789")).status_code == 401


def test_errors_have_openai_s_form_and_no_trace(keyed: TestClient) -> None:
    broken = keyed.get("/broken", headers=bearer(READER))
    assert broken.status_code == 500
    assert set(broken.json()["error"]) == {"message", "type", "param", "code"}
    assert "passwd" not in broken.text
    assert "Traceback" not in broken.text
    missing = keyed.get("/nothing", headers=bearer(READER))
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
    wrong = keyed.put("/json", headers=bearer(READER))
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    bad = keyed.post("/json", headers=bearer(READER), json=[1])
    assert (bad.status_code, bad.json()["error"]["code"]) == (400, "invalid_value")


def test_every_answer_has_an_id_and_the_headers(keyed: TestClient) -> None:
    for path in ("/healthz", "/broken", "/nothing", "/v1/kb"):
        headers = keyed.get(path).headers
        assert len(headers["x-request-id"]) == 32
        assert "default-src 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert headers["cache-control"] == "no-store"
        assert "access-control-allow-origin" not in headers
    assert keyed.get("/healthz", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    forged = keyed.get("/healthz", headers={"X-Request-Id": "a b;c"}).headers["x-request-id"]
    assert len(forged) == 32


def test_a_page_of_another_site_is_refused(keyless: TestClient) -> None:
    for headers in (
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:9999"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ):
        answer = keyless.post("/v1/kb", headers=headers, json={"name": "kb"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "cross_site"), headers
    own = keyless.post(
        "/json", headers={"Origin": f"http://{HOST}", "Sec-Fetch-Site": "same-origin"}, json={}
    )
    assert own.status_code == 200
    assert keyless.post("/json", json={}).status_code == 200  # no browser


def test_a_name_that_points_here_is_not_ours(keyless: TestClient, keyed: TestClient) -> None:
    for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "localhost.", "[::1"):
        answer = keyless.get("/v1/kb", headers={"Host": host})
        assert (answer.status_code, answer.json()["error"]["code"]) == (421, "unknown_host"), host
    for host in ("localhost", "LOCALHOST:1", "[::1]:8000", "127.0.0.1"):
        assert keyless.get("/v1/kb", headers={"Host": host}).status_code == 200, host
    # With keys a browser elsewhere has nothing to send; a proxy may call us what it likes.
    assert keyed.get("/v1/kb", headers={"Host": "ai.example.org", **bearer(READER)}).status_code == 200


def test_cors_is_for_the_listed_origins(keyless: TestClient) -> None:
    ours, other = "https://app.example.org", "https://evil.example"
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    allowed = keyless.options("/v1/kb", headers={"Origin": ours, **asked})
    assert allowed.headers["access-control-allow-origin"] == ours
    assert (
        "access-control-allow-origin"
        not in keyless.options("/v1/kb", headers={"Origin": other, **asked}).headers
    )
    assert keyless.post("/json", headers={"Origin": ours}, json={}).status_code == 200
    assert "access-control-allow-origin" not in keyless.get("/v1/kb", headers={"Origin": other}).headers


def test_bodies_are_counted_whether_or_not_they_say_their_length(keyed: TestClient) -> None:
    def chunks(number: int) -> Iterator[bytes]:
        for _ in range(number):
            yield b"x" * 100

    headers = bearer(READER)
    assert keyed.post("/echo", headers=headers, content=b"x" * 1000).json() == {"bytes": 1000}
    assert keyed.post("/echo", headers=headers, content=chunks(10)).json() == {"bytes": 1000}
    for content in (b"x" * 1001, chunks(11)):
        answer = keyed.post("/echo", headers=headers, content=content)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
    answer = keyed.post("/json", headers=headers, content=chunks(11))
    assert answer.status_code == 413  # also where FastAPI reads the body
    for length in ("-1", "1e3", "9" * 30, "0x10", " "):
        answer = keyed.post("/echo", headers={**headers, "Content-Length": length}, content=b"")
        assert answer.status_code in {200, 413}, length


def lines_of(log: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.getvalue().splitlines()]


@pytest.mark.parametrize("texts", [False, True])
def test_the_log_has_texts_only_where_asked(texts: bool) -> None:
    app = make_app(log_prompts=texts, page=False)
    stream = io.StringIO()
    log = Log(app.state.service.settings, stream)
    log.info("answer", prompt="my private question", messages=[{"content": "private too"}], tokens=7)
    (line,) = lines_of(stream)
    assert line["tokens"] == 7
    assert ("private" in stream.getvalue()) is texts
    log.info("odd", name="a\nb \ud800 \x1b[31m" + "x" * 10_000)
    assert len(stream.getvalue().splitlines()) == 2
    assert len(lines_of(stream)[1]["name"]) < 2100


def test_a_request_is_one_line_with_its_route_and_key_and_never_its_query(
    capsys: pytest.CaptureFixture[str],
) -> None:
    served = client(make_app(keys=[{"name": "alice", "key": READER}], page=False))
    answer = served.get("/v1/kb/some-name?secret=1", headers=bearer(READER))
    served.get("/broken", headers=bearer(READER))
    log = capsys.readouterr().err
    first, *rest = lines_of(io.StringIO(log))
    assert (first["event"], first["route"]) == ("request", "/v1/kb/{name}")
    assert (first["status"], first["key"], first["method"]) == (404, "alice", "GET")
    assert first["request_id"] == answer.headers["x-request-id"]
    assert READER not in log
    assert "secret=1" not in log
    trace = next(line for line in rest if line["event"] == "request failed")
    assert "RuntimeError" in json.dumps(trace)  # the log has what the answer has not


def test_metrics_have_no_names_of_requests(keyed: TestClient) -> None:
    headers = bearer(READER)
    for number in range(3):
        keyed.get(f"/v1/kb/name-{number}", headers=headers)
        keyed.get(f"/nothing-{number}", headers=headers)
        keyed.request("BREW", "/nothing", headers=headers)
    text = keyed.get("/metrics", headers=headers).text
    assert 'specrag_requests_total{method="GET",route="/v1/kb/{name}",status="404"} 3.0' in text
    assert 'method="other"' in text
    assert "name-1" not in text
    assert "BREW" not in text
    keyed.get("/metrics")
    assert 'specrag_rejected_requests_total{reason="key"}' in keyed.get("/metrics", headers=headers).text
    for name in (
        "queue_length",
        "running_texts",
        "batch_size_count",
        "kv_budget_bytes",
        "resident_bytes",
        "index_jobs_pending",
    ):
        assert f"\nspecrag_{name} " in text
