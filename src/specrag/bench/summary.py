"""From records to figures: per task and over all tasks, each method against each baseline."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from specrag.bench.measurement import OVERALL, Extra
from specrag.bench.records import Outcome, Record
from specrag.bench.statistics import Interval, PairedTimes, median_interval, overall_speedup


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The figures of one method on one task; the fields are those of `Measurement`."""

    task: str
    method: str
    baseline: str | None
    n: int
    speedup: Interval | None
    tokens_per_second: float | None
    mat: float | None
    acceptance: float | None
    acceptance_by_source: Mapping[str, float] | None
    identical: float | None
    accuracy: float | None
    extra: Mapping[str, Extra]


_Runs = Mapping[int, Outcome]  # by repeat


def summarise(records: Sequence[Record], *, baselines: Sequence[str], overall: bool = True) -> list[Summary]:
    """Summarise every task, and all tasks together if there are several.

    A row counts in a ratio if both methods finished at least one repeat of it side by side. Failures are
    counted in ``extra["failures"]``.

    Args:
        baselines: what the methods are compared with. The first one also gets its own summary, without a ratio;
            every other pair of a method and a baseline gets one.
        overall: also summarise over tasks; false if tasks are different things, such as prefill and decoding.
    """
    tasks: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        tasks[record.key.task].append(record)
    if overall and len(tasks) > 1:
        tasks[OVERALL] = list(records)
    return [summary for task, mine in tasks.items() for summary in _task(task, mine, baselines)]


def _task(task: str, records: Sequence[Record], baselines: Sequence[str]) -> list[Summary]:
    # Row names are unique only within a task.
    runs: dict[str, dict[tuple[str, str], dict[int, Outcome]]] = {}
    failures: dict[str, int] = defaultdict(int)
    for record in records:
        rows = runs.setdefault(record.key.method, {})
        if record.outcome is None:
            failures[record.key.method] += 1
            continue
        rows.setdefault((record.key.task, record.key.row), {})[record.key.repeat] = record.outcome
    summaries = []
    for method, rows in runs.items():
        compared = [baseline for baseline in baselines if baseline != method and baseline in runs]
        if not compared or method == baselines[0]:
            summaries.append(_figures(task, method, rows, failures[method]))
        for baseline in compared:
            summaries.append(_figures(task, method, rows, failures[method], baseline, runs[baseline]))
    return summaries


def _figures(
    task: str,
    method: str,
    rows: Mapping[tuple[str, str], _Runs],
    failures: int,
    baseline: str | None = None,
    baseline_rows: Mapping[tuple[str, str], _Runs] | None = None,
) -> Summary:
    outcomes = [outcome for runs in rows.values() for outcome in runs.values()]
    pairs = [
        (rows[row][repeat], baseline_rows[row][repeat])
        for row in rows
        for repeat in rows[row]
        if baseline_rows is not None and repeat in baseline_rows.get(row, {})
    ]
    timed = _paired_times(rows, baseline_rows or {})
    extra = _extra(rows)
    if failures:
        extra["failures"] = failures
    return Summary(
        task=task,
        method=method,
        baseline=baseline,
        n=len(rows) if baseline is None else len(timed),
        speedup=overall_speedup(timed) if timed else None,
        tokens_per_second=_tokens_per_second(rows),
        mat=_ratio(outcomes, "tokens", "passes"),
        acceptance=_ratio(outcomes, "accepted", "drafted"),
        acceptance_by_source=_acceptance_by_source(outcomes),
        identical=_identical(pairs),
        accuracy=_mean([outcome.correct for outcome in outcomes if outcome.correct is not None]),
        extra=extra,
    )


def _seconds(outcome: Outcome) -> float:
    assert outcome.seconds is not None, "a stored outcome has its time"
    return outcome.seconds


def _paired_times(
    rows: Mapping[tuple[str, str], _Runs], baseline_rows: Mapping[tuple[str, str], _Runs]
) -> list[PairedTimes]:
    """Seconds per token of each row, by repeat; plain seconds if one of the two counts no tokens."""
    paired = []
    for row, runs in rows.items():
        theirs = baseline_rows.get(row, {})
        repeats = sorted(runs.keys() & theirs.keys())
        if not repeats:
            continue
        counted = all(runs[repeat].tokens and theirs[repeat].tokens for repeat in repeats)
        paired.append(
            PairedTimes(
                baseline=[_seconds(theirs[r]) / (theirs[r].tokens if counted else 1) for r in repeats],
                method=[_seconds(runs[r]) / (runs[r].tokens if counted else 1) for r in repeats],
            )
        )
    return paired


def _tokens_per_second(rows: Mapping[tuple[str, str], _Runs]) -> float | None:
    """All tokens over all time, each row at its median."""
    tokens = sum(median(outcome.tokens for outcome in runs.values()) for runs in rows.values())
    seconds = sum(median(_seconds(outcome) for outcome in runs.values()) for runs in rows.values())
    return tokens / seconds if tokens else None


def _ratio(outcomes: Sequence[Outcome], above: str, below: str) -> float | None:
    known = [o for o in outcomes if getattr(o, above) is not None and getattr(o, below) is not None]
    divisor = sum(getattr(outcome, below) for outcome in known)
    return sum(getattr(outcome, above) for outcome in known) / divisor if divisor else None


def _acceptance_by_source(outcomes: Sequence[Outcome]) -> dict[str, float] | None:
    drafted: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    for outcome in outcomes:
        if outcome.drafted_by is not None and outcome.accepted_by is not None:
            drafted.update(outcome.drafted_by)
            accepted.update(outcome.accepted_by)
    return {source: accepted[source] / drafted[source] for source in sorted(+drafted)} or None


def _identical(pairs: Sequence[tuple[Outcome, Outcome]]) -> float | None:
    return _mean([float(a.output == b.output) for a, b in pairs if None not in (a.output, b.output)])


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _extra(rows: Mapping[tuple[str, str], _Runs]) -> dict[str, Extra]:
    """Median milliseconds with their interval, the repeats, and the medians of the suite's own figures."""
    if not rows:
        return {}
    times = [1e3 * _seconds(outcome) for runs in rows.values() for outcome in runs.values()]
    per_row = [1e3 * median(_seconds(outcome) for outcome in runs.values()) for runs in rows.values()]
    spread = median_interval(per_row if len(per_row) > 1 else times)
    extra: dict[str, Extra] = {
        "milliseconds": spread.value,
        "milliseconds_low": spread.low,
        "milliseconds_high": spread.high,
        "repeats": max(len(runs) for runs in rows.values()),
    }
    figures: dict[str, list[float]] = defaultdict(list)
    for runs in rows.values():
        for outcome in runs.values():
            for name, value in outcome.figures.items():
                figures[name].append(value)
    for name, values in figures.items():
        extra[name] = median(values)
    return extra
