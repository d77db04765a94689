"""The order of runs, the clock, failures, resuming, and the summaries made from the records."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path

import pytest

from specrag.bench import load
from specrag.bench.interleave import Plan, Row, Trial, first_rows, interleave
from specrag.bench.load import ProcessorLoad, load_note
from specrag.bench.records import Outcome, Record, RecordStore
from specrag.bench.summary import summarise
from specrag.errors import InputError
from tests.bench.quiet import Silent, Unwatched

METHODS = ("plain", "respec", "rapid")


class Stage:
    """Trials that take the time they are told on a clock of their own, and write down when they ran."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.time = 0.0
        self.ran: list[str] = []
        self.prepared: list[str] = []

    def clock(self) -> float:
        return self.time

    def row(
        self,
        name: str,
        seconds: Mapping[str, float],
        *,
        task: str = "t",
        outcome: Callable[[str], Outcome] = lambda _: Outcome(tokens=10, output="same"),
    ) -> Row:
        def trial(method: str) -> Trial:
            def run() -> Outcome:
                self.ran.append(f"{name}:{method}")
                self.time += seconds[method]
                return outcome(method)

            return run

        def prepare() -> Mapping[str, Trial]:
            self.prepared.append(name)
            return {method: trial(method) for method in seconds}

        return Row(name=name, task=task, methods=tuple(seconds), prepare=prepare)

    def run(
        self, rows: list[Row], plan: Plan, *, version: str = "1", retry_failed: bool = False
    ) -> list[Record]:
        store = RecordStore(self.path, suite="s", version=version, setting="here", retry_failed=retry_failed)
        with store:
            return interleave(
                rows,
                plan,
                label="rows",
                records=store,
                clock=self.clock,
                load=Unwatched(),
                progress=Silent(),
            )


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path / "s.jsonl")


SECONDS = {"plain": 2.0, "respec": 1.0, "rapid": 4.0}


def test_every_second_turn_is_the_last_one_backwards(stage: Stage) -> None:
    stage.run([stage.row("r", SECONDS)], Plan(repeats=20, warmups=1))
    turns = [stage.ran[start : start + 3] for start in range(3, len(stage.ran), 3)]  # behind the warm-up
    assert all(set(turn) == {f"r:{method}" for method in METHODS} for turn in turns)
    assert all(second == first[::-1] for first, second in zip(turns[::2], turns[1::2], strict=True))


def test_every_method_follows_every_other_one(stage: Stage) -> None:
    stage.run([stage.row(f"{number}", SECONDS) for number in range(20)], Plan(repeats=1, warmups=0))
    names = [run.split(":")[1] for run in stage.ran]
    turns = [names[start : start + 3] for start in range(0, len(names), 3)]
    assert len({pair for turn in turns for pair in pairwise(turn)}) == 6
    assert {turn[0] for turn in turns} == set(METHODS)


def test_times_come_from_the_injected_clock_or_from_the_trial(stage: Stage) -> None:
    own = stage.row("own", {"plain": 2.0}, outcome=lambda _: Outcome(seconds=0.5))
    records = stage.run([stage.row("r", {"plain": 2.0}), own], Plan(repeats=1))
    assert [record.outcome.seconds for record in records if record.outcome] == [2.0, 0.5]


def test_warm_up_can_be_kept_to_the_first_row_that_runs(stage: Stage) -> None:
    rows = [stage.row(name, {"plain": 1.0}) for name in "ab"]
    stage.run(rows, Plan(repeats=1, warmups=2, warm_each_row=False))
    assert stage.ran == ["a:plain"] * 3 + ["b:plain"]


def test_what_is_recorded_is_neither_prepared_nor_run_again(stage: Stage) -> None:
    rows = [stage.row("a", SECONDS), stage.row("b", SECONDS)]
    first = stage.run(rows[:1], Plan(repeats=2))
    stage.ran.clear()
    stage.prepared.clear()
    records = stage.run(rows, Plan(repeats=2))
    assert stage.prepared == ["b"]
    assert all(run.startswith("b:") for run in stage.ran)
    assert records[:6] == first
    assert len(records) == 12


def test_a_repeat_that_was_cut_in_half_runs_again_as_a_whole(stage: Stage) -> None:
    row = stage.row("a", SECONDS)
    stage.run([row], Plan(repeats=2, warmups=0))
    lines = stage.path.read_bytes().splitlines(keepends=True)
    stage.path.write_bytes(b"".join(lines[:4]))  # all of repeat 0, one method of repeat 1
    second = stage.ran[3:]
    stage.ran.clear()
    stage.run([row], Plan(repeats=2, warmups=0))
    assert stage.ran == second


