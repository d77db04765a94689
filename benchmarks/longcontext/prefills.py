"""Whether reading both prompts in one packed pass is faster than one after the other, with the same weights."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.longcontext.subjects import Subjects
from specrag.bench.interleave import Row, Trial
from specrag.bench.machine import half_precision
from specrag.bench.measurement import Measurement
from specrag.bench.records import Outcome
from specrag.bench.suite import BenchContext
from specrag.engine.passes import Coroutine, gather
from specrag.engine.session import Session

PREFILLS = "both prefills"
APART, PACKED = "rapid+apart", "rapid+packed"


def measure(
    context: BenchContext, subjects: Subjects, lengths: Sequence[int], share: int
) -> Iterator[Measurement]:
    """Times by length of the context.

    Args:
        lengths: tokens that the target reads.
        share: the drafter reads this part of them.
    """
    rows = [
        Row(
            name=f"{subjects.name} {length}",
            task=f"{PREFILLS}/{length:,} tokens and {length // share:,}",
            methods=(APART, PACKED),
            prepare=lambda length=length: _trials(subjects, length, length // share),  # type: ignore[misc]
        )
        for length in lengths
    ]
    records = context.measure(
        f"{subjects.name}, {PREFILLS}", rows, context.plan(2, warmups=0, warm_each_row=False)
    )
    yield from context.summarise(
        records, baselines=[APART], dtype=half_precision(context.device), model=subjects.name, overall=False
    )


def _trials(subjects: Subjects, length: int, part: int) -> Mapping[str, Trial]:
    """Both prompts, apart and packed. Their tokens decide nothing, so that any will do."""
    llm = subjects.llm

    def read(*, packed: bool) -> Outcome:
        sessions = Session(llm.model), Session(llm.model)
        reading = [
            session.extend([1000 + token % 1000 for token in range(count)])
            for session, count in zip(sessions, (length, part), strict=True)
        ]
        jobs: list[Coroutine[object]] = [gather(reading)] if packed else list(reading)
        started = time.perf_counter()
        for job in jobs:
            llm.executor.run(llm.executor.submit(job))
        seconds = time.perf_counter() - started
        for session in sessions:
            session.close()
        return Outcome(tokens=length + part, seconds=seconds)

    return {APART: lambda: read(packed=False), PACKED: lambda: read(packed=True)}
