"""All attacks at once beside a request with a deadline: it is kept, and nothing is a failure of the server.

How long each of them may stall the loop is measured one by one elsewhere in this folder.
"""

from __future__ import annotations

import json
import threading
import time

import pytest

pytest.importorskip("fastapi")

from tests.processor import slowness
from tests.serving.hostile.test_large_bodies import BODIES, HELLO, body, send
from tests.serving.hostile.test_schemas import DEAR, formed
from tests.serving.live_server import LiveServer

DEADLINE, LATE = 3.0, 0.5

ATTACKS = {
    **BODIES,
    "digits": ("completions", body(prompt=json.dumps("1" * 4_000_000))),
    "patterns": ("chat/completions", formed(json.dumps(DEAR))),
    "echo": (
        "completions",
        body(
            prompt=json.dumps([[1 + number % 40000 for number in range(600)]] * 8),
            max_tokens="0",
            echo="true",
            logprobs="20",
        ),
    ),
}


def test_a_deadline_is_kept_whatever_others_send(server: LiveServer) -> None:
    statuses: dict[str, int] = {}

    def attack(name: str) -> None:
        statuses[name] = send(server, *ATTACKS[name])[0]

    threads = [threading.Thread(target=attack, args=(name,)) for name in ATTACKS]
    for thread in threads:
        thread.start()
    limits = json.dumps({"deadline": DEADLINE})
    endless = body(messages=HELLO, max_tokens="4000", ignore_eos="true", specrag=limits)
    began = time.monotonic()
    status, _ = send(server, "chat/completions", endless)
    waited = time.monotonic() - began
    for thread in threads:
        thread.join(120)
    assert status == 504
    assert waited < DEADLINE + LATE * slowness()
    assert statuses.pop("echo") == 200
    assert set(statuses.values()) <= {400, 404, 413, 422, 429}, statuses
    server.wait_until_idle(60)
