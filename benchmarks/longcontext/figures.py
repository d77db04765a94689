"""What the records of ``specrag bench longcontext`` say together: step times, whole requests, who is right alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.longcontext.labels import LC, NAIVE, RAG
from specrag.bench.bounds import steps_speedup
from specrag.bench.measurement import OVERALL, Extra, Measurement
from specrag.bench.plots import Axis, Series, line_plot
from specrag.bench.records import Outcome, Record
from specrag.bench.statistics import geometric_mean, paired_bootstrap
from specrag.bench.summary import Summary

SPEED, SWEEP, UNRELATED, QUALITY = "speed", "retrieval length", "unrelated part", "quality"
CONVERSATION, UPWARD, MEMORY = "chat history", "upward", "memory"


class Figures:
    """Pairs of a method's and long context's outcomes on the same row.

    Args:
        records: of one section.
    """

    def __init__(self, records: Sequence[Record]) -> None:
        self._outcomes: dict[tuple[str, str, str], list[Outcome]] = {}
        for record in records:
            if record.outcome is not None:
                key = (record.key.method, record.key.task, record.key.row)
                self._outcomes.setdefault(key, []).append(record.outcome)

    def of(self, summary: Summary) -> Mapping[str, Extra]:
        """More figures for a method on a task."""
        found: dict[str, Extra] = {}
        rows = self._rows(summary.method, summary.task)
        if summary.baseline in (LC, None):
            found |= self._steps(summary, rows)
        if summary.baseline is not None:
            theirs = self._rows(summary.baseline, summary.task)
            ratios = [
                median(o.figures["end_to_end_ms"] for o in theirs[row])
                / median(o.figures["end_to_end_ms"] for o in rows[row])
                for row in rows
                if row in theirs
            ]
            if ratios:
                found["end_to_end_speedup"] = geometric_mean(ratios)
        return found | self._against(summary, rows)

    def _rows(self, method: str, task: str) -> dict[tuple[str, str], list[Outcome]]:
        return {
            (row_task, row): outcomes
            for (name, row_task, row), outcomes in self._outcomes.items()
            if name == method and task in (row_task, OVERALL)
        }

    def _steps(self, summary: Summary, rows: Mapping[tuple[str, str], Sequence[Outcome]]) -> dict[str, Extra]:
        """The geometric mean over rows of tokens a round / (drafting + verification in passes of long context)."""
        plain = self._rows(LC, summary.task)
        ratios = []
        for row, outcomes in rows.items():
            if row not in plain or summary.method in (LC, RAG):
                continue
            for outcome in outcomes:
                ratios.append(
                    steps_speedup(
                        tokens_per_round=outcome.tokens / max(outcome.passes or 1, 1),
                        plain_seconds=median(o.figures["verify_ms"] for o in plain[row]) / 1e3,
                        verify_seconds=outcome.figures["verify_ms"] / 1e3,
                        draft_seconds=outcome.figures["draft_ms"] / 1e3,
                    )
                )
        if not ratios or summary.speedup is None:
            return {}
        return {"steps_speedup": geometric_mean(ratios)}

    def _against(
        self, summary: Summary, rows: Mapping[tuple[str, str], Sequence[Outcome]]
    ) -> dict[str, Extra]:
        """Figure 2: rows that one gets right and another does not, and the gold answer's log-probability, paired."""
        found: dict[str, Extra] = {}
        mine = {row: outcomes[0] for row, outcomes in rows.items()}
        plain = {row: outcomes[0] for row, outcomes in self._rows(LC, summary.task).items()}
        part = {row: outcomes[0] for row, outcomes in self._rows(RAG, summary.task).items()}
        judged = [
            row
            for row, outcome in mine.items()
            if outcome.correct is not None and row in plain and row in part
        ]
        if judged and summary.method != LC:
            right = {row: bool(mine[row].correct) for row in judged}
            lc = {row: bool(plain[row].correct) for row in judged}
            rag = {row: bool(part[row].correct) for row in judged}
            found["gained"] = fmean(right[row] and not lc[row] for row in judged)
            found["lost"] = fmean(lc[row] and not right[row] for row in judged)
            if summary.method != RAG:
                found["only_this"] = fmean(right[row] and not lc[row] and not rag[row] for row in judged)
        for name, other in (("lc", plain), ("rag", part)):
            if summary.method not in (LC if name == "lc" else RAG, NAIVE):
                found |= _paired("gold_nats", name, mine, other) | _paired("rating", name, mine, other)
        return found


def _paired(
    figure: str, name: str, mine: Mapping[Any, Outcome], other: Mapping[Any, Outcome]
) -> dict[str, Extra]:
    """The mean difference of a figure on the same rows, and its 95 % interval."""
    both = [
        (outcome.figures[figure], other[row].figures[figure])
        for row, outcome in mine.items()
        if row in other and figure in outcome.figures and figure in other[row].figures
    ]
    if not both:
        return {}
    result = paired_bootstrap(*zip(*both, strict=True))
    return {
        f"{figure}_over_{name}": result.difference,
        f"{figure}_over_{name}_low": result.low,
        f"{figure}_over_{name}_high": result.high,
    }


def pictures(measurements: Sequence[Measurement], folder: Path) -> Iterator[Path]:
    """Speed-up over context length, one picture a model, and over retrieval length (the paper's Figure 3)."""
    for model in dict.fromkeys(entry.model for entry in measurements if entry.model):
        for section, axis in (
            (SPEED, "tokens of context"),
            (SWEEP, "tokens of the part that the drafter reads"),
        ):
            mine = [
                replace(entry, task=entry.task.removeprefix(f"{section}/"))
                for entry in measurements
                if entry.task.startswith(f"{section}/")
                and entry.model == model
                # Another question, whose speed says nothing about speculation.
                and entry.baseline == LC
                and entry.method != RAG
            ]
            series = _lines(
                (entry.method, _tokens(entry.task), entry.speedup)
                for entry in mine
                if entry.speedup is not None and _tokens(entry.task)
            )
            if series:
                yield line_plot(
                    folder / f"longcontext-{section.replace(' ', '-')}-{model}.png",
                    series,
                    title=f"Decoding against long context alone, {model}",
                    x=Axis(label=axis, log=True),
                    y=Axis(label="speed-up (times)"),
                )
        series = _lines(
            (
                entry.method,
                _tokens(entry.task.removeprefix(f"{MEMORY}/")),
                float(str(entry.extra["peak_mib"])),
            )
            for entry in measurements
            if entry.task.startswith(f"{MEMORY}/") and entry.model == model
        )
        if series:
            yield line_plot(
                folder / f"longcontext-{MEMORY}-{model}.png",
                series,
                title=f"Most memory that a process has held, {model}",
                x=Axis(label="tokens of context", log=True),
                y=Axis(label="MiB"),
            )


def _lines(points: Iterable[tuple[str, int, float]]) -> list[Series]:
    """A line a method, from methods, tokens and figures."""
    lines: dict[str, dict[int, float]] = {}
    for method, tokens, figure in points:
        lines.setdefault(method, {})[tokens] = figure
    return [
        Series(label=method, x=sorted(found), y=[found[tokens] for tokens in sorted(found)])
        for method, found in lines.items()
    ]


def _tokens(task: str) -> int:
    """The number that a task's name begins with; 0 if none."""
    word = task.split(" ")[0].replace(",", "")
    return int(word) if word.isdigit() else 0
