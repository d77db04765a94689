"""Clients of an OpenAI-compatible server, many at once, with nothing but the standard library."""

from __future__ import annotations

import hashlib
import http.client
import json
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from specrag.bench.records import Outcome
from specrag.errors import SpecragError

_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Answered:
    """One streamed answer.

    Attributes:
        text: of it.
        tokens: as the server counts them.
        first, total: seconds from sending the request to the first text, and to the end.
        passes, drafted, accepted: where the server tells; else None.
    """

    text: str
    tokens: int
    first: float
    total: float
    passes: int | None = None
    drafted: int | None = None
    accepted: int | None = None


def ask(port: int, body: Mapping[str, Any]) -> Answered:
    """Send one chat request and read its stream.

    Args:
        port: of a server on this machine.
        body: without the fields of streaming.

    Raises:
        SpecragError: the server refused, or the stream ended early.
    """
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_SECONDS)
    try:
        started = time.perf_counter()
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(streamed), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise SpecragError(f"server: status {response.status}: {response.read(300)!r}")
        first: float | None = None
        parts: list[str] = []
        usage: Mapping[str, Any] = {}
        ours: Mapping[str, Any] = {}
        while line := response.readline():
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise SpecragError(f"server: {chunk['error']}")
            for choice in chunk.get("choices", ()):
                if text := choice.get("delta", {}).get("content"):
                    first = first or time.perf_counter() - started
                    parts.append(text)
            usage = chunk.get("usage") or usage
            ours = (chunk.get("specrag") or {}).get("usage") or ours
        total = time.perf_counter() - started
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise SpecragError(f"server: the stream broke ({type(error).__name__}: {error})") from error
    finally:
        connection.close()
    if not usage:
        raise SpecragError("server: the stream ended without its usage")
    return Answered(
        "".join(parts),
        usage["completion_tokens"],
        total if first is None else first,
        total,
        ours.get("passes"),
        ours.get("drafted"),
        ours.get("accepted"),
    )


def run_clients(port: int, queues: Sequence[Sequence[Mapping[str, Any]]]) -> Outcome:
    """Run clients side by side; each sends its requests one after the other, the first ones at the same moment.

    Args:
        port: of the server.
        queues: the requests of each client.

    Returns:
        Tokens of all answers, seconds from the first request to the last token, and the times to the first token.
    """
    together = threading.Barrier(len(queues) + 1)

    def client(requests: Sequence[Mapping[str, Any]]) -> list[Answered]:
        together.wait(_SECONDS)
        return [ask(port, body) for body in requests]

    with ThreadPoolExecutor(len(queues)) as pool:
        running = [pool.submit(client, requests) for requests in queues]
        together.wait(_SECONDS)
        started = time.perf_counter()
        answers = [answer for future in running for answer in future.result()]
        seconds = time.perf_counter() - started
    firsts = [1e3 * answer.first for answer in answers]
    texts = hashlib.sha256(json.dumps([answer.text for answer in answers]).encode()).hexdigest()
    return Outcome(
        tokens=sum(answer.tokens for answer in answers),
        seconds=seconds,
        output=texts,
        passes=_sum([answer.passes for answer in answers]),
        drafted=_sum([answer.drafted for answer in answers]),
        accepted=_sum([answer.accepted for answer in answers]),
        figures={
            "first_token_ms": median(firsts),
            "first_token_p95_ms": float(np.percentile(firsts, 95)),
            "answer_ms": 1e3 * median(answer.total for answer in answers),
        },
    )


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
