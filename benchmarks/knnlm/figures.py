"""What stands beside a ratio of the kNN-LM suite: where the time goes, the match rate, best stride and ceiling."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median

import numpy as np

from benchmarks.knnlm.subjects import SEQUENTIAL, VARIANTS
from benchmarks.passages.figures import match_rate
from benchmarks.passages.subjects import search_figure
from specrag.bench.bounds import retrieval_ceiling
from specrag.bench.measurement import CEILING, Extra, Measurement
from specrag.bench.records import Outcome, Record
from specrag.bench.stride_process import BestStride, best_stride
from specrag.bench.suite import BenchContext
from specrag.bench.summary import Summary
from specrag.methods.speculative_search import COST_AWARE
from specrag.speculation.schedule.strides import MAX_STRIDE

#: Sums that the page shows in another form.
_RAW = ("matched", "looked_up", "chunks")


def summarise(
    context: BenchContext, records: Sequence[Record], *, dtype: str, simulated: bool = False
) -> list[Measurement]:
    """Sum up records with what stands beside their ratios."""
    figures = Figures(records)
    found = context.summarise(
        records,
        baselines=(SEQUENTIAL,),
        dtype=dtype,
        overall=False,
        simulated=simulated,
        extra=figures.of,
    )
    return [replace(entry, extra=_readable(entry.extra)) for entry in found]


def _readable(extra: Mapping[str, Extra]) -> dict[str, Extra]:
    searches = {search_figure(queries) for queries in range(1, MAX_STRIDE + 1)}
    return {name: value for name, value in extra.items() if name not in _RAW and name not in searches}


class Figures:
    """What several records say together.

    Args:
        records: whose methods, rows and repeats belong together.
    """

    def __init__(self, records: Sequence[Record]) -> None:
        self._outcomes: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
        for record in records:
            if record.outcome is not None:
                self._outcomes[record.key.task, record.key.method].append(record.outcome)

    def of(self, summary: Summary) -> dict[str, Extra]:
        """The extras of one method."""
        mine = self._outcomes[summary.task, summary.method]
        if not mine:
            return {}
        searches = _searches(mine)
        extra: dict[str, Extra] = {
            "search_by_queries": ", ".join(
                f"{queries}: {ms:.3g} ms" for queries, ms in sorted(searches.items())
            )
        }
        if summary.method == SEQUENTIAL:
            ratios = [outcome.figures["retrieval_ms"] / outcome.figures["generation_ms"] for outcome in mine]
            return {**extra, "retrieval_to_generation": median(ratios)}
        match = match_rate(mine)
        if match is None or summary.speedup is None:
            return extra
        best = self.best(summary.task, summary.method)
        theirs = self._outcomes[summary.task, SEQUENTIAL]
        seconds = sum(_seconds(outcome) for outcome in theirs) / sum(outcome.tokens for outcome in theirs)
        of_best = best.passages_per_second * seconds
        if VARIANTS[summary.method].stride == COST_AWARE:
            of_best = max(of_best, 1.0)  # it may guess nothing
        # Where a pass gives several tokens generation shrinks too.
        if VARIANTS[summary.method].decoder == "plain":
            extra[CEILING] = retrieval_ceiling(
                retrieval_seconds=sum(outcome.figures["retrieval_ms"] for outcome in theirs) / 1e3,
                generation_seconds=sum(outcome.figures["generation_ms"] for outcome in theirs) / 1e3,
            )
        return extra | {
            "match_rate": match,
            "best_stride": best.stride,
            "best_stride_speedup": of_best,
        }

    def best(self, task: str, method: str) -> BestStride:
        """The best of all strides at the measured a, b(s) and match rate.

        b comes from all variants, since each sees few strides; between those seen it is a straight line.
        """
        mine = self._outcomes[task, method]
        seen = [
            outcome
            for (other_task, other), outcomes in self._outcomes.items()
            if other_task == task and other != SEQUENTIAL
            for outcome in outcomes
        ]
        searches = _searches(seen)
        match = match_rate(mine)
        assert match is not None, "a method that guesses"
        return best_stride(
            fmean(outcome.figures["step_ms"] for outcome in mine) / 1e3,
            lambda queries: search_ms(searches, queries) / 1e3,
            match,
            VARIANTS[method].asynchronous,
            min(MAX_STRIDE, max(outcome.tokens for outcome in mine)),
        )


def search_ms(searches: Mapping[int, float], queries: int) -> float:
    """Milliseconds of a search for so many queries: a straight line between and beyond the numbers seen."""
    known = sorted(searches)
    last = known[-1]
    if queries <= last or len(known) == 1:
        return float(np.interp(queries, known, [searches[place] for place in known]))
    slope = max((searches[last] - searches[known[0]]) / (last - known[0]), 0.0)
    return searches[last] + slope * (queries - last)


def _searches(outcomes: Sequence[Outcome]) -> dict[int, float]:
    """Milliseconds of a search by the number of its queries, the median over requests."""
    found: dict[int, list[float]] = defaultdict(list)
    for outcome in outcomes:
        for queries in range(1, MAX_STRIDE + 1):
            value = outcome.figures.get(search_figure(queries))
            if value is not None:
                found[queries].append(value)
    return {queries: median(values) for queries, values in found.items()}


def _seconds(outcome: Outcome) -> float:
    assert outcome.seconds is not None, "a stored outcome has its time"
    return outcome.seconds
