"""vLLM without drafts, with its own and with ours, by the number of clients.

``SPECRAG_VLLM_PYTHON=build/vllm/bin/python SPECRAG_DATA=DIR python -m benchmarks.vllm OUT [--model NAME]``

The environment is that of ``make test-vllm``; its suffix method needs ``pip install arctic-inference==0.3.0`` there.
Every server is a process of its own with the same weights, and all but the one that is measured are stopped; each takes
about 4 GB, so that ``--methods`` may be needed. A round asks all servers the same prompts, in turns; no server sees a
prompt twice until all have come, since some remember answers. Each run is recorded in ``OUT/runs.jsonl`` as it comes,
so that a bench that was stopped goes on, with other methods too. With ``--rounds 0`` the records are only counted.

A cell of the table has tokens a second (median), their ratio to vLLM without drafts in the same rounds with its 95 %
interval, the same of the seconds of whole answers, question by question, the share of texts that are equal to its, and
the guesses accepted in a step of a row. With many clients the answers say more: where a round ends, a third of the
tokens are those of unfinished texts, which are taken to have come evenly.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import re
import sys
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.records import append_records, read_records
from benchmarks.server.clients import answers_of, outcome_of
from benchmarks.server.subjects import (
    VLLM,
    VLLM_CORPUS,
    VLLM_SPECRAG,
    VLLM_SUFFIX,
    VLLM_SUFFIX_EMPTY,
    VLLM_VARIABLE,
    ServerProcess,
    check_room,
    greeting,
    request,
    vllm_methods,
    vllm_server,
)
from benchmarks.vllm.prompts import TASKS, load_prompts, load_sources
from specrag.bench.data import data_folder
from specrag.bench.load import ProcessorLoad
from specrag.bench.statistics import PairedTimes, overall_speedup
from specrag.errors import InputError, SpecragError
from specrag.models.catalog import resolve
from specrag.models.tokenizer import Tokenizer
from specrag.speculation.suffix import build_corpus

#: With what they vary.
_VARIANTS = {VLLM_SUFFIX: VLLM_SUFFIX_EMPTY, VLLM_SPECRAG: VLLM_CORPUS}


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
        try:
            append_records(records, measure(given, setting, read_records(records)))
        except SpecragError as error:
            sys.exit(str(error))
    sys.stdout.write(table([record for record in read_records(records) if record["setting"] == setting]))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, help="folder with Spec-Bench, HotpotQA and HumanEval")
    parser.add_argument(
        "--methods", nargs="+", help="of those that the environment has; vllm is always among them"
    )
    parser.add_argument("--sources", type=int, default=20_000, help="Wikipedia passages of the corpus")
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
    methods = _methods(given.methods)
    folder = data_folder(given.data)
    if folder is None:
        raise InputError("--data", "", "give the folder with Spec-Bench, HotpotQA and HumanEval")
    done = {
        (one["task"], one["clients"], one["round"], one["method"])
        for one in known
        if one["setting"] == setting
    }
    prompts = load_prompts(folder, given.tasks)
    load = ProcessorLoad()
    with contextlib.ExitStack() as stack:
        servers: dict[str, ServerProcess] = {}
        for number, cell, asked in _rounds(given, prompts):
            turn = number % len(methods)
            for method in (*methods[turn:], *methods[:turn]):
                if (cell.task, cell.clients, number, method) in done:
                    continue
                if method not in servers:
                    servers[method] = stack.enter_context(_server(given, method, folder))
                check_room(len(servers))
                load.other_share()
                bodies = [request(method, prompt, given.new) for prompt in asked]
                with servers[method].awake(greeting(method)) as port:
                    before = _guesses(port)
                    run = answers_of(port, cell.clients, bodies)
                    guesses = {name: count - before[name] for name, count in _guesses(port).items()}
                outcome = outcome_of(run)
                yield {
                    "setting": setting,
                    "task": cell.task,
                    "clients": cell.clients,
                    "round": number,
                    "method": method,
                    "tokens": outcome.tokens,
                    "seconds": outcome.seconds,
                    "texts": [_short(answer.text) for answer in run.answers],
                    "written": sum(answer.tokens for answer in run.answers),
                    "totals": [round(answer.total, 4) for answer in run.answers],
                    **guesses,
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


def _methods(asked: Sequence[str] | None) -> list[str]:
    """What is measured, plain first.

    Raises:
        InputError: no environment with vLLM is named, or it has not what is asked for.
    """
    found: list[str] = []
    for method in vllm_methods():
        found += [method, _VARIANTS[method]] if method in _VARIANTS else [method]
    if not found:
        raise InputError(
            VLLM_VARIABLE, "", "name the Python of an environment with vLLM (make test-vllm makes one)"
        )
    for method in asked or ():
        if method not in found:
            raise InputError("--methods", method, f"give some of: {'; '.join(found)}")
    return [method for method in found if not asked or method == VLLM or method in asked]


def _server(given: argparse.Namespace, method: str, data: Path) -> ServerProcess:
    words = ["--enforce-eager"] if given.eager else []
    folder = resolve(given.model).folder
    environment = {"SPECRAG_CORPUS": str(_corpus(given, data))} if method == VLLM_CORPUS else {}
    return vllm_server(
        os.environ[VLLM_VARIABLE], folder, method, dtype=given.dtype, words=words, environment=environment
    )


def _corpus(given: argparse.Namespace, data: Path) -> Path:
    """Of the documents that passages are from; built once."""
    folder: Path = given.out / f"corpus-{given.model}-{given.sources}"
    if not folder.exists():
        tokenizer = Tokenizer(resolve(given.model))
        texts = (tokenizer.encode(text, special=False) for text in load_sources(data, given.sources))
        build_corpus(texts, folder, tokenizer=tokenizer.fingerprint)
    return folder


def _guesses(port: int) -> dict[str, int]:
    """Guesses that a server has verified and accepted so far, by its own metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as response:
        text = response.read().decode()
    counts = {}
    for name, metric in (("drafted", "draft"), ("accepted", "accepted")):
        values = re.findall(rf"(?m)^vllm:spec_decode_num_{metric}_tokens_total{{.*}} (\S+)$", text)
        counts[name] = int(sum(map(float, values)))
    return counts