def test_an_interrupt_ends_the_run_and_keeps_what_was_done(stage: Stage) -> None:
    def interrupt(_: str) -> Outcome:
        raise KeyboardInterrupt

    rows = [stage.row("a", SECONDS), stage.row("b", SECONDS, outcome=interrupt)]
    with pytest.raises(KeyboardInterrupt):
        stage.run(rows, Plan(repeats=1))
    stage.ran.clear()
    stage.run([stage.row("a", SECONDS), stage.row("b", SECONDS)], Plan(repeats=1, warmups=0))
    assert sorted(stage.ran) == ["b:plain", "b:rapid", "b:respec"]


def failing(method: str) -> Outcome:
    if method == "respec":
        raise MemoryError("no\nroom")
    return Outcome(tokens=10)


def test_a_failure_is_recorded_not_timed_and_the_others_go_on(stage: Stage) -> None:
    row = stage.row("a", SECONDS, outcome=failing)
    records = stage.run([row], Plan(repeats=2))
    errors = [record.error for record in records if record.key.method == "respec"]
    assert errors == ["MemoryError: no room"] * 2
    assert stage.ran.count("a:respec") == 1  # the warm-up failed, so the repeats were not tried
    assert all(record.outcome is not None for record in records if record.key.method != "respec")
    summaries = {entry.method: entry for entry in summarise(records, baselines=["plain"])}
    assert summaries["respec"].speedup is None
    assert summaries["respec"].n == 0
    assert summaries["respec"].extra["failures"] == 2
    stage.ran.clear()
    stage.run([row], Plan(repeats=2))
    assert stage.ran == []
    again = stage.run([stage.row("a", SECONDS)], Plan(repeats=2), retry_failed=True)
    assert all(record.error is None for record in again)


def test_a_failing_preparation_fails_the_row_alone(stage: Stage) -> None:
    def broken() -> Mapping[str, Trial]:
        raise ValueError("no such prompt")

    rows = [Row(name="a", task="t", methods=("plain",), prepare=broken), stage.row("b", {"plain": 1.0})]
    records = stage.run(rows, Plan(repeats=1))
    assert [record.error for record in records] == ["ValueError: no such prompt", None]


def test_rows_of_one_name_and_unknown_methods_are_refused_before_any_run(stage: Stage) -> None:
    with pytest.raises(InputError, match="its own name"):
        stage.run([stage.row("a", {"plain": 1.0})] * 2, Plan())
    with pytest.raises(InputError, match="method"):
        stage.run([stage.row("a", {"magic": 1.0})], Plan())
    assert stage.ran == []
    with pytest.raises(InputError, match="repeats"):
        Plan(repeats=0)


def test_summaries_are_right_to_the_last_figure(stage: Stage) -> None:
    def outcome(method: str) -> Outcome:
        if method == "plain":
            return Outcome(tokens=10, output="x", passes=10, correct=1.0)
        output = "x" if stage.ran[-1].startswith("a") else "y"
        return Outcome(
            tokens=10,
            output=output,
            passes=4,
            drafted=20,
            accepted=6,
            drafted_by={"suffix": 5, "recycling": 15},
            accepted_by={"suffix": 4, "recycling": 3 if output == "x" else 0},
            correct=0.0,
            figures={"peak_mib": 7.0},
        )

    rows = [
        stage.row("a", {"plain": 2.0, "respec": 1.0}, task="qa", outcome=outcome),
        stage.row("b", {"plain": 8.0, "respec": 1.0}, task="rag", outcome=outcome),
    ]
    summaries = summarise(stage.run(rows, Plan(repeats=3)), baselines=["plain"])
    by_name = {(entry.task, entry.method): entry for entry in summaries}
    assert len(by_name) == 6  # two tasks and overall, two methods
    qa, overall = by_name["qa", "respec"], by_name["overall", "respec"]
    assert qa.speedup is not None
    assert overall.speedup is not None
    assert (qa.speedup.low, qa.speedup.value, qa.speedup.high) == (2.0, 2.0, 2.0)
    assert overall.speedup.value == pytest.approx(4.0)
    assert (overall.n, overall.identical, overall.mat) == (2, 0.5, 2.5)
    assert (overall.acceptance, overall.accuracy) == (0.3, 0.0)
    assert qa.acceptance_by_source == {"recycling": 0.2, "suffix": 0.8}
    assert overall.acceptance_by_source == {"recycling": 0.1, "suffix": 0.8}
    assert by_name["qa", "plain"].acceptance_by_source is None
    assert overall.tokens_per_second == pytest.approx(20 / 2)
    assert overall.extra["peak_mib"] == 7.0
    assert overall.extra["milliseconds"] == pytest.approx(1000)
    plain = by_name["overall", "plain"]
    assert plain.baseline is None
    assert plain.speedup is None
    assert plain.tokens_per_second == pytest.approx(20 / 10)


