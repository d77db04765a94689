"""The pictures of the answers suite: accuracy over drafts and passages (Figure 4), lengths (Figure 2), the frontier."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.answers.data import SIZES
from benchmarks.answers.figures import ALL_SETS, REMEDIED, SPECULATIVE
from specrag.bench.measurement import OVERALL, Measurement
from specrag.bench.plots import COLOURS, HATCHES, Axis, Series, line_plot, new_figure, save_figure

#: The eight sets and all together by three configurations; more bars are no picture any more.
_MOST_BARS = 30


def draw(measurements: Sequence[Measurement], folder: Path) -> list[Path]:
    """All pictures that the measurements allow."""
    drawn = [
        _over(measurements, folder / "answers-drafts.png", "drafts", "m", "drafts (m)"),
        _over(measurements, folder / "answers-passages.png", "passages", "k", "passages a draft (k)"),
        _lengths(measurements, folder / "answers-lengths.png"),
        _accuracies(measurements, folder / "answers-accuracy.png"),
        _frontier(measurements, folder / "answers-frontier.png"),
    ]
    return [path for path in drawn if path is not None]


def _over(
    measurements: Sequence[Measurement], path: Path, section: str, letter: str, label: str
) -> Path | None:
    """Accuracy over one setting, a line a set, on the same questions."""
    lines = []
    for name, size in SIZES.items():
        points: dict[int, Measurement] = {}
        for entry in measurements:
            variant = entry.method.rpartition("+")[2]
            if entry.task == f"{section}/{name}" and variant.startswith(f"{letter}="):
                points[int(variant.removeprefix(f"{letter}="))] = entry
        if not points:
            continue
        model = next(iter(points.values())).model
        for entry in measurements:
            if (entry.task, entry.method, entry.model) == (f"{section}/{name}", SPECULATIVE, model):
                points[size.m if letter == "m" else size.k] = entry
        ordered = sorted(points)
        lines.append(
            Series(
                label=f"{name}, {model}",
                x=ordered,
                y=[100 * (points[x].accuracy or 0.0) for x in ordered],
                low=[100 * _figure(points[x], "accuracy_low") for x in ordered],
                high=[100 * _figure(points[x], "accuracy_high") for x in ordered],
            )
        )
    if not lines:
        return None
    title = f"Speculative RAG: accuracy by {label}, with 95 % intervals"
    return line_plot(path, lines, title=title, x=Axis(label=label), y=Axis(label="accuracy, %", end=100))


def _lengths(measurements: Sequence[Measurement], path: Path) -> Path | None:
    """Words that the verifier reads in place of the passages."""
    shown = [
        entry
        for entry in measurements
        if entry.method == SPECULATIVE and "/" not in entry.task and "rationale_words" in entry.extra
    ]
    if len(shown) > _MOST_BARS:  # drafters are compared: of each what all sets say together
        shown = [entry for entry in shown if entry.task == OVERALL]
    if not shown:
        return None
    figure, axes = new_figure(7.2, 1.4 + 0.5 * len(shown))
    for style, name in enumerate(("passage_words", "rationale_words")):
        values = [_figure(entry, name) for entry in shown]
        places = [index + 0.4 * style - 0.2 for index in range(len(shown))]
        what = "its passages" if name == "passage_words" else "its rationale"
        axes.barh(places, values, 0.36, color=COLOURS[style], hatch=HATCHES[style], label=what)
        for place, value in zip(places, values, strict=True):
            axes.text(value, place, f" {value:.0f}", va="center", fontsize=8)
    labels = [f"{entry.task}\n{entry.model}" for entry in shown]
    return _finish(figure, axes, path, labels, "words of a draft", "What a verifier need not read")


def _whole(measurements: Sequence[Measurement]) -> str | None:
    """All sets together, or the only one."""
    tasks = {entry.task for entry in measurements if "/" not in entry.task}
    return OVERALL if OVERALL in tasks else next(iter(sorted(tasks)), None)


def _accuracies(measurements: Sequence[Measurement], path: Path) -> Path | None:
    """All methods over all sets, or on the only one."""
    task = _whole(measurements)
    remedied = f"{REMEDIED}/{ALL_SETS if task == OVERALL else task}"
    shown = [
        entry
        for entry in measurements
        if entry.accuracy is not None
        and (entry.task == task or (entry.task == remedied and entry.method != SPECULATIVE))
    ]
    if not shown:
        return None
    shown.sort(key=lambda entry: -(entry.accuracy or 0.0))
    figure, axes = new_figure(7.2, 1.4 + 0.42 * len(shown))
    for style, what in enumerate(("Speculative RAG", "standard RAG")):
        own = [
            (place, entry)
            for place, entry in enumerate(shown)
            if entry.method.startswith(SPECULATIVE) == (style == 0)
        ]
        if not own:
            continue
        values = [100 * (entry.accuracy or 0.0) for _, entry in own]
        low = [max(v - 100 * _figure(e, "accuracy_low"), 0.0) for v, (_, e) in zip(values, own, strict=True)]
        high = [
            max(100 * _figure(e, "accuracy_high") - v, 0.0) for v, (_, e) in zip(values, own, strict=True)
        ]
        places = [place for place, _ in own]
        axes.barh(places, values, 0.7, color=COLOURS[style], hatch=HATCHES[style], label=what)
        axes.errorbar(
            values, places, xerr=[low, high], fmt="none", color="#333333", capsize=2.5, linewidth=1.1
        )
    labels = [f"{entry.method}\n{entry.model}, n={entry.n}" for entry in shown]
    return _finish(figure, axes, path, labels, "accuracy, %, with 95 % intervals", f"Answers: {task}")


def _frontier(measurements: Sequence[Measurement], path: Path) -> Path | None:
    """Accuracy over seconds: nothing below the line is worth its time."""
    task = _whole(measurements)
    timed = [
        entry
        for entry in measurements
        if entry.task == task and entry.accuracy is not None and _figure(entry, "mean_ms")
    ]
    if len(timed) < 2:
        return None
    timed.sort(key=lambda entry: (_figure(entry, "mean_ms"), -(entry.accuracy or 0.0)))
    best: list[Measurement] = []
    for entry in timed:
        if not best or (entry.accuracy or 0.0) > (best[-1].accuracy or 0.0):
            best.append(entry)
    figure, axes = new_figure(9.6, 1.6 + 0.24 * max(len(timed), 14))
    axes.step(*_places(best), where="post", color="#888888", linewidth=1.2, label="the most for the time")
    for style, what in enumerate(("Speculative RAG", "standard RAG")):
        own = [entry for entry in timed if entry.method.startswith(SPECULATIVE) == (style == 0)]
        axes.plot(*_places(own), "os"[style], color=COLOURS[style], markersize=6, linestyle="", label=what)
    for number, entry in enumerate(timed, 1):
        at = (_figure(entry, "mean_ms") / 1e3, 100 * (entry.accuracy or 0.0))
        axes.annotate(str(number), at, xytext=(4, 4), textcoords="offset points", fontsize=7)
        label = f"{number}  {entry.method}, {entry.model}"
        bold = "bold" if entry in best else "normal"
        axes.text(
            1.02,
            1 - number / (len(timed) + 1),
            label,
            transform=axes.transAxes,
            fontsize=6.5,
            fontweight=bold,
        )
    axes.set_xscale("log")
    axes.set_xlabel("seconds a question, mean")
    axes.set_ylabel("accuracy, %")
    axes.margins(x=0.1, y=0.1)
    axes.legend(loc="upper left", frameon=False, fontsize=8)
    axes.set_title(f"Answers: {task}, n={max(entry.n for entry in timed)}", loc="left", fontsize=11)
    return save_figure(figure, path)


def _places(entries: Sequence[Measurement]) -> tuple[list[float], list[float]]:
    """Seconds and accuracy in percent."""
    return [_figure(each, "mean_ms") / 1e3 for each in entries], [
        100 * (each.accuracy or 0) for each in entries
    ]


def _finish(figure: Any, axes: Any, path: Path, labels: Sequence[str], label: str, title: str) -> Path:
    """Bars from above, with their names."""
    axes.set_yticks(range(len(labels)), labels, fontsize=7)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.set_xlabel(label)
    axes.margins(x=0.1)
    # Between title and bars, for there is no place among bars of any length.
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2, ncols=2, frameon=False, fontsize=8
    )
    axes.set_title(title, loc="left", fontsize=11, pad=20)
    return save_figure(figure, path)


def _figure(entry: Measurement, name: str) -> float:
    value = entry.extra.get(name)
    return float(value) if isinstance(value, int | float) else 0.0
