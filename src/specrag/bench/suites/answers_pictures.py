"""The pictures of the answers suite: accuracy over drafts and passages (Figure 4), rationale lengths (Figure 2)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specrag.bench.measurement import OVERALL, Measurement
from specrag.bench.plots import COLOURS, HATCHES, Axis, Series, line_plot, new_figure, save_figure
from specrag.bench.suites.answers_data import SIZES
from specrag.bench.suites.answers_figures import SPECULATIVE


def draw(measurements: Sequence[Measurement], folder: Path) -> list[Path]:
    """All pictures that the measurements allow."""
    drawn = [
        _over(measurements, folder / "answers-drafts.png", "drafts", "m", "drafts (m)"),
        _over(measurements, folder / "answers-passages.png", "passages", "k", "passages a draft (k)"),
        _lengths(measurements, folder / "answers-lengths.png"),
        _accuracies(measurements, folder / "answers-accuracy.png"),
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
    return line_plot(path, lines, title=title, x=Axis(label=label), y=Axis(label="accuracy, %"))


def _lengths(measurements: Sequence[Measurement], path: Path) -> Path | None:
    """Words that the verifier reads in place of the passages."""
    shown = [
        entry
        for entry in measurements
        if entry.method == SPECULATIVE and "/" not in entry.task and "rationale_words" in entry.extra
    ]
    if not shown:
        return None
    figure, axes = new_figure(7.2, 1.4 + 0.5 * len(shown))
    for index, entry in enumerate(shown):
        for place, name in ((-0.2, "passage_words"), (0.2, "rationale_words")):
            style = 0 if name == "passage_words" else 1
            value = _figure(entry, name)
            axes.barh(index + place, value, 0.36, color=COLOURS[style], hatch=HATCHES[style])
            axes.text(value, index + place, f" {value:.0f}", va="center", fontsize=8)
    axes.set_yticks(range(len(shown)), [f"{entry.task}\n{entry.model}" for entry in shown], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("words a draft: its passages (blue), its rationale (orange, hatched)")
    axes.set_title("What a verifier need not read", loc="left", fontsize=11)
    return save_figure(figure, path)


def _accuracies(measurements: Sequence[Measurement], path: Path) -> Path | None:
    """All methods over all sets, or on the only one."""
    tasks = {entry.task for entry in measurements if "/" not in entry.task}
    task = OVERALL if OVERALL in tasks else next(iter(sorted(tasks)), None)
    shown = [entry for entry in measurements if entry.task == task and entry.accuracy is not None]
    if not shown:
        return None
    shown.sort(key=lambda entry: -(entry.accuracy or 0.0))
    figure, axes = new_figure(7.2, 1.4 + 0.3 * len(shown))
    for index, entry in enumerate(shown):
        value = 100 * (entry.accuracy or 0.0)
        around = [
            [max(value - 100 * _figure(entry, "accuracy_low"), 0.0)],
            [max(100 * _figure(entry, "accuracy_high") - value, 0.0)],
        ]
        own = entry.method.startswith(SPECULATIVE)
        axes.barh(index, value, 0.7, color=COLOURS[0 if own else 1], hatch=HATCHES[0 if own else 1])
        axes.errorbar(value, index, xerr=around, color="#333333", capsize=2.5, linewidth=1.1)
    labels = [f"{entry.method}  ({entry.model}, n={entry.n})" for entry in shown]
    axes.set_yticks(range(len(shown)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("accuracy, %, with 95 % intervals; Speculative RAG blue, standard RAG orange and hatched")
    axes.set_title(f"Answers: {task}", loc="left", fontsize=11)
    return save_figure(figure, path)


def _figure(entry: Measurement, name: str) -> float:
    value = entry.extra.get(name)
    return float(value) if isinstance(value, int | float) else 0.0
