"""Plots of measurements: bars of speed-ups, and lines of anything over anything, with their intervals.

The colours are those of Okabe and Ito, which colour-blind readers can tell apart; lines also differ in marker and
dashes, so that they can be told apart in a grey print.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrag.bench.measurement import OVERALL, Measurement
from specrag.errors import InputError, SpecragError
from specrag.extras import MissingPackage, needed_by

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DASHES = ("-", "--", "-.", ":", "-", "--", "-.")
HATCHES = ("", "//", "..", "xx", "\\\\", "++", "oo")
_DPI = 150
_BAR_INCHES = 0.26
_FEW_LINES = 6  # with more lines, the legend goes beside the plot


@dataclass(frozen=True, kw_only=True)
class Axis:
    """An axis: its label with the unit, whether it is logarithmic, and its end if that is not set by the points."""

    label: str
    log: bool = False
    end: float | None = None


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line: points and, if known, the ends of their intervals, all of the same length.

    Args:
        reference: draw it thin and grey, as for a floor or a bound.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    reference: bool = False

    def __post_init__(self) -> None:
        if not self.x:
            raise InputError("series", self.label, "give at least one point")
        for values in (self.y, self.low, self.high):
            if values is not None and len(values) != len(self.x):
                raise InputError("series", self.label, "give as many y values as x values")


def check_plotting() -> None:
    """Fail before hours of measuring, not after them.

    Raises:
        SpecragError: matplotlib is not installed.
    """
    try:
        with needed_by("bench", "bench"):
            import matplotlib  # noqa: F401
    except MissingPackage as error:
        raise SpecragError(f"{error} or use --no-plots") from error


def line_plot(path: Path, series: Sequence[Series], *, title: str, x: Axis, y: Axis) -> Path:
    """Draw lines with shaded intervals to ``path`` (PNG or SVG by its suffix)."""
    figure, axes = new_figure(7.2, 4.4)
    number = 0
    for line in series:
        if line.reference:
            axes.plot(line.x, line.y, color="#777777", linewidth=1.2, linestyle=(0, (2, 2)), label=line.label)
            continue
        again, style = divmod(number, len(COLOURS))
        number += 1
        axes.plot(
            line.x,
            line.y,
            color=COLOURS[style],
            marker=_MARKERS[style],
            linestyle=_DASHES[style],
            markersize=5,
            fillstyle="none" if again else "full",
            label=line.label,
        )
        if line.low is not None and line.high is not None:
            axes.fill_between(line.x, line.low, line.high, color=COLOURS[style], alpha=0.18, linewidth=0)
    for axis, name in ((x, "x"), (y, "y")):
        getattr(axes, f"set_{name}label")(axis.label)
        if axis.log:
            getattr(axes, f"set_{name}scale")("log", base=2 if name == "x" else 10)
    if x.log:
        _plain_ticks(axes, sorted({point for line in series for point in line.x}))
    if y.log:
        _plain_log_ticks(axes)
    else:
        axes.set_ylim(0, y.end)
    axes.set_title(title, loc="left", fontsize=11)
    _legend(axes, beside=len(series) > _FEW_LINES)
    return save_figure(figure, path)


def speedup_plot(
    path: Path,
    measurements: Sequence[Measurement],
    *,
    title: str,
    names: Mapping[str, str] | None = None,
    muted: Collection[str] = (),
) -> Path | None:
    """Draw a bar for each method of each task that has a speed-up, with its interval and its ceiling.

    The ceiling (`Measurement.ceiling`) is a short upright line. If there are several baselines, models, dtypes or
    devices, the bars' names say which. With one task, the names stand beside the bars, otherwise in a legend.
    Draws nothing and returns None if no measurement has a ratio.

    Args:
        names: of methods in the picture; by default their own.
        muted: methods whose bars are grey, so that the others stand out.
    """
    shown = [entry for entry in measurements if entry.speedup is not None]
    if not shown:
        return None
    tasks = list(dict.fromkeys(entry.task for entry in shown))
    if OVERALL in tasks:
        tasks = [OVERALL, *(task for task in tasks if task != OVERALL)]
    labels = _bar_labels(shown, names or {})
    kinds = list(dict.fromkeys(labels))
    bars = len(shown)
    alone = len(tasks) == 1
    height = 1.5 + _BAR_INCHES * (bars + len(tasks)) + (0 if alone else 0.2 * ((len(kinds) + 1) // 2))
    figure, axes = new_figure(7.2, height)
    position = 0.0
    ticks = []
    limit = max(_reach(entry) for entry in shown)
    for task in tasks:
        first = position
        for entry, label in zip(shown, labels, strict=True):
            if entry.task == task:
                style = bar_style(0 if alone else kinds.index(label))
                _bar(axes, position, entry, ("#999999", "") if entry.method in muted else style, limit)
                position += 1
        ticks.append((first + position - 1) / 2)
        position += 1
    axes.axvline(1.0, color="black", linewidth=1)
    if alone:
        axes.set_yticks(range(bars), labels)
    else:
        axes.set_yticks(ticks, tasks)
    axes.set_ylim(position - 1.4, -0.6)
    axes.set_xlim(0, limit * 1.2)
    label = "speed-up over the baseline (times; 1 = equally fast), with 95 % intervals"
    if any(entry.ceiling is not None for entry in shown):
        label += "\nupright tick and “of”: the ceiling; a ratio above it is an error of measurement"
    axes.set_xlabel(label, fontsize=9, loc="right")  # long names leave little room at the left
    axes.grid(axis="y", visible=False)
    axes.set_title(title, loc="left", fontsize=11)
    if not alone:
        _bar_legend(axes, kinds)
    return save_figure(figure, path)


def _bar_labels(shown: Sequence[Measurement], names: Mapping[str, str]) -> list[str]:
    labels = []
    for entry in shown:
        parts = [names.get(entry.method, entry.method)]
        for name, prefix in (("model", ""), ("dtype", ""), ("device", ""), ("baseline", "vs ")):
            if len({getattr(other, name) for other in shown}) > 1 and getattr(entry, name):
                parts.append(f"{prefix}{getattr(entry, name)}")
        labels.append(", ".join(parts) + (" (simulated)" if entry.simulated else ""))
    return labels


def _reach(entry: Measurement) -> float:
    return max(entry.speedup or 0.0, entry.speedup_high or 0.0, entry.ceiling or 0.0, 1.0)


def bar_style(number: int) -> tuple[str, str]:
    """Colour and hatch of the bars with one name; no two of 49 names look alike."""
    again = number // len(COLOURS)
    return COLOURS[number % len(COLOURS)], HATCHES[(number + again) % len(HATCHES)]


def _bar(axes: Any, position: float, entry: Measurement, style: tuple[str, str], limit: float) -> None:
    assert entry.speedup is not None, "filtered by the caller"
    colour, hatch = style
    axes.barh(position, entry.speedup, height=0.82, color=colour, hatch=hatch, edgecolor="white", linewidth=0)
    if entry.speedup_low is not None and entry.speedup_high is not None:
        around = [[entry.speedup - entry.speedup_low], [entry.speedup_high - entry.speedup]]
        axes.errorbar(entry.speedup, position, xerr=around, color="#333333", capsize=2.5, linewidth=1.1)
    text = f"{entry.speedup:.2f}"
    if (ceiling := entry.ceiling) is not None:
        axes.plot([ceiling, ceiling], [position - 0.41, position + 0.41], color="#333333", linewidth=2)
        text += f" of {ceiling:.2f}"
    axes.text(1.03 * limit, position, text, va="center", fontsize=8, backgroundcolor="white")


def _bar_legend(axes: Any, names: Sequence[str]) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor=colour, hatch=hatch, edgecolor="white", linewidth=0, label=name)
        for name, (colour, hatch) in zip(names, map(bar_style, range(len(names))), strict=True)
    ]
    axes.figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=8)


def _legend(axes: Any, *, beside: bool = False) -> None:
    place = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0)} if beside else {}
    axes.legend(frameon=False, fontsize=8, **place)


def _plain_ticks(axes: Any, points: Sequence[float]) -> None:
    """Label the measured points themselves; powers of a base say little about 100, 1,000, 7,500."""
    from matplotlib.ticker import NullLocator

    axes.set_xticks(
        points, [f"{point:,g}" if point < 1e6 else f"{point / 1e6:g} million" for point in points]
    )
    axes.xaxis.set_minor_locator(NullLocator())


def _plain_log_ticks(axes: Any) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def new_figure(width: float, height: float) -> tuple[Any, Any]:
    """A figure independent of pyplot, which would keep it alive and choose a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.grid(color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def save_figure(figure: Any, path: Path) -> Path:
    """Write a matplotlib figure, with the same bytes each time, and return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Otherwise matplotlib writes its version and the date, and pictures would differ from run to run.
    metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
    figure.savefig(path, dpi=_DPI, metadata=metadata)
    return path
