"""Mixed load on a server: methods, lengths, streams, clients that go away, requests that are wrong.

Every answer that ends is compared with the one that the same request got alone.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

MODEL = "smollm2-135m"

_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_TOOL = {"type": "function", "function": {"name": "describe", "parameters": _SCHEMA}}


@dataclass(frozen=True, slots=True)
class Sample:
    """A request of the load.

    Attributes:
        path: of the route.
        body: without ``stream``.
        status: that it is answered with.
        streams: whether it may be asked for as a stream.
    """

    path: str
    body: Mapping[str, Any]
    status: int = 200
    streams: bool = True


@dataclass(slots=True)
class Report:
    """What became of a load.

    Attributes:
        outcomes: how many requests ended how.
        differences: answers that were not those given alone.
        surprises: answers that nobody expected, such as a 500.
        seconds: that it took.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)
    surprises: list[str] = field(default_factory=list)
    seconds: float = 0.0


def samples(kb: str | None, tokens: int = 16, datastore: str | None = None) -> list[Sample]:
    """The kinds of requests.

    Args:
        kb: a knowledge base of the server.
        tokens: of an answer; some are a quarter or four times as long.
        datastore: one of the server's, for kNN-LM.
    """

    def chat(question: str, **more: Any) -> Sample:
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": tokens, "temperature": 0}
        return Sample("/v1/chat/completions", {"model": MODEL, **body, **more})

    story = "Once upon a time a heron lived by a quiet lake. " * 12
    found = [
        chat("Name three uses of copper.", specrag={"method": "plain"}),
        chat("Name three uses of copper."),
        chat("Write a poem about rain.", temperature=1.0, seed=11, n=2),
        chat("Write a poem about rain.", temperature=0.8, top_p=0.9, seed=12, specrag={"method": "plain"}),
        chat(f"Repeat: {story}", max_tokens=4 * tokens, specrag={"method": "prompt-lookup"}),
        chat("What is rain?", max_tokens=max(tokens // 4, 1), logprobs=True, top_logprobs=2),
        chat(
            "Describe a person.",
            max_tokens=40,
            temperature=1.0,
            seed=5,
            response_format={"type": "json_schema", "json_schema": {"name": "p", "schema": _SCHEMA}},
        ),
        Sample(
            "/v1/completions",
            {
                "model": MODEL,
                "prompt": [story[:100], "Copper"],
                "max_tokens": tokens,
                "temperature": 0.7,
                "seed": 3,
            },
        ),
        chat(
            "Write a poem about rain.",
            presence_penalty=0.5,
            frequency_penalty=0.5,
            logit_bias={"260": -5},
            stop=["\n\n"],
        ),
        chat("Describe a person.", max_tokens=60, tools=[_TOOL], tool_choice="required"),
        chat(f"{story}\n\nWhere did the heron live?", specrag={"method": "rapid"}),
        Sample("/v1/embeddings", {"model": MODEL, "input": ["copper", story]}, streams=False),
        Sample("/v1/chat/completions", {"model": MODEL, "messages": []}, 400),
        Sample(
            "/v1/chat/completions", {"model": "another", "messages": [{"role": "user", "content": "?"}]}, 404
        ),
        chat("?", temperature="hot"),
    ]
    found[-1] = Sample(found[-1].path, found[-1].body, 400)
    if kb is not None:
        found += [
            chat("Who discovered radium?", specrag={"kb": kb, "k": 1}),
            chat(
                "Who discovered radium?", specrag={"kb": kb, "method": "ralmspec", "options": {"stride": 2}}
            ),
            chat(
                "Who discovered radium?",
                specrag={"kb": kb, "method": "speculative-rag", "options": {"drafts": 2}},
            ),
        ]
    if datastore is not None:
        options = {"datastore": datastore, "k": 8}
        found += [
            chat("Tell a story.", specrag={"method": "knn-lm", "options": {**options, "stride": stride}})
            for stride in ("cost-aware", 4)
        ]
    return found


async def answer(client: httpx.AsyncClient, sample: Sample) -> str:
    """What a request is answered, without what differs from time to time."""
    response = await client.post(sample.path, json=dict(sample.body))
    if response.status_code != 200:
        return f"status {response.status_code}"
    body = response.json()
    return json.dumps(body["data"]) if body.get("object") == "list" else _choices([body])


async def streamed(client: httpx.AsyncClient, sample: Sample, chunks: int | None = None) -> str | None:
    """The same as a stream; ``None`` if the client goes away after so many chunks."""
    found: list[dict[str, Any]] = []
    async with client.stream("POST", sample.path, json={**sample.body, "stream": True}) as response:
        if response.status_code != 200:
            return f"status {response.status_code}"
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return _choices(found)
            if line:
                found.append(json.loads(line.removeprefix("data: ")))
                if chunks is not None and len(found) >= chunks:
                    return None
    return "cut off"


def _choices(parts: Sequence[Mapping[str, Any]]) -> str:
    """Texts, calls of tools and reasons of all choices, whole or joined from chunks."""
    texts: dict[int, str] = {}
    calls: dict[int, list[Any]] = {}
    reasons: dict[int, str] = {}
    for part in parts:
        if "error" in part:
            return f"error {part['error']['code']}"
        for choice in part["choices"]:
            said = choice.get("message") or choice.get("delta") or choice
            piece = said.get("content") or said.get("text") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + piece
            calls.setdefault(choice["index"], []).extend(
                call["function"] for call in said.get("tool_calls") or []
            )
            if choice["finish_reason"]:
                reasons[choice["index"]] = choice["finish_reason"]
    # An answer from passages ends without the line end that its stream may have shown.
    return json.dumps([[texts[index].strip(), calls[index], reasons.get(index)] for index in sorted(texts)])


def _headers(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


async def alone(url: str, kinds: Sequence[Sample], key: str | None = None) -> dict[int, str]:
    """What each kind is answered while nothing else runs."""
    async with httpx.AsyncClient(base_url=url, timeout=300, headers=_headers(key)) as client:
        return {number: await answer(client, sample) for number, sample in enumerate(kinds)}


async def load(
    url: str,
    kinds: Sequence[Sample],
    expected: Mapping[int, str],
    *,
    clients: int,
    requests: int | None = None,
    seconds: float | None = None,
    seed: int = 0,
    key: str | None = None,
) -> Report:
    """Ask, with so many clients at the same time, so many requests or for so long, with an API key or none."""
    report = Report()
    began = time.monotonic()
    left = requests

    async def one(client: httpx.AsyncClient, draws: random.Random) -> None:
        number = draws.randrange(len(kinds))
        sample = kinds[number]
        way = draws.random()
        given: str | None
        try:
            if not sample.streams:
                given = await answer(client, sample)
            elif way < 0.15:
                given = await streamed(client, sample, chunks=draws.randrange(1, 6))
            elif way < 0.55:
                given = await streamed(client, sample)
            else:
                given = await answer(client, sample)
        except httpx.HTTPError as error:
            report.surprises.append(f"{sample.path}: {error!r}")
            return
        wanted = expected[number]
        if given is None:
            report.outcomes["gone"] += 1
        elif given == "status 429":
            report.outcomes["queue full"] += 1
        elif given == wanted:
            report.outcomes["right" if sample.status == 200 else "refused"] += 1
        elif given.startswith(("status", "error", "cut off")):
            report.surprises.append(f"{sample.path}: {given}, {sample.body}")
        else:
            report.differences.append(f"{sample.body}: {given} is not {wanted}")

    async def ask(index: int) -> None:
        nonlocal left
        draws = random.Random(f"{seed}/{index}")
        # Its own connections: who goes away closes one.
        async with httpx.AsyncClient(base_url=url, timeout=300, headers=_headers(key)) as client:
            while (left is None or left > 0) and (seconds is None or time.monotonic() - began < seconds):
                if left is not None:
                    left -= 1
                await one(client, draws)

    await asyncio.gather(*(ask(index) for index in range(clients)))
    report.seconds = time.monotonic() - began
    return report
