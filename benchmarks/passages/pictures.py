"""The pictures of the passages suite."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.passages import batches
from benchmarks.passages.subjects import COST_AWARE, PSA, RALMSPEC, REUSE
from specrag.bench.measurement import Measurement
from specrag.bench.plots import COLOURS, HATCHES, Axis, Series, line_plot, new_figure, save_figure

COMPONENTS, DELAYED, SCALE, TIMELINE = "components", "delayed store", "corpus size", "timeline"
ACCURACY = "accuracy of guesses"
TIMELINE_FILE = "passages-timeline.json"

_ACTIVITIES = ("encode", "look-up", "search", "prefill", "decode")
_LINES = (RALMSPEC, PSA, COST_AWARE)


def draw(measurements: Sequence[Measurement], folder: Path) -> list[Path]:
    """All pictures that the measurements allow."""
    return [
        *_split(measurements, folder),
        *_speedups(
            measurements,
            folder / "passages-delay.png",
            DELAYED,
            "RaLMSpec over a store slowed by a known delay (simulated)",
            Axis(label="R/G of sequential-kv-reuse", log=True),
        ),
        *_speedups(
            measurements,
            folder / "passages-size.png",
            SCALE,
            "RaLMSpec, exact dense, by corpus size (the largest: synthetic)",
            Axis(label="passages", log=True),
        ),
        *_accuracies(measurements, folder),
        *_batches(measurements, folder),
        *_timelines(folder),
    ]


def _split(measurements: Sequence[Measurement], folder: Path) -> Iterator[Path]:
    """Where a request's time goes, a picture a retriever and a bar a method (RaLMSpec, Figure 4)."""
    retrievers: dict[str, dict[str, tuple[float, float]]] = {}
    for entry in measurements:
        found = (_extra(entry, "generation_ms"), _extra(entry, "retrieval_ms"))
        if entry.task.startswith(f"{COMPONENTS}/") and None not in found:
            bars = retrievers.setdefault(entry.task.split("/", 1)[1], {})
            bars[entry.method] = (found[0] or 0.0, found[1] or 0.0)
    for number, (retriever, bars) in enumerate(retrievers.items(), 1):
        yield _bars(bars, f"Time of a request\n{retriever}", folder / f"passages-split-{number}.png")


def _bars(bars: Mapping[str, tuple[float, float]], title: str, path: Path) -> Path:
    figure, axes = new_figure(7.2, 1.6 + 0.24 * len(bars))
    names = list(bars)
    for index, (label, part) in enumerate((("G: generation", 0), ("R: retrieval, not overlapped", 1))):
        axes.barh(
            range(len(names)),
            [bars[name][part] / 1e3 for name in names],
            left=[0.0 if part == 0 else bars[name][0] / 1e3 for name in names],
            color=COLOURS[index],
            hatch=HATCHES[index],
            edgecolor="white",
            linewidth=0,
            label=label,
        )
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("seconds a request, median")
    axes.set_title(title, loc="left", fontsize=11)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return save_figure(figure, path)


def _speedups(
    measurements: Sequence[Measurement], path: Path, section: str, title: str, x: Axis
) -> Iterator[Path]:
    """Speed-ups over the number in the task's name, and the ceiling."""
    shown = [
        entry
        for entry in measurements
        if entry.task.startswith(f"{section}/") and entry.baseline == REUSE and entry.speedup is not None
    ]
    series = [
        line
        for method in _LINES
        if (line := _line([entry for entry in shown if entry.method == method], method, _speedup))
    ]
    ceiling = _line(
        [entry for entry in shown if entry.method == COST_AWARE],
        "ceiling: 1 + R/G (above it: error of measurement)",
        lambda entry: entry.ceiling,
        reference=True,
    )
    if series:
        label = Axis(label="speed-up (sequential-kv-reuse = 1)")
        yield line_plot(path, [*series, *([ceiling] if ceiling else [])], title=title, x=x, y=label)


def _accuracies(measurements: Sequence[Measurement], folder: Path) -> Iterator[Path]:
    """Speed-ups over the share of guesses that were right."""
    shown = [
        entry
        for entry in measurements
        if entry.task.startswith(f"{ACCURACY}/")
        and entry.baseline == REUSE
        and _extra(entry, "match_rate") is not None
    ]
    series = [
        line
        for method in _LINES
        if (
            line := _line([entry for entry in shown if entry.method == method], method, _speedup, _match_rate)
        )
    ]
    if series:
        yield line_plot(
            folder / "passages-accuracy.png",
            series,
            title="RaLMSpec by the accuracy of its guesses, R/G of 1 (simulated)",
            x=Axis(label="share of guesses that were right"),
            y=Axis(label="speed-up (sequential-kv-reuse = 1)"),
        )


