"""What :mod:`benchmarks.answers.frontier` has recorded, as a table and as one picture."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.answers.figures import label_figures
from specrag.bench.plots import COLOURS, new_figure, save_figure
from specrag.bench.statistics import paired_bootstrap

BASELINE, CONTROL = "large", "small, best 2"
CLAIM_SETS = ("healthver", "climate-fever")
_CASCADE, _DOUBTED = "cascade", "cascade, doubted"
#: Which answer of the large model a cascade gives where it doubts.
_CASCADES = {_CASCADE: BASELINE, "cascade, best 5": "large, best 5"}
#: From which probability of Yes on an answer is taken: those of the table, and the line of the picture.
LEVELS = (0.5, 0.7, 0.8, 0.9)
_ALL_LEVELS = tuple(step / 20 for step in range(1, 20))
#: Ways as the pages name them.
_NAMES = {
    "large": "Qwen, all passages",
    "large, best 5": "Qwen, best five",
    "large, best 2": "Qwen, best two",
    "small, best 2": "SmolLM2, best two",
    "drafts": "Speculative RAG",
}

Question = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Answered:
    """How a way did on a question."""

    right: float
    seconds: float
    held: float


Ways = Mapping[str, Mapping[Question, Answered]]


def by_way(records: Sequence[Mapping[str, Any]], levels: Sequence[float] = LEVELS) -> Ways:
    """The answers of each way by question, with those of a cascade at each level."""
    found: dict[str, dict[Question, Answered]] = defaultdict(dict)
    for one in records:
        found[one["way"]][one["set"], one["id"]] = Answered(one["right"], one["seconds"], one["held"])
    saved = spared(records)
    for way, own in _CASCADES.items():
        drafted = [one for one in records if one["way"] == way and (one["set"], one["id"]) in found[own]]
        for level in levels:
            for one in drafted:
                key = one["set"], one["id"]
                found[_at(way, level)][key] = _decided(one, found[own][key], level, saved)
    return {way: answers for way, answers in found.items() if answers and way not in (*_CASCADES, _DOUBTED)}


def _at(cascade: str, level: float) -> str:
    return f"{cascade} at {level}"


def spared(records: Sequence[Mapping[str, Any]]) -> float:
    """What of a check's seconds the large model's own reading is spared, as a share: the mean where both were run.

    A cascade that doubts goes on from what its check has read.
    """
    seconds = {(one["set"], one["id"], one["way"]): one["seconds"] for one in records}
    shares = []
    for one in records:
        key = one["set"], one["id"]
        if one["way"] == _CASCADE and (*key, _DOUBTED) in seconds and (*key, BASELINE) in seconds:
            apart = one["seconds"] + seconds[(*key, BASELINE)]
            shares.append((apart - seconds[(*key, _DOUBTED)]) / one["phases"]["check"])
    return fmean(shares) if shares else 0.0


def _decided(draft: Mapping[str, Any], large: Answered, level: float, saved: float) -> Answered:
    """A cascade's answer: the draft where it is probable enough, else the large model's."""
    if draft["confidence"] >= level:
        return Answered(draft["right"], draft["seconds"], draft["held"])
    seconds = draft["seconds"] + large.seconds - saved * draft["phases"]["check"]
    return Answered(large.right, seconds, large.held)


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """By set and over all: right answers against the large model's and the small one's, and seconds."""
    ways = by_way(records)
    lines = [
        "| set | way | n | right | against large, points | against small, points | seconds | of large's "
        "| cited and held |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    sets = list(dict.fromkeys(one["set"] for one in records))
    for name in ("all", *sets) if len(sets) > 1 else sets:
        for way, answers in ways.items():
            own = {key: one for key, one in answers.items() if name in ("all", key[0])}
            if own:
                lines.append(_row(name, way, own, ways))
    return "\n".join(lines) + "\n"


def _row(name: str, way: str, own: Mapping[Question, Answered], ways: Ways) -> str:
    seconds = fmean(one.seconds for one in own.values())
    beside = [ways.get(BASELINE, {})[key].seconds for key in own if key in ways.get(BASELINE, {})]
    share = f"{seconds / fmean(beside):.2f}" if len(beside) == len(own) else ""
    cells = [
        name,
        way,
        f"{len(own)}",
        f"{100 * fmean(one.right for one in own.values()):.1f} %",
        _against(own, ways.get(BASELINE, {})) if way != BASELINE else "",
        _against(own, ways.get(CONTROL, {})) if way != CONTROL else "",
        f"{seconds:.2f}",
        share,
        f"{100 * fmean(one.held for one in own.values()):.0f} %",
    ]
    return f"| {' | '.join(cells)} |"


def _against(own: Mapping[Question, Answered], other: Mapping[Question, Answered]) -> str:
    """The paired difference with its 95 % interval."""
    both = [(one.right, other[key].right) for key, one in own.items() if key in other]
    if not both:
        return ""
    found = paired_bootstrap([a for a, _ in both], [b for _, b in both])
    return f"{100 * found.difference:+.1f} [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"


def label_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Mean recall and Matthews' correlation, by which naming always the commonest label gains nothing.

    Of the sets of claims: their labels are the same in every question, where choices are other ones each time.
    """
    claims: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for one in records:
        if one["set"] in CLAIM_SETS and "said" in one:
            claims[one["set"], one["way"]].append(one)
    if not claims:
        return ""
    lines = ["| set | way | n | right | mean recall | Matthews |", "|---|---|---:|---:|---:|---:|"]
    for (name, way), group in claims.items():
        balanced, matthews = label_figures([one["gold"] for one in group], [one["said"] for one in group])
        right = 100 * fmean(one["right"] for one in group)
        lines.append(
            f"| {name} | {way} | {len(group)} | {right:.1f} % | {100 * balanced:.1f} % | {matthews:.2f} |"
        )
    return "\n".join(lines) + "\n"


