"""What a suite is, the context it measures in, and the selection of its tasks and methods for a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol, runtime_checkable

from specrag.bench.interleave import Clock, Plan, Row, first_rows, interleave
from specrag.bench.load import LoadMonitor
from specrag.bench.machine import Machine
from specrag.bench.measurement import Extra, Measurement
from specrag.bench.progress import Progress
from specrag.bench.records import Record, RecordStore
from specrag.bench.summary import Summary, summarise
from specrag.checks import nearest
from specrag.errors import InputError


class Selection:
    """Selects the rows whose task matches the user's patterns, and the matching methods of each.

    Args:
        tasks, methods: patterns of names, as in a shell (``quality/*``), one of which has to match; none for all.
    """

    def __init__(self, tasks: Sequence[str] = (), methods: Sequence[str] = ()) -> None:
        self.tasks = tuple(tasks)
        self.methods = tuple(methods)
        self._seen_tasks: dict[str, None] = {}
        self._seen_methods: dict[str, None] = {}

    def of(self, rows: Iterable[Row]) -> list[Row]:
        """The rows to run, each with the methods to run on it."""
        chosen = []
        for row in rows:
            self._seen_tasks[row.task] = None
            self._seen_methods |= dict.fromkeys(row.methods)
            methods = tuple(method for method in row.methods if _matches(method, self.methods))
            if methods and _matches(row.task, self.tasks):
                chosen.append(replace(row, methods=methods))
        return chosen

    def check(self) -> None:
        """Check that every pattern matched. Call it when all rows have been seen.

        Raises:
            InputError: a pattern matched none of them; the message lists the names.
        """
        for option, patterns, seen in (
            ("--task", self.tasks, self._seen_tasks),
            ("--method", self.methods, self._seen_methods),
        ):
            for pattern in patterns:
                if not any(_matches(name, (pattern,)) for name in seen):
                    near = nearest(pattern, seen)
                    hint = f"; did you mean {near}?" if near else ""
                    raise InputError(option, pattern, f"it matches none of {', '.join(seen)}{hint}")


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


@dataclass(frozen=True, kw_only=True)
class BenchContext:
    """Everything that a suite needs from outside, and shortcuts that fill it in.

    Args:
        suite: the suite's name.
        quick: answer within a minute on two cores, instead of the full run.
        data: folder of the user's data, or None; see `data.load_text` and its neighbours.
        out: folder for the results.
        model: the target model's name.
        device: torch's name of the device.
        repeats: the user's choice of timed runs of each method on a row, or None for the suite's own.
        rows: the user's limit on the rows of each task, or None for all.
        selection: the user's choice of tasks and methods.
        adapters: the user's folders of RAG drafters to compare.
        dtype: the user's choice of how the models hold their weights.
        command, version, date: what goes into every measurement.
        machine: the machine, described.
        records: the open store.
        clock, load, progress: injected, so that tests are deterministic.
    """

    suite: str
    quick: bool
    data: Path | None
    out: Path
    model: str
    device: str
    repeats: int | None
    rows: int | None = None
    selection: Selection = field(default_factory=Selection)
    adapters: tuple[Path, ...] = ()
    dtype: str = "bf16"
    command: str
    version: str
    date: str
    machine: Machine
    records: RecordStore
    clock: Clock
    load: LoadMonitor
    progress: Progress

    def plan(self, repeats: int, *, warmups: int = 1, warm_each_row: bool = True) -> Plan:
        """A plan with the suite's own number of repeats, unless the user chose another."""
        return Plan(repeats=self.repeats or repeats, warmups=warmups, warm_each_row=warm_each_row)

    def measure(self, label: str, rows: Sequence[Row], plan: Plan) -> list[Record]:
        """Run the rows interleaved (`interleave.interleave`); recorded runs are not run again.

        If the user limits the run, only the first rows of each task run, and only the chosen tasks and methods.
        """
        rows = self.selection.of(rows)
        return interleave(
            rows if self.rows is None else first_rows(rows, self.rows, self.records),
            plan,
            label=label,
            records=self.records,
            clock=self.clock,
            load=self.load,
            progress=self.progress,
        )

    def summarise(
        self,
        records: Sequence[Record],
        *,
        baselines: Sequence[str],
        dtype: str | None,
        model: str | None = None,
        overall: bool = True,
        simulated: bool = False,
        extra: Callable[[Summary], Mapping[str, Extra]] | None = None,
    ) -> list[Measurement]:
        """Summarise records (`summary.summarise`) as measurements.

        Args:
            model: the model's name, if it is not the context's.
            extra: returns more figures for a summary, such as its bound.
        """
        return [
            replace(
                self.measurement(
                    task=summary.task,
                    method=summary.method,
                    n=summary.n,
                    baseline=summary.baseline,
                    model=model or self.model,
                    dtype=dtype,
                    simulated=simulated,
                    extra={**summary.extra, **(extra(summary) if extra is not None else {})},
                ),
                speedup=None if summary.speedup is None else summary.speedup.value,
                speedup_low=None if summary.speedup is None else summary.speedup.low,
                speedup_high=None if summary.speedup is None else summary.speedup.high,
                tokens_per_second=summary.tokens_per_second,
                mat=summary.mat,
                acceptance=summary.acceptance,
                acceptance_by_source=summary.acceptance_by_source,
                identical=summary.identical,
                accuracy=summary.accuracy,
            )
            for summary in summarise(records, baselines=baselines, overall=overall)
        ]

    def measurement(
        self,
        *,
        task: str,
        method: str,
        n: int,
        baseline: str | None = None,
        model: str | None = None,
        dtype: str | None = None,
        simulated: bool = False,
        extra: Mapping[str, Extra] | None = None,
    ) -> Measurement:
        """A measurement of this run, without a ratio (`summarise` adds ratios)."""
        return Measurement(
            suite=self.suite,
            task=task,
            method=method,
            baseline=baseline,
            model=model,
            dtype=dtype,
            device=self.device,
            n=n,
            simulated=simulated,
            command=self.command,
            version=self.version,
            date=self.date,
            extra=extra or {},
        )


class Suite(Protocol):
    """A group of measurements with a name on the command line."""

    @property
    def name(self) -> str:
        """The word after ``specrag bench``."""
        ...

    @property
    def summary(self) -> str:
        """One or two sentences for the page: what is measured against what."""
        ...

    def run(self, context: BenchContext) -> Iterator[Measurement]:
        """Measure, and yield the figures."""
        ...


@runtime_checkable
class Illustrated(Protocol):
    """A suite that draws its own pictures; others get bars of their speed-ups."""

    def pictures(self, measurements: Sequence[Measurement], folder: Path) -> Sequence[Path]:
        """Draw into ``folder`` and return the files, named after the suite; see `plots`."""
        ...