def _batches(measurements: Sequence[Measurement], folder: Path) -> Iterator[Path]:
    prefix = f"{batches.SECTION}/"
    shown = [entry for entry in measurements if entry.task.startswith(prefix)]
    names = dict.fromkeys(_retriever(entry) for entry in shown)
    series = [
        line
        for name in names
        if (
            line := _line(
                [entry for entry in shown if _retriever(entry) == name],
                name,
                lambda entry: _extra(entry, "query_ms"),
            )
        )
    ]
    if series:
        yield line_plot(
            folder / "passages-batch.png",
            series,
            title="Latency of a query by the number of queries in a search",
            x=Axis(label="queries in a search", log=True),
            y=Axis(label="milliseconds a query", log=True),
        )


def _retriever(entry: Measurement) -> str:
    return entry.task.split("/", 1)[1].rpartition(", queries=")[0]


def _line(
    entries: Sequence[Measurement],
    label: str,
    y: Callable[[Measurement], float | None],
    x: Callable[[Measurement], float] | None = None,
    *,
    reference: bool = False,
) -> Series | None:
    """A line over the number in each task's name, or over another."""
    across = x or (lambda entry: _number(entry.task))
    points = sorted((across(entry), value) for entry in entries if (value := y(entry)) is not None)
    if not points:
        return None
    return Series(
        label=label, x=[x for x, _ in points], y=[value for _, value in points], reference=reference
    )


def _number(task: str) -> float:
    """The last number in a task's name: passages, R/G, or queries."""
    return float(re.findall(r"\d[\d,]*(?:\.\d+)?", task)[-1].replace(",", ""))


def _speedup(entry: Measurement) -> float | None:
    return entry.speedup


def _match_rate(entry: Measurement) -> float:
    return _extra(entry, "match_rate") or 0.0


def _extra(entry: Measurement, name: str) -> float | None:
    value = entry.extra.get(name)
    return float(value) if isinstance(value, int | float) else None


# -- one request --------------------------------------------------------------------------------------------


def _timelines(folder: Path) -> Iterator[Path]:
    """What ran when in one asynchronous request; a search and the model side by side."""
    path = folder / TIMELINE_FILE
    if path.is_file():
        for number, (title, spans) in enumerate(json.loads(path.read_text(encoding="utf-8")).items(), 1):
            yield draw_timeline(folder / f"passages-timeline-{number}.png", title, spans)


def draw_timeline(path: Path, title: str, spans: Sequence[tuple[str, float, float, bool]]) -> Path:
    """Bars by activity; what was written in vain is pale."""
    figure, axes = new_figure(9.0, 2.8)
    for row, activity in enumerate(_ACTIVITIES):
        for kept, alpha in ((True, 1.0), (False, 0.35)):
            parts = [
                (start, end - start) for name, start, end, used in spans if (name, used) == (activity, kept)
            ]
            axes.broken_barh(parts, (row - 0.4, 0.8), facecolors=COLOURS[row], alpha=alpha)
    for start, end in overlaps(spans):
        axes.axvspan(start, end, color="#999999", alpha=0.25, linewidth=0)
    axes.set_yticks(range(len(_ACTIVITIES)), _ACTIVITIES)
    axes.invert_yaxis()
    axes.set_xlabel("seconds since the question; grey: a search and the model at once; pale: written in vain")
    axes.set_title(title, loc="left", fontsize=11)
    return save_figure(figure, path)


def overlaps(spans: Sequence[tuple[str, float, float, bool]]) -> list[tuple[float, float]]:
    """When a search and the model ran at once, ``(start, end)`` in seconds."""
    by_activity: Mapping[str, list[tuple[float, float]]] = {
        activity: [(start, end) for name, start, end, _ in spans if name == activity]
        for activity in _ACTIVITIES
    }
    written = by_activity["prefill"] + by_activity["decode"]
    pairs = (
        (max(search[0], other[0]), min(search[1], other[1]))
        for search in by_activity["search"]
        for other in written
    )
    return sorted((start, end) for start, end in pairs if end > start)
