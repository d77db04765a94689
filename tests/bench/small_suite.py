"""A small real suite: finding phrases in the sample text by scanning it, and by an index of its words.

Run as a program it is ``specrag bench small ...``; ``SMALL_SUITE_LOG`` names a file that gets a line a trial.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping

import typer

from specrag.bench.data import SAMPLE
from specrag.bench.interleave import Row, Trial
from specrag.bench.measurement import Measurement
from specrag.bench.records import Outcome
from specrag.bench.registry import SuiteRegistry
from specrag.bench.suite import BenchContext
from specrag.cli.bench import bench_command

PHRASES = ("tide", "soup", "ferry", "lens", "pencil", "mercury")
REPEATS = 3
METHODS = ("sequential", "ralmspec+index")


def scan(phrase: str) -> list[int]:
    return [match.start() for match in re.finditer(rf"\b{phrase}\b", SAMPLE)]


def build_index() -> dict[str, list[int]]:
    index: dict[str, list[int]] = {}
    for match in re.finditer(r"\w+", SAMPLE):
        index.setdefault(match.group(), []).append(match.start())
    return index


def log(line: str) -> None:
    path = os.environ.get("SMALL_SUITE_LOG")
    if path is not None:
        with open(path, "a") as file:
            file.write(f"{line}\n")


class SmallSuite:
    name = "small"
    summary = "Finds words in a short text, by scanning and by an index."

    def __init__(self, pause: float = 0.0) -> None:
        self.pause = pause

    def run(self, context: BenchContext) -> Iterator[Measurement]:
        rows = [self._row(phrase, task) for phrase, task in zip(PHRASES, "aabbcc", strict=True)]
        records = context.measure("find", rows, context.plan(REPEATS))
        yield from context.summarise(records, baselines=["sequential"], dtype=None)

    def _row(self, phrase: str, task: str) -> Row:
        return Row(name=phrase, task=task, methods=METHODS, prepare=lambda: self._prepare(phrase))

    def _prepare(self, phrase: str) -> Mapping[str, Trial]:
        index = build_index()
        return {
            "sequential": self._trial("sequential", phrase, lambda: scan(phrase)),
            "ralmspec+index": self._trial("ralmspec+index", phrase, lambda: index.get(phrase, [])),
        }

    def _trial(self, method: str, phrase: str, find: Callable[[], list[int]]) -> Trial:
        def trial() -> Outcome:
            log(f"{phrase} {method}")
            time.sleep(self.pause)
            start = time.perf_counter()
            found = find()
            return Outcome(seconds=time.perf_counter() - start, output=str(found), correct=float(bool(found)))

        return trial


def registry(pause: float = 0.0) -> SuiteRegistry:
    return SuiteRegistry({"small": lambda: SmallSuite(pause)})


if __name__ == "__main__":
    app = typer.Typer()
    app.command("bench")(bench_command(registry(pause=0.05)))
    app(sys.argv[1:])
