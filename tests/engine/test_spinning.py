"""Waiting threads spin while the processors are ours, and sleep while others use them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specrag.engine.cpu import spinning
from specrag.engine.cpu.spinning import WINDOW, Spinning, processors, seconds_of_others
from specrag.engine.cpu.threads import openmp
from specrag.openmp import SPIN_COUNT

pytestmark = pytest.mark.skipif(openmp() is None, reason="torch has another OpenMP library than GNU's")

#: Prints the processor time of a thread that waits 0.2 s for its next operation: before, during and after an idle team.
#: The most of three times: the library learns only a moment after a thread's end that its team is gone.
_WAITING = """
import time, torch
from specrag.engine.cpu.spinning import Spinning
torch.set_num_threads(2)
numbers, others, now = torch.ones(4_000_000), 0.0, 0.0
spinning = Spinning(lambda: others, clock=lambda: now, spare=lambda: 0)
for busy in (0.0, 1.0, 0.0):
    for _ in range(2):
        now += 0.3
        others += 0.3 * busy
        spinning.watch()
    used = []
    for _ in range(3):
        numbers.add_(1)
        started = time.process_time()
        time.sleep(0.2)
        used.append(time.process_time() - started)
    print(max(used))
"""


class Machine:
    """A clock, and what others have used by then."""

    def __init__(self, spare: int = 0) -> None:
        self.now = self.used = 0.0
        self.spinning = Spinning(lambda: self.used, clock=lambda: self.now, spare=lambda: spare)
        self.spinning.watch()

    def after(self, seconds: float, share: float) -> bool:
        """Whether threads spin once others have had a share of a processor for some seconds."""
        self.now += seconds
        self.used += seconds * share
        self.spinning.watch()
        return self.spinning.allowed


def test_threads_sleep_as_long_as_others_compute() -> None:
    machine = Machine()
    assert machine.after(WINDOW, 0.05)
    assert not machine.after(WINDOW, 0.8)
    assert not machine.after(WINDOW, 0.5)
    assert machine.after(WINDOW, 0.0)


def test_it_looks_only_once_in_a_while_and_not_at_pauses() -> None:
    machine = Machine()
    assert machine.after(WINDOW / 2, 1.0)
    assert not machine.after(WINDOW / 2, 1.0)
    assert not machine.after(20 * WINDOW, 0.0)  # nobody has called: what others did in between says little
    assert machine.after(WINDOW, 0.0)


def test_others_may_use_what_our_threads_leave() -> None:
    machine = Machine(spare=2)
    assert machine.after(WINDOW, 1.9)
    assert not machine.after(WINDOW, 2.5)


def test_only_our_processors_count_and_nobody_who_yields(tmp_path: Path) -> None:
    first = min(processors())
    stat = tmp_path / "stat"
    stat.write_text(f"cpu  900 900 900 900\ncpu{first} 500 70 300 9 9\ncpu4095 800 0 800 0\nintr 5 6\n")
    expected = 800 / os.sysconf("SC_CLK_TCK") - time.process_time()
    assert seconds_of_others(stat) == pytest.approx(expected, abs=0.1)


def test_a_busy_process_is_noticed() -> None:
    spinning = Spinning(seconds_of_others, spare=lambda: 0)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            end = time.monotonic() + 20
            while spinning.allowed and time.monotonic() < end:
                spinning.watch()
                time.sleep(0.05)
        finally:
            busy.kill()
    assert not spinning.allowed


def test_who_waits_next_finds_the_idle_team_there(monkeypatch: pytest.MonkeyPatch) -> None:
    began = []

    class SlowLibrary:
        count = 0

        def run(self, *_given: object) -> None:
            time.sleep(0.2)
            began.append(True)

    monkeypatch.setattr(spinning, "openmp", SlowLibrary)
    machine = Machine()
    assert not machine.after(WINDOW, 0.8)
    assert began
    assert machine.after(WINDOW, 0.0)


@pytest.mark.skipif(len(processors()) < 2, reason="the library never spins on one processor")
def test_the_library_lets_its_threads_sleep_and_spin_again() -> None:
    """The real library: a thread that spins uses the processor while it waits."""
    forever = {**os.environ, "GOMP_SPINCOUNT": "100000000000"}
    forever.pop("OMP_WAIT_POLICY", None)
    done = subprocess.run(
        [sys.executable, "-c", _WAITING], env=forever, capture_output=True, text=True, check=True
    )
    before, during, after = map(float, done.stdout.split())
    assert min(before, after) > 0.04 > 2 * during


def test_the_package_sets_the_time_that_it_watches() -> None:
    """A value of the user's own is left alone."""
    code = "from specrag.engine.cpu import spinning; print(spinning._spinning is not None)"
    for told, watches in ((SPIN_COUNT, True), ("7", False)):
        told_so = {**os.environ, "GOMP_SPINCOUNT": told}
        told_so.pop("OMP_WAIT_POLICY", None)
        done = subprocess.run(
            [sys.executable, "-c", code], env=told_so, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == str(watches)
