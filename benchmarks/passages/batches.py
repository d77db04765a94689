"""What a query costs by the number of queries in a search (RaLMSpec, Figure 6)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.passages.retrievers import Retrievers
from specrag.bench.interleave import Row, Trial
from specrag.bench.measurement import Measurement
from specrag.bench.records import Outcome
from specrag.bench.suite import BenchContext
from specrag.methods.ralmspec import RaLMSpec
from specrag.methods.retriever import PassageRetriever

SECTION = "batch"
SIZES = (1, 2, 4, 8, 16, 32)

#: A search that waits for nobody's guesses is the sequential method's.
_METHOD = "sequential"


def measure(
    context: BenchContext, retrievers: Retrievers, names: Sequence[str], questions: Sequence[str]
) -> Iterator[Measurement]:
    """Milliseconds a query of each retriever; the questions are encoded before."""

    def prepare(name: str, size: int) -> Mapping[str, Trial]:
        texts = [questions[place % len(questions)] for place in range(size)]
        return {_METHOD: _trial(retrievers.get(name), texts)}

    rows = [
        Row(
            name=name,
            task=f"{SECTION}/{name}, queries={size}",
            methods=(_METHOD,),
            prepare=lambda name=name, size=size: prepare(name, size),  # type: ignore[misc]
        )
        for name in names
        for size in SIZES
    ]
    records = context.measure("batches", rows, context.plan(5, warmups=1))
    yield from context.summarise(records, baselines=[_METHOD], dtype=None, overall=False)


def _trial(retriever: PassageRetriever, texts: Sequence[str]) -> Trial:
    queries = retriever.encode(texts)
    k = min(RaLMSpec.Options().prefetch, len(retriever))

    def run() -> Outcome:
        started = time.perf_counter()
        rankings = retriever.search(queries, k)
        retriever.passages([int(id) for ranking in rankings for id in ranking.ids])
        seconds = time.perf_counter() - started
        return Outcome(seconds=seconds, figures={"query_ms": 1e3 * seconds / len(queries)})

    return run
