"""What a gateway costs, and what further replicas behind it bring.

``python -m benchmarks.gateway.speed OUT [--part own-cost|replicas|pools ...]``; appends a line to OUT for each part.
Replicas are SmolLM2 in ``specrag serve``, each on a core of its own; the gateway and the clients share all cores.

- own cost: milliseconds until the first token of an upstream that answers at once, directly and through the gateway.
- replicas: tokens a second of plain chat by 16 clients, two replicas over one.
- reading: the same where each prompt is a page to summarise, so that most of the time is reading.
- pools: Speculative RAG with drafter and verifier on a core each, against both on one endpoint that has both cores.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gateway.servers import gateway
from benchmarks.server.clients import answers_of
from benchmarks.server.subjects import ServerProcess
from specrag.bench.load import ProcessorLoad
from specrag.bench.runner import code_version
from tests.sample import build_sample

MODEL = "smollm2-135m"
_PROMPT = "What is copper? " * 200  # about 600 tokens
_PAGE = 2500  # characters, about 600 tokens


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="A file of JSON lines.")
    parser.add_argument("--part", nargs="+", choices=list(_PARTS), default=list(_PARTS))
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    for part in given.part:
        load = ProcessorLoad()
        found = {"part": part, **_PARTS[part](given.rounds)}
        found |= {"other_cpu": load.other_share(), "version": code_version()}
        print(json.dumps(found))
        with given.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")


def _own_cost(rounds: int) -> dict[str, Any]:
    instant = ServerProcess([sys.executable, "-m", "benchmarks.gateway.instant", "{port}"])
    body = json.dumps(
        {"model": "instant", "stream": True, "messages": [{"role": "user", "content": _PROMPT}]}
    )
    with ExitStack() as stack:
        ports = {"direct": _entered(stack, instant)}
        ports["gateway"] = _entered(stack, _gateway(stack, {"instant": [ports["direct"]]}))
        connections = {name: http.client.HTTPConnection("127.0.0.1", port) for name, port in ports.items()}
        for connection in (*connections.values(),) * 20:
            _first_token(connection, body)
        times = [
            {name: _first_token(connection, body) for name, connection in connections.items()}
            for _ in range(100 * rounds)
        ]
    found = {f"{name}, ms": round(1e3 * median(time[name] for time in times), 2) for name in ports}
    return found | {
        "difference, ms": round(1e3 * median(time["gateway"] - time["direct"] for time in times), 2),
        "n": len(times),
    }


def _first_token(connection: http.client.HTTPConnection, body: str) -> float:
    started = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    while b"word" not in (line := response.readline()):
        assert line, response.status
    taken = time.perf_counter() - started
    response.read()
    return taken


def _replicas(rounds: int) -> dict[str, Any]:
    """Two at 16 clients have passes of half as many rows each: what half the clients get of one, twice, is the ceiling.

    With 32 clients over two each has as many as the one had.
    """
    bodies = [_chat(f"Tell me something about the number {number}.") for number in range(96)]
    with ExitStack() as stack:
        ports = [_entered(stack, _replica([core])) for core in _cores()[:2]]
        one, two = (_entered(stack, _gateway(stack, {MODEL: members})) for members in (ports[:1], ports))
        cells = {"one, 16": (one, 16), "one, 8": (one, 8), "two, 16": (two, 16), "two, 32": (two, 32)}
        found = _in_turns(cells, lambda name: bodies[: 3 * cells[name][1]], rounds)
    return {
        **found,
        "two over one": _over(found, "two, 16", "one, 16"),
        "its ceiling": _over(found, "one, 8", "one, 16", times=2),
        "two over one, as many clients each": _over(found, "two, 32", "one, 16"),
    }


def _reading(rounds: int) -> dict[str, Any]:
    """Nothing is kept of what was read, so that each round reads all of it."""
    pages = sorted(Path("docs").glob("*.md"))
    bodies = [
        _chat(f"Summarise this page in one sentence.\n\n{page.read_text(encoding='utf-8')[:_PAGE]}")
        for page in pages[:16]
    ]
    with ExitStack() as stack:
        ports = [_entered(stack, _replica([core], prefix_cache_bytes=0)) for core in _cores()[:2]]
        one, two = (_entered(stack, _gateway(stack, {MODEL: members})) for members in (ports[:1], ports))
        found = _in_turns({"one": (one, 16), "two": (two, 16)}, lambda _: bodies, rounds)
    return {**found, "two over one": _over(found, "two", "one")}


def _pools(rounds: int) -> dict[str, Any]:
    cores = _cores()[:2]
    with ExitStack() as stack:
        kb = build_sample(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "kb")
        apart = {
            name: [_entered(stack, _replica([core]))]
            for name, core in zip(("drafter", "verifier"), cores, strict=True)
        }
        together = {"both": [_entered(stack, _replica(cores))]}
        gateways = {
            "together": _entered(stack, _gateway(stack, together, kb)),
            "apart": _entered(stack, _gateway(stack, apart, kb)),
        }
        options = {"drafts": 3, "draft_tokens": 32}
        extension = {"kb": "wiki", "method": "speculative-rag", "k": 6, "options": options}
        asked = ("copper", "radium", "a mountain", "a river", "tin", "an opera", "a novel", "a comet")
        models = {"apart": "verifier", "together": "both"}

        def bodies(name: str) -> list[dict[str, Any]]:
            return [{**_chat(f"What is {what}?", models[name]), "specrag": extension} for what in asked]

        found = _in_turns({name: (port, 4) for name, port in gateways.items()}, bodies, rounds)
    return {**found, "apart over together": _over(found, "apart", "together")}


def _in_turns(
    cells: Mapping[str, tuple[int, int]],
    bodies: Callable[[str], Sequence[Mapping[str, Any]]],
    rounds: int,
) -> dict[str, Any]:
    """Tokens a second in turns; the first round is not counted.

    Args:
        cells: port of a server and number of clients, by name.
        bodies: what the clients of a cell ask; those of two cells begin alike.
        rounds: that count.
    """
    speeds: dict[str, list[float]] = {name: [] for name in cells}
    texts: dict[str, list[str]] = {}
    for number in range(rounds + 1):
        for name in list(cells)[:: 1 if number % 2 else -1]:
            port, clients = cells[name]
            run = answers_of(port, clients, bodies(name))
            texts[name] = [answer.text for answer in run.answers]
            if number:
                whole = max(answer.sent + answer.total for answer in run.answers) - run.started
                speeds[name].append(round(sum(answer.tokens for answer in run.answers) / whole, 1))
    same = [len(set(written)) == 1 for written in zip(*texts.values(), strict=False)]
    return {"tokens a second": speeds, "equal texts": f"{sum(same)} of {len(same)}"}


def _over(found: Mapping[str, Any], cell: str, other: str, times: int = 1) -> float:
    """The median speed of a cell, so many times, over another's."""
    speeds: Mapping[str, Sequence[float]] = found["tokens a second"]
    return round(times * median(speeds[cell]) / median(speeds[other]), 2)


