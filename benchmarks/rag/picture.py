"""Draws who answers how soon: ``python -m benchmarks.rag.picture PICTURE RECORD ...``.

The records are ``answers.jsonl`` of :mod:`benchmarks.rag`, gzipped or not, all with passages or all without. Shown are
the cells of one client: for each model and draw a bar for each method, the median time to the first token in front of
that to the end of the answer.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.rag.subjects import LLAMA, OPENVINO, PLAIN_BF16
from benchmarks.records import read_records
from benchmarks.server.subjects import ADAPTIVE, PLAIN, VLLM
from specrag.bench.plots import check_plotting, new_figure, save_figure

_PEERS = {OPENVINO: "OpenVINO, 8 bits", VLLM: "vLLM, bf16", LLAMA: "llama.cpp, 8 bits"}
_NAMES = {ADAPTIVE: "specrag, 8 bits", **_PEERS}
#: Without passages engines are compared, and nobody guesses.
_ALONE = {PLAIN: "specrag, 8 bits", PLAIN_BF16: "specrag, bf16", **_PEERS}
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
    cells: dict[tuple[str, str, str], dict[str, list[Mapping[str, Any]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for one in records:
        setting = one["setting"]
        names = _ALONE if setting.get("alone") else _NAMES
        if one["clients"] == 1 and one["method"] in names:
            key = setting["model"], one["draw"], str(sorted(setting.items()))
            cells[key][names[one["method"]]].append(one)
    found = {}
    for (model, draw, _), methods in sorted(cells.items(), key=lambda cell: _size(cell[1])):
        found[model, draw] = {  # the largest comes last, and stays
            name: (median(one["first"] for one in own), median(one["total"] for one in own))
            for name, own in methods.items()
        }
    return found


def _size(methods: Mapping[str, Sequence[Any]]) -> tuple[int, int]:
    return len(methods), sum(map(len, methods.values()))


def draw(path: Path, shown: Bars) -> Path:
    """A panel for each model and draw, in which shorter is better."""
    models = sorted({model for model, _ in shown}, reverse=True)
    draws = [one for one in _DRAWS if any(name == one for _, name in shown)]
    figure, _ = new_figure(4.5 + 2.25 * len(draws), 1.1 + 2.0 * len(models))
    figure.clear()
    panels = figure.subplots(len(models), len(draws), squeeze=False)
    for row, model in zip(panels, models, strict=True):
        for axes, name in zip(row, draws, strict=True):
            title = f"{model}, {_DRAWS[name]}" if len(draws) > 1 else model
            _panel(axes, shown.get((model, name), {}), title)
    figure.legend(
        *panels[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False
    )
    return save_figure(figure, path)


def _panel(axes: Any, methods: Mapping[str, tuple[float, float]], title: str) -> None:
    names = sorted(methods, key=lambda name: -methods[name][1])
    firsts, wholes = ([methods[name][place] for name in names] for place in (0, 1))
    axes.barh(range(len(names)), firsts, color=_FIRST, label="to the first token")
    rest = [whole - first for first, whole in zip(firsts, wholes, strict=True)]
    axes.barh(range(len(names)), rest, left=firsts, color=_REST, label="to the end of the answer")
    for place, whole in enumerate(wholes):
        axes.text(whole, place, f" {whole:.2g}", va="center")
    axes.set_yticks(range(len(names)), names)
    axes.set_xlim(0, 1.12 * max(wholes, default=1.0))
    axes.set_xlabel("seconds, median")
    axes.set_title(title, loc="left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


if __name__ == "__main__":
    main()
