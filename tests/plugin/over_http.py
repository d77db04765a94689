"""Asks a server for a method that another package brings; run in a process that finds that package."""

from __future__ import annotations

import httpx

from tests.plugin.test_third_party import NAME
from tests.serving.live_server import running_server


def main() -> None:
    """List it, look it up in the API's description, let it answer, and find it among the metrics."""
    with (
        running_server(model="smollm2-135m") as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        (listed,) = (one for one in client.get("/v1/specrag/methods").json() if one["name"] == NAME)
        assert listed["options"]["most"]["max"] == 32
        described = client.get("/openapi.json").text
        assert NAME in described
        body = {
            "model": "smollm2-135m",
            "prompt": "red green blue, red green blue, red green",
            "max_tokens": 12,
            "temperature": 0,
            "specrag": {"method": NAME, "options": {"most": 4}},
        }
        answer = client.post("/v1/completions", json=body)
        answer.raise_for_status()
        told = answer.json()["specrag"]
        assert told["method"] == NAME
        assert "first-word" in told["usage"]["accepted_by"]
        body["specrag"] = {"method": NAME, "options": {"most": 99}}
        refused = client.post("/v1/completions", json=body)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "specrag.options.most"
        assert f'method="{NAME}"' in client.get("/metrics").text
    print("listed, described, answered, counted")


if __name__ == "__main__":
    main()
