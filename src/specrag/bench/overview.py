"""The first table of a page: one figure for each method and task."""

from __future__ import annotations

from collections.abc import Sequence

from specrag.bench.measurement import OVERALL, Measurement


def overviews(measurements: Sequence[Measurement]) -> list[str]:
    """A table of speed-ups for each baseline that methods were compared with on several tasks, as Markdown.

    Methods are rows, tasks are columns, the mean over tasks first. A ratio that is not statistically "never slower"
    is not marked here: the long table has the intervals.

    Args:
        measurements: of one section.
    """
    tables = []
    for baseline in dict.fromkeys(entry.baseline for entry in measurements if entry.baseline is not None):
        against = [
            entry for entry in measurements if entry.baseline == baseline and entry.speedup is not None
        ]
        tasks = sorted(
            dict.fromkeys(_last(entry.task) for entry in against), key=lambda name: name != OVERALL
        )
        # A cell holds one figure: models and kinds of numbers side by side need the long table.
        if len(tasks) < 3 or len({(entry.model, entry.dtype, entry.device) for entry in against}) > 1:
            continue
        tables.append(f"Speed-up over `{baseline}`:\n\n{_table(against, tasks)}")
    return tables


def as_table(lines: Sequence[Sequence[str]]) -> str:
    """Cells as a table of Markdown; the second line is the rule."""
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def mark_error(entry: Measurement, text: str) -> str:
    """``text`` struck through if the speed-up is above its ceiling."""
    return f"~~{text}~~ error" if entry.above_ceiling else text


def _table(entries: Sequence[Measurement], tasks: Sequence[str]) -> str:
    cells = {(entry.method, _last(entry.task)): _figure(entry) for entry in entries}
    lines = [["method", *tasks], ["---", *("---:" for _ in tasks)]]
    for method in dict.fromkeys(entry.method for entry in entries):
        lines.append([method, *(cells.get((method, task), "") for task in tasks)])
    return as_table(lines)


def _last(task: str) -> str:
    return task.rsplit("/", 1)[-1]


def _figure(entry: Measurement) -> str:
    text = mark_error(entry, f"{entry.speedup:.2f}")
    return f"{text} (simulated)" if entry.simulated else text
