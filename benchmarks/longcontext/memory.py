"""Peak memory of the methods behind long prompts, each in a process of its own.

Run as a module it reads its work as JSON from standard input and prints one JSON object.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.longcontext.data import LongRow
from benchmarks.longcontext.figures import MEMORY
from benchmarks.longcontext.labels import ADAPTIVE, LC, LOSSLESS, RAG, SMALL, STREAMING
from benchmarks.longcontext.subjects import Subjects
from specrag.bench.interleave import Row, Trial
from specrag.bench.machine import half_precision
from specrag.bench.measurement import Measurement
from specrag.bench.memory import peak_memory, run_module
from specrag.bench.records import Outcome
from specrag.bench.suite import BenchContext

_METHODS = (LC, LOSSLESS, STREAMING, ADAPTIVE, RAG)
_NEW_TOKENS = 32


def measure(
    context: BenchContext, subjects: Subjects, rows: Mapping[int, LongRow], share: int
) -> Iterator[Measurement]:
    """Memory by length of the context.

    Args:
        rows: what is asked, by the tokens of its text.
        share: the drafter reads this part of them.
    """
    methods = _METHODS if subjects.name == SMALL else (*_METHODS, f"{LOSSLESS}+{SMALL}")

    def prepare(length: int, row: LongRow) -> Mapping[str, Trial]:
        return {method: memory_trial(subjects, row, length // share, method) for method in methods}

    made = [
        Row(
            name=f"{subjects.name} {length}",
            task=f"{MEMORY}/{length:,} tokens",
            methods=methods,
            prepare=lambda length=length, row=row: prepare(length, row),  # type: ignore[misc]
        )
        for length, row in rows.items()
    ]
    plan = context.plan(1, warmups=0, warm_each_row=False)
    records = context.measure(f"{subjects.name}, {MEMORY}", made, plan)
    yield from context.summarise(
        records, baselines=[], dtype=half_precision(context.device), model=subjects.name, overall=False
    )


def memory_trial(subjects: Subjects, row: LongRow, part_tokens: int, method: str) -> Trial:
    """A trial that starts a process: load, read, decode a few tokens. The peak is that behind loading."""
    work = {
        "subjects": subjects.settings,
        "document": row.document,
        "question": row.question,
        "part_tokens": part_tokens,
        "method": method,
    }

    def trial() -> Outcome:
        figures = run_module("measuring memory", __name__, given=json.dumps(work))
        return Outcome(seconds=figures.pop("total_s"), figures=figures)

    return trial


def main(work: Mapping[str, Any]) -> None:
    """Do it, and print the figures."""
    started = time.perf_counter()
    subjects, method = Subjects(**work["subjects"]), work["method"]
    subjects.llm  # noqa: B018 - loads it, with some weights twice for a moment: more than short contexts take
    row = LongRow(name="memory", kind="memory", document=work["document"], question=work["question"])
    with peak_memory() as peak:
        # Who reads no part needs no encoder of sentences.
        part = None if method not in (LC, STREAMING, ADAPTIVE) else ()
        prepared = subjects.unread(row, work["part_tokens"], part)
        subjects.trial(method, prepared, _NEW_TOKENS)()
    figures = {"loaded_mib": peak.start_mib, "peak_mib": peak.peak_mib}
    print(json.dumps({"total_s": time.perf_counter() - started, **figures}))


if __name__ == "__main__":
    main(json.load(sys.stdin))