def draw(records: Sequence[Mapping[str, Any]], path: Path) -> Path | None:
    """Right answers over seconds, of the questions that every way has answered; the cascade is a line.

    Ways that were run for fewer than half of the questions are left out.
    """
    ways = by_way(records, _ALL_LEVELS)
    most = max((len(answers) for answers in ways.values()), default=0)
    ways = {way: answers for way, answers in ways.items() if 2 * len(answers) > most}
    common = set.intersection(*(set(answers) for answers in ways.values())) if ways else set()
    if not common:
        return None
    places = {
        way: (
            fmean(answers[key].seconds for key in common),
            100 * fmean(answers[key].right for key in common),
        )
        for way, answers in ways.items()
    }
    figure, axes = new_figure(7.2, 4.4)
    for cascade, colour in zip(_CASCADES, COLOURS[1::2], strict=False):
        line = [places[_at(cascade, level)] for level in _ALL_LEVELS if _at(cascade, level) in places]
        if line:
            axes.plot(*zip(*line, strict=True), color=colour, linewidth=1.6, label=f"{cascade}, by its level")
    width = max(seconds for seconds, _ in places.values())
    for way, (seconds, right) in places.items():
        if way.startswith(_CASCADE):
            continue
        colour = COLOURS[4] if way.startswith("drafts") else COLOURS[0]
        spread = 196 * sqrt(right / 100 * (1 - right / 100) / len(common))
        axes.errorbar([seconds], [right], yerr=spread, fmt="o", color=colour, capsize=3, linewidth=1.1)
        crowded = any(0 < x - seconds < width / 4 and abs(right - y) < 3 for x, y in places.values())
        axes.annotate(
            _NAMES.get(way, way),
            (seconds, right),
            xytext=(-8 if crowded else 8, -3),
            textcoords="offset points",
            horizontalalignment="right" if crowded else "left",
            fontsize=8.5,
            color=colour,
        )
    axes.set_xlabel("seconds a question, mean")
    axes.set_ylabel("right answers, %")
    axes.set_xlim(left=0)
    axes.margins(x=0.35, y=0.15)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right", frameon=False, fontsize=8.5)
    title = f"{len(common)} questions that every way has answered, each with its 95 % interval"
    axes.set_title(title, loc="left", fontsize=11)
    return save_figure(figure, path)