def _short(text: str) -> str:
    """What tells a text from others."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def table(records: Iterable[Mapping[str, Any]]) -> str:
    """A line for each task and number of clients, a column for each method."""
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
    """Of the rounds that both have (:mod:`benchmarks.vllm`)."""
    both = sorted(plain.keys() & own.keys())
    if not both:
        return ""
    runs = [own[number] for number in both]
    speed = median(run["tokens"] / run["seconds"] for run in runs)
    times = [PairedTimes([_each(plain[number])], [_each(own[number])]) for number in both]
    ratio = overall_speedup(times)
    whole = _whole_answers([(plain[number], own[number]) for number in both])
    texts = [
        ours == theirs
        for number in both
        for ours, theirs in zip(own[number]["texts"], plain[number]["texts"], strict=True)
    ]
    accepted, written = sum(run["accepted"] for run in runs), sum(run["written"] for run in runs)
    return (
        f"{speed:.1f}/s, {ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}], {whole}"
        f"{sum(texts) / len(texts):.0%} equal, "
        f"{accepted / (written - accepted):.2f} accepted"
    )


def _whole_answers(rounds: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> str:
    """The ratio of the answers' seconds, of rounds that have recorded them."""
    pairs = [
        PairedTimes([theirs], [ours])
        for plain, own in rounds
        for theirs, ours in zip(plain.get("totals", ()), own.get("totals", ()), strict=False)
    ]
    if not pairs:
        return ""
    found = overall_speedup(pairs)
    return f"answers {found.value:.2f} [{found.low:.2f}, {found.high:.2f}] of {len(pairs)}, "


def _each(run: Mapping[str, Any]) -> float:
    """Seconds of a token."""
    return float(run["seconds"] / run["tokens"])


if __name__ == "__main__":
    main()
