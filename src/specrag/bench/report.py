"""The Markdown page: tables of the measurements, with everything that a reader needs to trust them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specrag.bench.load import BUSY_SHARE, LoadNote
from specrag.bench.measurement import CEILING, OVERALL, Measurement
from specrag.bench.statistics import Interval, never_slower

_INTERVAL_KEYS = ("milliseconds", "milliseconds_low", "milliseconds_high")


@dataclass(frozen=True, kw_only=True)
class Page:
    """The parts of the page around the tables.

    Args:
        title: the heading.
        summary: one or two sentences on what is measured.
        machine: one line, `machine.Machine.describe`.
        load: how busy the machine was; None if it was not watched.
        pictures: file names of the plots, relative to the page.
        failures: runs that failed, one line each.
    """

    title: str
    summary: str
    machine: str
    load: LoadNote | None = None
    pictures: Sequence[str] = ()
    failures: Sequence[str] = ()


def render(page: Page, measurements: Sequence[Measurement]) -> str:
    """The page as Markdown.

    A task named ``section/rest`` goes into the table ``section``, after an overview of its speed-ups. A table shows a
    column only if one of its rows has the figure.
    """
    parts = [f"# {page.title}", page.summary, _facts(page, measurements)]
    parts += [f"![{name}]({name})" for name in page.pictures]
    for section, rows in _sections(measurements).items():
        parts += [f"## {section}"] if section else []
        parts += [*overviews(rows), _table(rows, section)]
    if any(entry.speedup is not None for entry in measurements):
        parts.append(
            "Speed-up: the baseline's time / the method's, each the median over repeats, with the 95 % "
            "interval of a bootstrap over rows and repeats. Never slower: at least 0.97, with an upper limit "
            "of at least 1."
        )
    if any(entry.above_ceiling for entry in measurements):
        parts.append(
            "Struck through: above its ceiling, which no method can exceed. An error of measurement, as one run beside "
            "a pause of the machine gives it; not a result."
        )
    if page.failures:
        parts.append("## Failures\n\n" + "\n".join(f"- {_cell(line)}" for line in page.failures))
    return "\n\n".join(part for part in parts if part) + "\n"


def _facts(page: Page, measurements: Sequence[Measurement]) -> str:
    lines = [f"Machine: {page.machine}."]
    for name in ("command", "version", "date", "model"):
        values = dict.fromkeys(str(value) for e in measurements if (value := getattr(e, name)) is not None)
        if values:
            shown = ", ".join(f"`{value}`" for value in values)
            lines.append(f"{name.capitalize()}: {shown}.")
    if page.load is not None:
        lines.append(_load_line(page.load))
    return "\n".join(f"- {line}" for line in lines)


def _load_line(load: LoadNote) -> str:
    before = "not measured" if load.before is None else f"{load.before:.0%}"
    worst = "not measured" if load.worst is None else f"{load.worst:.0%}"
    line = f"Processor share of other processes: {before} before the run, at most {worst} during it."
    if load.is_busy:
        line += (
            f" **The machine was busy**: others used more than {BUSY_SHARE:.0%} in {load.busy} of "
            f"{load.runs} timed runs. Measure again on a quiet machine before believing a ratio."
        )
    return line


def _sections(measurements: Sequence[Measurement]) -> dict[str, list[Measurement]]:
    sections: dict[str, list[Measurement]] = {}
    for entry in measurements:
        section, slash, _ = entry.task.partition("/")
        sections.setdefault(section if slash else "", []).append(entry)
    return sections


@dataclass(frozen=True)
class _Column:
    heading: str
    cell: Callable[[Measurement], str]


def _table(rows: Sequence[Measurement], section: str) -> str:
    columns = [*_columns(section), *_extra_columns(rows)]
    cells = [[column.cell(row) for column in columns] for row in rows]
    kept = [index for index in range(len(columns)) if any(line[index] for line in cells)]
    if len({row.model for row in rows}) == 1:
        kept = [index for index in kept if columns[index].heading != "model"]
    texts = {"task", "method", "baseline", "model", "dtype", "device"}
    rule = ["---" if columns[index].heading in texts else "---:" for index in kept]
    lines = [[columns[index].heading for index in kept], rule]
    lines += [[line[index] for index in kept] for line in cells]
    return as_table(lines)


def _columns(section: str) -> list[_Column]:
    def task(row: Measurement) -> str:
        name = row.task.removeprefix(f"{section}/") if section else row.task
        return f"**{name}**" if name == OVERALL else name

    return [
        _Column("task", lambda row: _cell(task(row))),
        _Column("method", lambda row: _cell(row.method)),
        _Column("baseline", lambda row: _cell(row.baseline or "")),
        _Column("model", lambda row: _cell(row.model or "")),
        _Column("dtype", lambda row: row.dtype or ""),
        _Column("device", lambda row: _cell(row.device)),
        _Column("n", lambda row: f"{row.n:,}"),
        _Column("speed-up", _speedup),
        _Column("ceiling", lambda row: _simulated(row, _number(row.ceiling))),
        _Column("never slower", _verdict),
        _Column("tokens/s", lambda row: _simulated(row, _number(row.tokens_per_second))),
        _Column("ms", _milliseconds),
        _Column("MAT", lambda row: _simulated(row, _number(row.mat))),
        _Column("acceptance", lambda row: _share(row, row.acceptance)),
        _Column("acceptance by source", _by_source),
        _Column("identical", lambda row: _share(row, row.identical)),
        _Column("accuracy", lambda row: _share(row, row.accuracy)),
    ]


def _extra_columns(rows: Sequence[Measurement]) -> list[_Column]:
    known = {CEILING, *_INTERVAL_KEYS}
    names = dict.fromkeys(name for row in rows for name in row.extra if name not in known)

    def column(name: str) -> _Column:
        return _Column(_heading(name), lambda row: _extra_cell(row, row.extra.get(name)))

    return [column(name) for name in names]


_UNITS = {"ms": "ms", "mib": "MiB", "gb_s": "GB/s", "gflop_s": "GFLOP/s", "gop_s": "GOP/s"}


def _heading(name: str) -> str:
    """Turn ``first_token_ms`` into ``first token, ms``."""
    for suffix, unit in _UNITS.items():
        if name.endswith(f"_{suffix}"):
            return f"{name.removesuffix(f'_{suffix}').replace('_', ' ')}, {unit}"
    return _cell(name.replace("_", " "))


def _speedup(row: Measurement) -> str:
    if row.speedup is None:
        return ""
    text = f"{row.speedup:.2f}"
    if row.speedup_low is not None and row.speedup_high is not None:
        text += f" ({row.speedup_low:.2f} to {row.speedup_high:.2f})"
    return _simulated(row, mark_error(row, text))


def _verdict(row: Measurement) -> str:
    if row.speedup is None or row.speedup_low is None or row.speedup_high is None or row.above_ceiling:
        return ""
    return "yes" if never_slower(Interval(row.speedup, row.speedup_low, row.speedup_high)) else "**no**"


def _milliseconds(row: Measurement) -> str:
    value, low, high = (row.extra.get(name) for name in _INTERVAL_KEYS)
    text = _number(value)
    if text and low is not None and high is not None:
        text += f" ({_number(low)} to {_number(high)})"
    return _simulated(row, text)


def _share(row: Measurement, value: object) -> str:
    if not isinstance(value, int | float):
        return ""
    # 99.97 % must not look like 100 %.
    text = f"{value:.0%}" if value in (0, 1) else f"{min(value, 0.999) if value < 1 else value:.1%}"
    return _simulated(row, text)


def _by_source(row: Measurement) -> str:
    shares = (row.acceptance_by_source or {}).items()
    return ", ".join(f"{_cell(source)} {_share(row, share)}" for source, share in shares)


def _extra_cell(row: Measurement, value: object) -> str:
    text = _number(value)
    return _simulated(row, text) if isinstance(value, float) else text


def _simulated(row: Measurement, text: str) -> str:
    return f"{text} (simulated)" if text and row.simulated else text


def _number(value: object) -> str:
    """Three significant digits, thousands with commas."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        if value == 0 or abs(value) >= 100:
            return f"{value:,.0f}"
        return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 1 else f"{value:.3g}"
    return _cell(str(value))


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def overviews(measurements: Sequence[Measurement]) -> list[str]:
    """A Markdown table of speed-ups for each baseline that methods were compared with on several tasks.

    Methods are rows and tasks are columns, with the mean over tasks first. A ratio that is not statistically "never
    slower" is not marked here: the long table has the intervals.

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
        # A cell holds one figure, so several models, dtypes or devices need the long table.
        if len(tasks) < 3 or len({(entry.model, entry.dtype, entry.device) for entry in against}) > 1:
            continue
        tables.append(f"Speed-up over `{baseline}`:\n\n{_overview_table(against, tasks)}")
    return tables


def as_table(lines: Sequence[Sequence[str]]) -> str:
    """Format cells as a Markdown table; the second line is the rule."""
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def mark_error(entry: Measurement, text: str) -> str:
    """``text`` struck through if the speed-up is above its ceiling."""
    return f"~~{text}~~ error" if entry.above_ceiling else text


def _overview_table(entries: Sequence[Measurement], tasks: Sequence[str]) -> str:
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
