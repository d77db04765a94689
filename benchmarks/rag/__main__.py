"""Answers from five passages over HTTP: specrag, and what its users could take instead, by draw and number of clients.

``SPECRAG_VLLM_PYTHON=build/vllm/bin/python python -m benchmarks.rag OUT --data FOLDER [--model NAME]``

All servers get the same prompts, in the order of the passages' scores, and may keep what they have read. With
``--methods "knowledge base" "knowledge base, blocks"`` ours finds the passages itself and has read each when it was
indexed; ``--openvino PYTHON FOLDER`` and ``--llama FOLDER GGUF`` add those engines, for one client. ``--alone`` asks
Spec-Bench's first turns, without passages. With ``--rate R`` questions come at random, R a second on average, however
fast they are answered. Every server is a process of its own, and all but the one that is measured are stopped; it
answers one short question more before the clock starts. Each answer is recorded in ``OUT/answers.jsonl`` as a round
ends, so that a bench that was stopped goes on with the next round; what servers had read before is then read anew. With
``--rounds 0`` the records are only counted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.rag.questions import GREETING, Draw, RagQuestion, drawn, load, load_alone
from benchmarks.rag.subjects import OURS, Subjects
from benchmarks.records import read_records
from benchmarks.server.clients import Answered, Run, answers_at, answers_of
from benchmarks.server.subjects import VLLM, VLLM_SUFFIX, ServerProcess, check_room
from specrag.bench.load import ProcessorLoad
from specrag.bench.metrics import contains_answer
from specrag.bench.statistics import PairedTimes, overall_speedup
from specrag.errors import SpecragError


@dataclass(frozen=True, slots=True)
class Cell:
    """What is measured side by side.

    Attributes:
        draw: of the questions.
        clients: that ask at once.
        rate: questions a second that come at random in place of clients; 0 for clients.
    """

    draw: Draw
    clients: int
    rate: float = 0.0

    def questions(self, each: int) -> int:
        """In a round, where each client asks so many."""
        return each if self.rate else each * self.clients

    def run(self, port: int, number: int, bodies: Sequence[Mapping[str, Any]]) -> Run:
        """Ask a round's questions."""
        if not self.rate:
            return answers_of(port, self.clients, bodies)
        gaps = np.random.default_rng(number).exponential(1 / self.rate, len(bodies))
        return answers_at(port, list(accumulate(gaps.tolist())), bodies)


