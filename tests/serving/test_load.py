"""Many mixed requests at once: each is answered as if it were alone. ``scripts/load_server.py`` does it for longer."""

from __future__ import annotations

import asyncio

from tests.serving.live_server import LiveServer
from tests.serving.load import alone, load, samples


def test_answers_under_load_are_those_given_alone(server: LiveServer) -> None:
    kinds = samples("wiki", tokens=8, datastore="village")
    expected = asyncio.run(alone(server.url, kinds))
    for number, sample in enumerate(kinds):
        given = expected[number]
        assert given.startswith("[") if sample.status == 200 else given == f"status {sample.status}"
    report = asyncio.run(load(server.url, kinds, expected, clients=12, requests=48))
    assert not report.differences
    assert not report.surprises
    assert sum(report.outcomes.values()) == 48
    assert report.outcomes["right"] >= 16
    assert report.outcomes["gone"] >= 1
    assert report.outcomes["refused"] >= 1
    server.wait_until_idle(10)
