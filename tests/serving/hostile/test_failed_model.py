"""A model that cannot be loaded: what the server tells of it before it ends."""

from __future__ import annotations

import pytest

pytest.importorskip("fastapi")

from fastapi.testclient import TestClient

from specrag.errors import InputError
from specrag.serving.errors import ApiError
from tests.serving.ops_server import READER, bearer, make_app


def test_no_path_is_told() -> None:
    app = make_app(keys=[{"name": "reader", "key": READER}], page=False)
    service = app.state.service
    service.state, service.failure = "failed", InputError("model", "/secret/place", "fetch it again")
    asking = TestClient(app, base_url="http://localhost")
    answer = asking.get("/readyz")
    assert (answer.status_code, answer.json()) == (503, {"status": "not ready"})
    answer = asking.get("/readyz", headers=bearer(READER))
    assert answer.json()["reasons"] == {"model": "failed"}
    with pytest.raises(ApiError) as caught:
        service.llm  # noqa: B018 - raises
    assert caught.value.code == "failed"
    assert "/secret" not in str(caught.value.detail)
