"""Draws who answers how soon: ``python -m benchmarks.rag.picture PICTURE RECORD ...``.

The records are ``answers.jsonl`` of :mod:`benchmarks.rag`, gzipped or not. Shown are the cells of one client: for each
model and draw a bar for each method, the median time to the first token in front of that to the end of the answer.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.rag.subjects import LLAMA, OPENVINO
from benchmarks.records import read_records
from benchmarks.server.subjects import ADAPTIVE, VLLM
from specrag.bench.plots import check_plotting, new_figure, save_figure

_NAMES = {
    ADAPTIVE: "specrag, 8 bits",
    OPENVINO: "OpenVINO, 8 bits",
    VLLM: "vLLM, bf16",
    LLAMA: "llama.cpp, 8 bits",
}
_DRAWS = {"uniform": "each question once", "zipf": "by Zipf's law"}
_FIRST, _REST = "#1f4e79", "#9dc3e6"

#: Of a model and a draw: by method, the median seconds to the first token and to the end.
Bars = Mapping[tuple[str, str], Mapping[str, tuple[float, float]]]


def main() -> None:
    """Write the picture."""
    picture, *records = map(Path, sys.argv[1:])
    check_plotting()
    draw(picture, bars([one for path in records for one in read_records(path)]))


def bars(records: Sequence[Mapping[str, Any]]) -> Bars:
    """What is shown: of each model and draw the cell of one client that has most methods, and most questions."""
    cells: dict[tuple[str, str], dict[tuple[int, str], dict[str, list[Mapping[str, Any]]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for one in records:
        if one["clients"] == 1 and one["method"] in _NAMES:
            setting = one["setting"]
            shown = cells[setting["model"], one["draw"]][setting["each"], str(sorted(setting.items()))]
            shown[one["method"]].append(one)
    found = {}
    for key, settings in cells.items():
        best = max(settings.values(), key=lambda methods: (len(methods), sum(map(len, methods.values()))))
        found[key] = {
            method: (median(one["first"] for one in own), median(one["total"] for one in own))
            for method, own in best.items()
        }
    return found


def draw(path: Path, shown: Bars) -> Path:
    """A panel for each model and draw, in which shorter is better."""
    models = list(dict.fromkeys(model for model, _ in shown))
    figure, _ = new_figure(9.0, 1.1 + 2.0 * len(models))
    figure.clear()
    panels = figure.subplots(len(models), len(_DRAWS), squeeze=False)
    for row, model in zip(panels, models, strict=True):
        for axes, (name, title) in zip(row, _DRAWS.items(), strict=True):
            _panel(axes, shown.get((model, name), {}), f"{model}, {title}")
    figure.legend(
        *panels[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False
    )
    return save_figure(figure, path)


def _panel(axes: Any, methods: Mapping[str, tuple[float, float]], title: str) -> None:
    names = [method for method in reversed(_NAMES) if method in methods]
    firsts, wholes = ([methods[name][place] for name in names] for place in (0, 1))
    axes.barh(range(len(names)), firsts, color=_FIRST, label="to the first token")
    rest = [whole - first for first, whole in zip(firsts, wholes, strict=True)]
    axes.barh(range(len(names)), rest, left=firsts, color=_REST, label="to the end of the answer")
    for place, whole in enumerate(wholes):
        axes.text(whole, place, f" {whole:.2g}", va="center")
    axes.set_yticks(range(len(names)), [_NAMES[name] for name in names])
    axes.set_xlim(0, 1.12 * max(wholes, default=1.0))
    axes.set_xlabel("seconds, median")
    axes.set_title(title, loc="left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


if __name__ == "__main__":
    main()