def test_outputs_of_other_lengths_are_compared_by_time_per_token(stage: Stage) -> None:
    row = stage.row(
        "a",
        {"plain": 2.0, "respec": 2.0},
        outcome=lambda method: Outcome(tokens=10 if method == "plain" else 5),
    )
    summaries = summarise(stage.run([row], Plan(repeats=1)), baselines=["plain"])
    assert summaries[1].speedup is not None
    assert summaries[1].speedup.value == 0.5


def test_every_method_is_compared_with_every_baseline(stage: Stage) -> None:
    row = stage.row("a", {"plain": 2.0, "transformers": 3.0, "respec": 1.0})
    summaries = summarise(stage.run([row], Plan(repeats=1)), baselines=["plain", "transformers"])
    pairs = [(entry.method, entry.baseline) for entry in summaries]
    assert pairs == [
        ("plain", None),
        ("plain", "transformers"),
        ("transformers", "plain"),
        ("respec", "plain"),
        ("respec", "transformers"),
    ]


def test_another_process_at_work_is_seen() -> None:
    # A grandchild that outlives its parent is not in this process's tree: somebody else.
    spin = "import time; end = time.time() + 1.5\nwhile time.time() < end: pass"
    start = (
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {spin!r}], start_new_session=True)"
    )
    monitor = ProcessorLoad(sleep=time.sleep)
    subprocess.run([sys.executable, "-c", start], check=True)
    busy = monitor.before(1.0)
    assert busy > 0.6 / (os.cpu_count() or 1)


def test_a_child_of_our_own_is_not_somebody_else() -> None:
    spin = "import time; end = time.time() + 30\nwhile time.time() < end: pass"
    before = load.read_times()
    with subprocess.Popen([sys.executable, "-c", spin]) as child:
        during, patience = before, time.monotonic() + 20  # a busy machine gives the child little
        while during.own - before.own <= 0.2 and time.monotonic() < patience:
            time.sleep(0.2)
            during = load.read_times()
        child.kill()
    after = load.read_times()
    assert during.own - before.own > 0.2, "while it lives"
    assert after.own > during.own - 0.005, "and when it is gone; the sums round"


def test_nor_is_a_server_that_we_started_and_left_running() -> None:
    spin = "import time; end = time.time() + 20\nwhile time.time() < end: pass"
    start = f"""
import subprocess, sys
words = [sys.executable, "-c", {spin!r}]
print(subprocess.Popen(words, stdout=subprocess.DEVNULL, start_new_session=True).pid)
"""
    told = subprocess.run([sys.executable, "-c", start], check=True, stdout=subprocess.PIPE)
    server = int(told.stdout)
    try:
        load.OWN_SERVERS.add(server)
        before = during = load.read_times()
        patience = time.monotonic() + 15
        while during.own - before.own <= 0.2 and time.monotonic() < patience:
            time.sleep(0.2)
            during = load.read_times()
        assert during.own - before.own > 0.2
        assert load.read_times().own - before.own < 10
    finally:
        load.OWN_SERVERS.discard(server)
        os.kill(server, signal.SIGKILL)


def test_the_note_counts_busy_runs() -> None:
    note = load_note(0.02, [0.05, 0.2, 0.11])
    assert (note.busy, note.runs, note.worst, note.is_busy) == (2, 3, 0.2, True)
    assert not load_note(0.02, [0.05]).is_busy
    assert load_note(0.5, []).is_busy


def test_fewer_rows_are_the_first_of_each_task_and_those_already_measured(
    stage: Stage, tmp_path: Path
) -> None:
    rows = [stage.row(name, SECONDS, task=name[0]) for name in ("a1", "b1", "a2", "b2", "a3")]
    stage.run([rows[4]], Plan(repeats=1, warmups=0))
    store = RecordStore(tmp_path / "s.jsonl", suite="s", version="1", setting="here")
    with store:
        assert [row.name for row in first_rows(rows, 1, store)] == ["a1", "b1", "a3"]
        assert [row.name for row in first_rows(rows, 2, store)] == ["a1", "b1", "a2", "b2", "a3"]
