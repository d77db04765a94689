"""Clients of an OpenAI-compatible server, many at once, with nothing but the standard library."""

from __future__ import annotations

import hashlib
import http.client
import json
import threading
import time
from collections import deque
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
        sent: when the request was, by ``time.perf_counter``.
        first, total: seconds from then to the first text, and to the end.
        passes, drafted, accepted: where the server tells; else None.
        prompt_tokens: as the server counts them.
        cached_tokens: those of them that it had read before; 0 where it does not tell.
    """

    text: str
    tokens: int
    sent: float
    first: float
    total: float
    passes: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def until(self, moment: float) -> float:
        """Tokens that had come by then, if they came evenly."""
        begin, end = self.sent + self.first, self.sent + self.total
        if moment >= end:
            return self.tokens
        return self.tokens * max(moment - begin, 0.0) / (end - begin)


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
        started,
        total if first is None else first,
        total,
        ours.get("passes"),
        ours.get("drafted"),
        ours.get("accepted"),
        usage["prompt_tokens"],
        (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
    )


@dataclass(frozen=True, slots=True)
class Run:
    """What clients side by side have heard.

    Attributes:
        answers: by request.
        started, ended: from the start until a client finds no more requests, by ``time.perf_counter``.
    """

    answers: Sequence[Answered]
    started: float
    ended: float

    @property
    def tokens(self) -> int:
        """That had come until the end. Of an answer that comes later, taken to come evenly, a part is counted."""
        return round(sum(answer.until(self.ended) for answer in self.answers))


def run_clients(port: int, clients: int, requests: Sequence[Mapping[str, Any]]) -> Outcome:
    """What :func:`answers_of` gives as one outcome.

    Returns:
        Tokens, and the seconds in which they came: from the start until a client finds no more requests, since the
        last answers have the server with fewer and fewer clients. Output and times are those of all answers.
    """
    return outcome_of(answers_of(port, clients, requests))


def answers_of(port: int, clients: int, requests: Sequence[Mapping[str, Any]]) -> Run:
    """Run clients side by side; each takes the next request when it has its answer, the first ones at the same moment.

    Args:
        port: of the server.
        clients: their number.
        requests: at least as many.

    Raises:
        SpecragError: the server refused a request, or a stream ended early.
    """
    together = threading.Barrier(clients + 1)
    left = deque(enumerate(requests))
    answers: dict[int, Answered] = {}
    idle: list[float] = []

    def client() -> None:
        together.wait(_SECONDS)
        while True:
            try:
                number, body = left.popleft()
            except IndexError:
                idle.append(time.perf_counter())
                return
            answers[number] = ask(port, body)

    with ThreadPoolExecutor(clients) as pool:
        running = [pool.submit(client) for _ in range(clients)]
        together.wait(_SECONDS)
        started = time.perf_counter()
        for future in running:
            future.result()
    return Run([answers[number] for number in range(len(requests))], started, min(idle))


def answers_at(port: int, moments: Sequence[float], requests: Sequence[Mapping[str, Any]]) -> Run:
    """Send each request at its moment, whether earlier ones are answered or not.

    Args:
        port: of the server.
        moments: seconds from the start, ascending; one for each request.
        requests: as many.

    Raises:
        SpecragError: the server refused a request, or a stream ended early.
    """
    with ThreadPoolExecutor(len(requests)) as pool:
        started = time.perf_counter()
        running = []
        for moment, body in zip(moments, requests, strict=True):
            time.sleep(max(started + moment - time.perf_counter(), 0.0))
            running.append(pool.submit(ask, port, body))
        answers = [future.result() for future in running]
    return Run(answers, started, time.perf_counter())


def outcome_of(run: Run) -> Outcome:
    """The figures of a run."""
    answers, tokens = run.answers, run.tokens
    firsts = [1e3 * answer.first for answer in answers]
    texts = hashlib.sha256(json.dumps([answer.text for answer in answers]).encode()).hexdigest()
    passes = _sum([answer.passes for answer in answers])
    share = tokens / max(sum(answer.tokens for answer in answers), 1)
    return Outcome(
        tokens=tokens,
        seconds=run.ended - run.started,
        output=texts,
        passes=None if passes is None else round(passes * share),
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
