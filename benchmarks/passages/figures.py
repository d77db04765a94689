"""What stands beside a ratio of the passages suite: the time's parts, match rate, best stride and ceiling."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median, stdev

import numpy as np

from benchmarks.passages.subjects import BASELINES, PSA, REUSE, VARIANTS, search_figure
from specrag.bench.bounds import retrieval_ceiling
from specrag.bench.machine import half_precision
from specrag.bench.measurement import CEILING, OVERALL, Extra, Measurement
from specrag.bench.records import Outcome, Record
from specrag.bench.stride_process import BestStride, best_stride
from specrag.bench.suite import BenchContext
from specrag.bench.summary import Summary
from specrag.methods.speculative_search import COST_AWARE
from specrag.speculation.schedule.strides import MAX_STRIDE

_SEARCH = search_figure(0).split("0")
#: Sums that the page shows in another form.
_RAW = ("matched", "looked_up", "chunks")


def summarise(
    context: BenchContext, records: Sequence[Record], *, overall: bool = False, simulated: bool = False
) -> list[Measurement]:
    """Sum up records with what stands beside their ratios, against both sequential baselines."""
    figures = Figures(records)
    return [
        _readable(entry)
        for entry in context.summarise(
            records,
            baselines=BASELINES,
            dtype=half_precision(context.device),
            overall=overall,
            simulated=simulated,
            extra=figures.of,
        )
    ]


def _readable(entry: Measurement) -> Measurement:
    kept = {
        name: value
        for name, value in entry.extra.items()
        if name not in _RAW and _searched(name) is None and not (name == "distractors" and not value)
    }
    return replace(entry, extra=kept)


class Figures:
    """What several records say together.

    Args:
        records: whose methods, rows and repeats belong together.
    """

    def __init__(self, records: Sequence[Record]) -> None:
        self._records = [record for record in records if record.outcome is not None]

    def of(self, summary: Summary) -> dict[str, Extra]:
        """The extras of one method, against the baseline of the summary."""
        mine = self._outcomes(summary.task, summary.method)
        if not mine:
            return {}
        searches = _searches(mine)
        extra: dict[str, Extra] = {
            "search_by_queries": ", ".join(
                f"{queries}: {ms:.3g} ms" for queries, ms in sorted(searches.items())
            )
        }
        if summary.baseline is None:
            return extra
        ratios = self._ratios(summary.task, summary.method, summary.baseline)
        if len(ratios) > 1:
            extra |= {"speedup_mean": fmean(ratios), "speedup_deviation": stdev(ratios)}
        match = match_rate(mine)
        if match is None or summary.speedup is None:
            return extra
        theirs = self._outcomes(summary.task, summary.baseline)
        # The other baseline reads prompts anew, which nothing else here does: its G is not a floor.
        if summary.baseline == REUSE:
            extra[CEILING] = retrieval_ceiling(
                retrieval_seconds=sum(outcome.figures["retrieval_ms"] for outcome in theirs) / 1e3,
                generation_seconds=sum(outcome.figures["generation_ms"] for outcome in theirs) / 1e3,
            )
        best = self.best(summary.task, summary.method)
        seconds = sum(_seconds(outcome) for outcome in theirs)
        return extra | {
            "match_rate": match,
            "best_stride": best.stride,
            "best_stride_speedup": best.passages_per_second
            * seconds
            / sum(outcome.figures["chunks"] for outcome in theirs),
        }

    def best(self, task: str, method: str) -> BestStride:
        """The best of all strides for a variant of RaLMSpec, at its measured a, b(s) and match rate.

        A cost-aware one chooses between searches alone and beside decoding: the better of its own best stride without
        overlap, and that of PSA, whose a and b were measured while the two shared the processor.
        """
        own = self._best(task, method, VARIANTS[method].asynchronous)
        if VARIANTS[method].stride != COST_AWARE or not self._outcomes(task, PSA):
            return own
        return max(own, self._best(task, PSA, asynchronous=True), key=lambda best: best.passages_per_second)

    def _best(self, task: str, method: str, asynchronous: bool) -> BestStride:
        """B comes from all variants that search alike, since each sees few strides; between them it is a line."""
        variant = VARIANTS[method]
        mine = self._outcomes(task, method)
        alike = [
            name
            for name, other in VARIANTS.items()
            if (other.prefetch, other.asynchronous) == (variant.prefetch, variant.asynchronous)
        ]
        seen = [outcome for name in alike for outcome in self._outcomes(task, name)]
        searches = _searches(seen)
        match = match_rate(mine)
        assert match is not None, "a method that guesses"
        most = max(int(outcome.figures["chunks"]) for outcome in mine)
        return best_stride(
            fmean(outcome.figures["step_ms"] for outcome in mine) / 1e3,
            lambda queries: _search_ms(searches, queries) / 1e3,
            match,
            asynchronous,
            min(MAX_STRIDE, most),
        )

    def _outcomes(self, task: str, method: str) -> list[Outcome]:
        return [
            record.outcome
            for record in self._records
            if record.key.method == method and task in (record.key.task, OVERALL)
            if record.outcome is not None
        ]

    def _ratios(self, task: str, method: str, baseline: str) -> list[float]:
        """Seconds a token of the baseline by those of the method, over all rows, for each repeat."""
        by_repeat: dict[int, dict[str, list[Outcome]]] = defaultdict(lambda: defaultdict(list))
        for record in self._records:
            if record.outcome is not None and task in (record.key.task, OVERALL):
                by_repeat[record.key.repeat][record.key.method].append(record.outcome)
        return [
            _seconds_a_token(found[baseline]) / _seconds_a_token(found[method])
            for found in by_repeat.values()
            if found[baseline] and found[method]
        ]


def match_rate(outcomes: Sequence[Outcome]) -> float | None:
    """Right guesses among all that were looked up until the first wrong one of a round."""
    looked_up = sum(outcome.figures.get("looked_up", 0.0) for outcome in outcomes)
    return sum(outcome.figures.get("matched", 0.0) for outcome in outcomes) / looked_up if looked_up else None


def _searches(outcomes: Sequence[Outcome]) -> dict[int, float]:
    """Milliseconds of a search by the number of its queries, the median over requests."""
    found: dict[int, list[float]] = defaultdict(list)
    for outcome in outcomes:
        for name, value in outcome.figures.items():
            queries = _searched(name)
            if queries is not None:
                found[queries].append(value)
    return {queries: median(values) for queries, values in found.items()}


def _searched(name: str) -> int | None:
    digits = name.removeprefix(_SEARCH[0]).removesuffix(_SEARCH[1])
    return int(digits) if digits.isdigit() and name == search_figure(int(digits)) else None


def _search_ms(searches: Mapping[int, float], queries: int) -> float:
    known = sorted(searches)
    last = known[-1]
    if queries <= last or len(known) == 1:
        return float(np.interp(queries, known, [searches[place] for place in known]))
    slope = max((searches[last] - searches[known[0]]) / (last - known[0]), 0.0)
    return searches[last] + slope * (queries - last)


def _seconds(outcome: Outcome) -> float:
    assert outcome.seconds is not None, "a stored outcome has its time"
    return outcome.seconds


def _seconds_a_token(outcomes: Sequence[Outcome]) -> float:
    return sum(_seconds(outcome) for outcome in outcomes) / sum(outcome.tokens for outcome in outcomes)