def _chat(prompt: str, model: str = MODEL) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 32,
        "temperature": 0,
    }


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def _replica(cores: Sequence[int], *, prefix_cache_bytes: int | None = None) -> ServerProcess:
    words = ["taskset", "-c", ",".join(map(str, cores)), sys.executable, "-m", "specrag", "serve"]
    words += ["--model", MODEL, "--dtype", "int8", "--batch-invariant", "--max-concurrent", "16"]
    words += ["--port", "{port}", "--log-level", "error", "--page", "false"]
    if prefix_cache_bytes is not None:
        words += ["--prefix-cache-bytes", str(prefix_cache_bytes)]
    return ServerProcess(words, {"OMP_NUM_THREADS": str(len(cores))})


def _gateway(stack: ExitStack, pools: Mapping[str, Sequence[int]], kb: Path | None = None) -> ServerProcess:
    return gateway(Path(stack.enter_context(tempfile.TemporaryDirectory())), MODEL, pools, kb)


def _entered(stack: ExitStack, server: ServerProcess) -> int:
    stack.enter_context(server)
    return stack.enter_context(server.awake())


_PARTS: Mapping[str, Callable[[int], dict[str, Any]]] = {
    "own-cost": _own_cost,
    "replicas": _replicas,
    "reading": _reading,
    "pools": _pools,
}


if __name__ == "__main__":
    main()
