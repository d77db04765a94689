"""vLLM without drafts, with its own and with ours, by the number of clients.

``SPECRAG_VLLM_PYTHON=build/vllm/bin/python python -m benchmarks.vllm OUT [--data FILE] [--model NAME]``

Every server is a process of its own with the same weights, and all but the one that is measured are stopped. A round
asks all servers the same prompts, in turns; no server sees a prompt twice, since some remember answers. Each run is
recorded in ``OUT/runs.jsonl`` as it comes, so that a bench that was stopped goes on. With ``--rounds 0`` the records
are only counted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.server.clients import run_clients
from benchmarks.server.subjects import VLLM, VLLM_VARIABLE, ServerProcess, request, vllm_methods, vllm_server
from specrag.bench.data import load_spec_bench
from specrag.bench.load import ProcessorLoad
from specrag.errors import InputError
from specrag.models.catalog import resolve

TASKS = ("rag", "summarization", "multi-turn")
_MOST_CHARACTERS = 8000  # of a prompt
_WARMING = "Say hello."


@dataclass(frozen=True, slots=True)
class Cell:
    """What is measured side by side: a task, and how many clients ask at once."""

    task: str
    clients: int


def main() -> None:
    """Measure what has no record yet, then print the table."""
    given = _arguments()
    given.out.mkdir(parents=True, exist_ok=True)
    records = given.out / "runs.jsonl"
    setting = {"model": given.model, "dtype": given.dtype, "new": given.new, "each": given.each}
    if given.rounds:
        with records.open("a", encoding="utf-8") as file:
            for record in measure(given, setting, _read(records)):
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
                file.flush()
    sys.stdout.write(table([record for record in _read(records) if record["setting"] == setting]))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, help="Spec-Bench's questions, as JSON lines")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--each", type=int, default=2, help="prompts of each client in a round")
    parser.add_argument("--new", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--eager", action="store_true", help="start without compiling the model")
    return parser.parse_args()


def measure(
    given: argparse.Namespace, setting: Mapping[str, Any], known: Sequence[Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Run what has no record.

    Raises:
        InputError: no environment with vLLM is named, or no data.
    """
    methods = vllm_methods()
    if not methods:
        raise InputError(
            VLLM_VARIABLE, "", "name the Python of an environment with vLLM (make test-vllm makes one)"
        )
    if given.data is None:
        raise InputError("--data", "", "give Spec-Bench's questions")
    done = {
        (one["task"], one["clients"], one["round"], one["method"])
        for one in known
        if one["setting"] == setting
    }
    prompts = _prompts(given.data)
    load = ProcessorLoad()
    with contextlib.ExitStack() as stack:
        servers: dict[str, ServerProcess] = {}
        for number, cell, asked in _rounds(given, prompts):
            turn = number % len(methods)
            for method in (*methods[turn:], *methods[:turn]):
                if (cell.task, cell.clients, number, method) in done:
                    continue
                if method not in servers:
                    servers[method] = stack.enter_context(_server(given, method))
                    with servers[method].awake() as port:
                        run_clients(port, 1, [request(method, _WARMING, given.new)])
                load.other_share()
                bodies = [request(method, prompt, given.new) for prompt in asked]
                with servers[method].awake() as port:
                    outcome = run_clients(port, cell.clients, bodies)
                yield {
                    "setting": setting,
                    "task": cell.task,
                    "clients": cell.clients,
                    "round": number,
                    "method": method,
                    "tokens": outcome.tokens,
                    "seconds": outcome.seconds,
                    "output": outcome.output,
                    "other_cpu": load.other_share(),
                    **outcome.figures,
                }


def _rounds(
    given: argparse.Namespace, prompts: Mapping[str, Sequence[str]]
) -> Iterator[tuple[int, Cell, list[str]]]:
    """All rounds of all cells; no prompt comes twice until all of its task have come."""
    places = dict.fromkeys(prompts, 0)
    for number in range(given.rounds):
        for task in given.tasks:
            for clients in given.clients:
                start, count = places[task], clients * given.each
                places[task] += count
                mine = prompts[task]
                yield number, Cell(task, clients), [mine[(start + i) % len(mine)] for i in range(count)]


def _prompts(path: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {task: [] for task in TASKS}
    for question in load_spec_bench(path):
        if question.task in found and len(question.turns[0]) <= _MOST_CHARACTERS:
            found[question.task].append(question.turns[0])
    return found


def _server(given: argparse.Namespace, method: str) -> ServerProcess:
    words = ["--enforce-eager"] if given.eager else []
    folder = resolve(given.model).folder
    return vllm_server(os.environ[VLLM_VARIABLE], folder, method, dtype=given.dtype, words=words)


def table(records: Iterable[Mapping[str, Any]]) -> str:
    """A line for each task and number of clients: tokens a second, and the ratio to vLLM without drafts."""
    found: dict[Cell, dict[str, dict[int, Mapping[str, Any]]]] = {}
    for one in records:
        runs = found.setdefault(Cell(one["task"], one["clients"]), {})
        runs.setdefault(one["method"], {})[one["round"]] = one
    methods = list(dict.fromkeys(method for runs in found.values() for method in runs))
    heads = ["task", "clients", "n", *methods]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for cell, by in found.items():
        plain = by.get(VLLM, {})
        cells = [
            cell.task,
            str(cell.clients),
            str(len(plain)),
            *(_cell(plain, by.get(one, {})) for one in methods),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(plain: Mapping[int, Mapping[str, Any]], own: Mapping[int, Mapping[str, Any]]) -> str:
    """Median tokens a second, the median ratio to the same rounds without drafts, and how many texts are equal."""
    both = sorted(plain.keys() & own.keys())
    if not both:
        return ""
    speeds = {number: own[number]["tokens"] / own[number]["seconds"] for number in both}
    ratios = [speeds[number] * plain[number]["seconds"] / plain[number]["tokens"] for number in both]
    equal = sum(own[number]["output"] == plain[number]["output"] for number in both)
    return f"{median(speeds.values()):.0f}/s, {median(ratios):.2f} ({equal} equal)"


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


if __name__ == "__main__":
    main()
