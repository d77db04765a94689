"""Runs methods interleaved, row by row, so that a busy moment of the machine affects all of them alike.

Each turn draws the order anew, and every second one runs the last order backwards: who comes first, and behind whom,
is no method's lot. (In an order that only rotated, the method behind another library's slow one read its prompts in
68 ms in place of 51.) Recorded runs are not run again, so a killed bench resumes where it stopped.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from specrag.bench.load import LoadMonitor
from specrag.bench.measurement import check_method
from specrag.bench.progress import Progress
from specrag.bench.records import Outcome, Record, RecordKey, RecordStore
from specrag.errors import InputError

Clock = Callable[[], float]
"""Seconds since some start, never running backwards: ``time.perf_counter``, or a test's own."""

Trial = Callable[[], Outcome]
"""Runs a method once. On an accelerator it must wait for the device before it returns."""

_LONGEST_ERROR = 300


@dataclass(frozen=True, kw_only=True)
class Row:
    """One thing to measure all methods on: a prompt, a question, a pass with some number of rows.

    Args:
        name: unique within ``task``; part of the records' key.
        task: the group in which the row is summarised.
        methods: the methods' names, in the order of the first repeat.
        prepare: builds one trial for each method. It is called only if something is left to run, and just before that,
            so the model, the prefill and the like belong here; what it holds is freed after the row.
    """

    name: str
    task: str
    methods: tuple[str, ...]
    prepare: Callable[[], Mapping[str, Trial]]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How often to run.

    Args:
        repeats: timed runs of each method on each row.
        warmups: runs of each method that are not timed, before its first timed run on a row.
        warm_each_row: false warms up only on the first row, for rows that take long and warm the same code.
    """

    repeats: int = 3
    warmups: int = 1
    warm_each_row: bool = True

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise InputError("repeats", self.repeats, "give 1 or more")
        if self.warmups < 0:
            raise InputError("warmups", self.warmups, "give 0 or more")


def interleave(
    rows: Sequence[Row],
    plan: Plan,
    *,
    label: str,
    records: RecordStore,
    clock: Clock,
    load: LoadMonitor,
    progress: Progress,
) -> list[Record]:
    """Run every method of every row; returns all records, including failures and records of earlier runs.

    A method that raises is recorded as a failure without a time, and the others go on. If a kill left a repeat
    half done, all of its methods run again: halves from different days are not a pair.

    Args:
        label: shown by the progress bar.

    Raises:
        InputError: a method is unknown, or a row's name is used twice.
    """
    for row in rows:
        for method in row.methods:
            check_method(method)
        records.claim(row.task, row.name)
    progress.begin(label, sum(len(row.methods) for row in rows) * plan.repeats)
    warmed = False
    for index, row in enumerate(rows):
        todo = [repeat for repeat in range(plan.repeats) if not _complete(row, repeat, records)]
        run = _RowRun(row, index, records, clock, load, progress)
        run.skip(plan.repeats - len(todo))
        if todo:
            run.run(todo, plan.warmups if plan.warm_each_row or not warmed else 0)
            warmed = True
    keys = (key for row in rows for repeat in range(plan.repeats) for key in _keys(row, repeat))
    return [record for key in keys if (record := records.find(key)) is not None]


def first_rows(rows: Sequence[Row], most: int, records: RecordStore) -> list[Row]:
    """The first ``most`` rows of each task, and the rows that an earlier run has measured."""
    seen: Counter[str] = Counter()
    chosen = []
    for row in rows:
        seen[row.task] += 1
        if seen[row.task] <= most or _complete(row, 0, records):
            chosen.append(row)
    return chosen


def _keys(row: Row, repeat: int) -> list[RecordKey]:
    return [RecordKey(task=row.task, row=row.name, method=name, repeat=repeat) for name in row.methods]


def _complete(row: Row, repeat: int, records: RecordStore) -> bool:
    return all(records.find(key) is not None for key in _keys(row, repeat))


class _RowRun:
    """The runs of one row in this process."""

    def __init__(
        self,
        row: Row,
        index: int,
        records: RecordStore,
        clock: Clock,
        load: LoadMonitor,
        progress: Progress,
    ) -> None:
        self.row = row
        self.index = index
        self.records = records
        self.clock = clock
        self.load = load
        self.progress = progress
        self.errors: dict[str, str] = {}

    def skip(self, repeats: int) -> None:
        for _ in range(repeats * len(self.row.methods)):
            self.progress.advance(f"{self.row.task} {self.row.name}")

    def run(self, repeats: Sequence[int], warmups: int) -> None:
        trials = self._prepare()
        for method, trial in trials.items():
            for _ in range(warmups):
                if method not in self.errors:
                    self._attempt(method, trial)
        # A method whose warm-up failed would fail each repeat as well, perhaps slowly.
        broken = dict(self.errors)
        for repeat in repeats:
            self._run_repeat(repeat, trials, broken)

    def _prepare(self) -> Mapping[str, Trial]:
        try:
            trials = self.row.prepare()
        except Exception as error:  # any failure of a row is a result of the bench
            self.errors = dict.fromkeys(self.row.methods, _describe(error))
            return {}
        for method in self.row.methods:
            if method not in trials:
                self.errors[method] = "prepare gave no trial for this method"
        return {method: trials[method] for method in self.row.methods if method in trials}

    def _run_repeat(self, repeat: int, trials: Mapping[str, Trial], broken: Mapping[str, str]) -> None:
        keys = _keys(self.row, repeat)
        mirrored = (repeat + self.index) % 2
        order = random.Random((repeat + self.index) // 2).sample(keys, len(keys))
        results: dict[RecordKey, Outcome | str] = {}
        for key in reversed(order) if mirrored else order:
            error = broken.get(key.method)
            results[key] = error if error is not None else self._attempt(key.method, trials[key.method])
            self.progress.advance(f"{self.row.task} {self.row.name} {key.method}")
        # One window over the whole repeat, since a single run may be shorter than the kernel's tick.
        share = self.load.other_share()
        for key, result in results.items():
            self.records.add(key, result, share)

    def _attempt(self, method: str, trial: Trial) -> Outcome | str:
        start = self.clock()
        try:
            outcome = trial()
        except Exception as error:  # recorded, never timed
            self.errors[method] = _describe(error)
            return self.errors[method]
        seconds = self.clock() - start
        if outcome.seconds is not None:
            return outcome
        if seconds <= 0:
            return "the clock did not advance; let the trial do more work or measure its own seconds"
        return replace(outcome, seconds=seconds)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:_LONGEST_ERROR]
