"""What every training run writes beside its weights: curves, and a card that documents the run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrag.artifacts import atomic_write
from specrag.bench import Axis, Series, line_plot
from specrag.errors import SpecragError
from specrag.training.files import write_errors

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

CARD, CURVE, LOSS = "README.md", "training.jsonl", "loss.png"


def check_plotting() -> None:
    """Fail before hours of training, not after them.

    Raises:
        SpecragError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise SpecragError(
            "train: matplotlib, which draws the curves, is not installed: install specrag[train]"
        )


def write_history(out: Path, history: Sequence[DataclassInstance]) -> None:
    """Write measurements as JSON lines, to :data:`CURVE`.

    Raises:
        SpecragError: the disk refuses.
    """
    with write_errors(out, "curves"):
        atomic_write(out / CURVE, "".join(f"{json.dumps(asdict(each))}\n" for each in history).encode())


def draw(
    path: Path, series: Mapping[str, Sequence[tuple[float, float]]], *, title: str, x: str, y: str
) -> None:
    """Draw curves over training.

    Args:
        series: points by curve name; a curve without points is left out.
        x, y: labels of the axes.

    Raises:
        SpecragError: the disk refuses.
    """
    curves = [
        Series(label=name, x=[point[0] for point in points], y=[point[1] for point in points])
        for name, points in series.items()
        if points
    ]
    with write_errors(path.parent, "curves"):
        line_plot(path, curves, title=title, x=Axis(label=x), y=Axis(label=y))


def write_card(out: Path, parts: Sequence[str], command: str) -> None:
    """Write the card from its Markdown parts, with the command that repeats the run at the end.

    Raises:
        SpecragError: the disk refuses.
    """
    with write_errors(out, "card"):
        text = "\n\n".join([*parts, f"## Command\n\n```sh\n{command}\n```\n"])
        atomic_write(out / CARD, text.encode())


def settings_table(title: str, settings: Mapping[str, Any]) -> str:
    """A part of a card: a table of settings under a title."""
    rows = "\n".join(f"| {key} | {value} |" for key, value in settings.items())
    return f"## {title}\n\n| setting | value |\n|---|---|\n{rows}"