def main() -> None:
    """Measure the rounds that have no record yet, then print the table."""
    given = _arguments()
    given.out.mkdir(parents=True, exist_ok=True)
    records = given.out / "answers.jsonl"
    setting = {"model": given.model, "new": given.new, "each": given.each}
    if given.alone:
        setting["alone"] = True
    if given.rounds:
        try:
            with records.open("a", encoding="utf-8") as file:
                for answers in measure(given, setting, read_records(records)):
                    file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in answers)
                    file.flush()
        except SpecragError as error:
            sys.exit(str(error))
    mine = [record for record in read_records(records) if record["setting"] == setting]
    sys.stdout.write(table(mine, beside=given.beside))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, help="folder with the passages and the questions")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--draws", nargs="+", default=["uniform", "zipf"], choices=("uniform", "zipf"))
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--rate", type=float, default=0.0, help="questions a second, in place of clients")
    parser.add_argument("--methods", nargs="+", default=[*OURS, VLLM, VLLM_SUFFIX])
    parser.add_argument(
        "--beside", default=VLLM, metavar="METHOD", help="whose times the table compares with"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--each", type=int, default=4, help="prompts of each client in a round")
    parser.add_argument("--new", type=int, default=64, help="most tokens of an answer")
    parser.add_argument("--alone", action="store_true", help="Spec-Bench's first turns, without passages")
    parser.add_argument("--openvino", nargs=2, metavar=("PYTHON", "FOLDER"))
    parser.add_argument("--llama", nargs=2, metavar=("FOLDER", "GGUF"))
    return parser.parse_args()


def measure(
    given: argparse.Namespace, setting: Mapping[str, Any], known: Sequence[Mapping[str, Any]]
) -> Iterator[list[dict[str, Any]]]:
    """The records of each round that has none, a method after the other."""
    done = {(_cell(one), one["round"], one["method"]) for one in known if one["setting"] == setting}
    subjects = Subjects(given.model, given.out, given.openvino, given.llama)
    available = subjects.available()
    methods = [one for one in given.methods if one in available]
    load_of_others = ProcessorLoad()
    planned = list(rounds(given, (load_alone if given.alone else load)(given.data)))
    everything = [question for _, _, asked in planned for question in asked]
    with contextlib.ExitStack() as stack:
        servers: dict[str, ServerProcess] = {}
        for number, cell, asked in planned:
            turn = number % len(methods)
            for method in (*methods[turn:], *methods[:turn]):
                if (cell, number, method) in done:
                    continue
                if method not in servers:
                    servers[method] = stack.enter_context(subjects.server(method, everything))
                check_room(len(servers))
                load_of_others.other_share()
                bodies = [subjects.body(method, question, given.new) for question in asked]
                with servers[method].awake(subjects.body(method, GREETING, new=16)) as port:
                    run = cell.run(port, number, bodies)
                told = {
                    "setting": setting,
                    "draw": cell.draw,
                    "clients": cell.clients,
                    "rate": cell.rate,
                    "round": number,
                    "method": method,
                    "tokens_per_second": run.tokens / (run.ended - run.started),
                    "other_cpu": load_of_others.other_share(),
                }
                yield [
                    {**told, **_record(place, question, answer)}
                    for place, (question, answer) in enumerate(zip(asked, run.answers, strict=True))
                ]


def _cell(record: Mapping[str, Any]) -> Cell:
    return Cell(record["draw"], record["clients"], record.get("rate", 0.0))


def rounds(
    given: argparse.Namespace, questions: Sequence[RagQuestion]
) -> Iterator[tuple[int, Cell, list[RagQuestion]]]:
    """All rounds of all cells; a draw goes on over them, so that what is asked again may have been read."""
    streams = {draw: drawn(list(questions), draw) for draw in given.draws}
    for number in range(given.rounds):
        for draw in given.draws:
            for cell in (
                [Cell(draw, 0, given.rate)] if given.rate else map(partial(Cell, draw), given.clients)
            ):
                yield number, cell, list(islice(streams[draw], cell.questions(given.each)))


def _record(place: int, question: RagQuestion, answer: Answered) -> dict[str, Any]:
    return {
        "place": place,
        "id": question.identifier,
        "first": answer.first,
        "total": answer.total,
        "tokens": answer.tokens,
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": answer.cached_tokens,
        "text": answer.text,
        "right": bool(question.answers) and contains_answer(answer.text, question.answers),
    }


def table(records: Iterable[Mapping[str, Any]], beside: str = VLLM) -> str:
    """A line for each draw, number of clients and method.

    Args:
        beside: the method with whose times the others are compared, question by question.
    """
    cells: dict[Cell, dict[str, dict[tuple[int, int], Mapping[str, Any]]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for one in records:
        cells[_cell(one)][one["method"]][one["round"], one["place"]] = one
    heads = ["draw", "clients", "method", "n", "first, median / p95, s", "whole, median / p95, s"]
    heads += [f"of {beside}'s time", "tokens/s", "prompt known", "right"]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for cell, methods in cells.items():
        for method, found in methods.items():
            compared = _ratio(found, methods.get(beside, {}))
            asked = f"{cell.rate:g} a second" if cell.rate else str(cell.clients)
            row = [cell.draw, asked, method, *_times(found), compared, *_shares(found)]
            lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def _times(found: Mapping[tuple[int, int], Mapping[str, Any]]) -> list[str]:
    rows = list(found.values())
    return [
        str(len(rows)),
        _spread([one["first"] for one in rows]),
        _spread([one["total"] for one in rows]),
    ]


def _shares(found: Mapping[tuple[int, int], Mapping[str, Any]]) -> list[str]:
    rows = list(found.values())
    read = sum(one["prompt_tokens"] for one in rows)
    rates = {number: one["tokens_per_second"] for (number, _), one in found.items()}
    return [
        f"{median(rates.values()):.1f}",
        f"{sum(one['cached_tokens'] for one in rows) / max(read, 1):.0%}",
        f"{sum(one['right'] for one in rows) / len(rows):.0%}",
    ]


def _spread(seconds: Sequence[float]) -> str:
    return f"{median(seconds):.2f} / {np.percentile(seconds, 95):.2f}"


def _ratio(own: Mapping[Any, Mapping[str, Any]], theirs: Mapping[Any, Mapping[str, Any]]) -> str:
    """The time of whole answers beside theirs to the same questions, with its 95 % interval."""
    both = sorted(own.keys() & theirs.keys())
    if len(both) < 2 or own is theirs:
        return ""
    pairs = [PairedTimes((theirs[key]["total"],), (own[key]["total"],)) for key in both]
    found = overall_speedup(pairs)
    return f"{1 / found.value:.2f} ({1 / found.high:.2f} to {1 / found.low:.2f})"


if __name__ == "__main__":
    main()
