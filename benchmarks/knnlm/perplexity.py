"""Does it help? The perplexity of the WikiText test text with and without the neighbours of a datastore."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from functools import partial

from benchmarks.knnlm.pictures import BY_DISTANCE, PERPLEXITY
from benchmarks.knnlm.stores import TEST, Store, Stores
from benchmarks.passages.subjects import Models
from specrag.bench.interleave import Row, Trial
from specrag.bench.machine import half_precision
from specrag.bench.measurement import Measurement
from specrag.bench.records import Outcome
from specrag.bench.suite import BenchContext
from specrag.methods.knn_lm.mixture import Mixture

WEIGHTS = (0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.35, 0.5)
TEMPERATURES = (1.0, 2.0, 3.0, 5.0, 10.0, 30.0)
REACHES = (None, 2.0, 4.0, 8.0, 16.0)

#: Weight and temperature are chosen on one half of the text, and told of the other.
_CHOSEN, _TOLD = "chosen", "told"


def measure(
    context: BenchContext, models: Models, stores: Stores, store: Store, ks: Sequence[int], tokens: int
) -> Iterator[Measurement]:
    """The model alone, and with neighbours for each k, over the first ``tokens`` of the test text."""
    task = f"{PERPLEXITY}/{store.title}"

    def trial() -> Outcome:
        from specrag.methods.knn_lm.perplexity import Measured, measuring

        llm, datastore = models.get(), stores.get(store)
        text = stores.text(TEST, tokens)
        most = min(max(ks), len(datastore))
        started = time.perf_counter()
        work = measuring(llm.model, text, datastore.manifest.windows, datastore, "flat", most)
        whole = llm.executor.run(llm.executor.submit(work))
        seconds = time.perf_counter() - started
        middle = len(whole.log_probs) // 2
        figures: dict[str, float] = {}
        for half, part in ((_CHOSEN, slice(0, middle)), (_TOLD, slice(middle, None))):
            measured = Measured(whole.log_probs[part], whole.distances[part], whole.hits[part])
            figures[f"{half} plain"] = measured.perplexity()
            mixtures = _mixtures(ks, most)
            figures |= zip(map(partial(_figure, half), mixtures), measured.sweep(mixtures), strict=True)
        return Outcome(tokens=len(whole.log_probs) - middle, seconds=seconds, figures=figures)

    def prepare() -> dict[str, Trial]:
        return {"knn-lm": trial}

    row = Row(name="test text", task=task, methods=("knn-lm",), prepare=prepare)
    for record in context.measure(task, [row], context.plan(1, warmups=0)):
        if record.outcome is not None:
            yield from _told(context, task, record.outcome)


def _told(context: BenchContext, task: str, outcome: Outcome) -> Iterator[Measurement]:
    """For each k what the mixture that was best on one half gives on the other: with one weight, and by distance."""
    plain = outcome.figures[f"{_TOLD} plain"]
    yield context.measurement(
        task=task,
        method="plain",
        n=outcome.tokens,
        dtype=half_precision(context.device),
        extra={"perplexity": plain},
    )
    mixtures = [
        Mixture(*json.loads(name.removeprefix(f"{_CHOSEN} ")))
        for name in outcome.figures
        if name.startswith(f"{_CHOSEN} [")
    ]
    for k in dict.fromkeys(mixture.k for mixture in mixtures):
        mine = [mixture for mixture in mixtures if mixture.k == k]
        constant = [mixture for mixture in mine if mixture.reach is None]
        for name, some in ((f"knn-lm+k={k}", constant), (f"knn-lm+k={k}{BY_DISTANCE}", mine)):
            yield _best(context, task, name, some, outcome)


def _best(
    context: BenchContext, task: str, method: str, mixtures: Sequence[Mixture], outcome: Outcome
) -> Measurement:
    best = min(mixtures, key=lambda mixture: outcome.figures[_figure(_CHOSEN, mixture)])
    extra: dict[str, float | str] = {
        "perplexity": outcome.figures[_figure(_TOLD, best)],
        "plain_perplexity": outcome.figures[f"{_TOLD} plain"],
        "lambda": best.weight,
        "knn_temperature": best.temperature,
    }
    if best.reach is not None:
        extra["knn_reach"] = best.reach
    return context.measurement(
        task=task,
        method=method,
        baseline="plain",
        n=outcome.tokens,
        dtype=half_precision(context.device),
        extra=extra,
    )


def _mixtures(ks: Sequence[int], most: int) -> list[Mixture]:
    return [
        Mixture(k, weight, temperature, reach)
        for k in sorted({min(k, most) for k in ks})
        for weight in WEIGHTS
        for temperature in TEMPERATURES
        for reach in REACHES
    ]


def _figure(half: str, mixture: Mixture) -> str:
    return f"{half} {json.dumps([mixture.k, mixture.weight, mixture.temperature, mixture.reach])}"
