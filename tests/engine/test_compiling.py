"""Loops that are kept on disk, and the clock that leaves compiling out of a first run's figures."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import pytest
from numba import njit
from numba.core import event

from specrag import LanguageModel
from specrag.engine.compiling import compiled, inlined, without_compiling
from specrag.engine.outputs import Row
from specrag.engine.passes import Coroutine
from specrag.engine.session import Session
from specrag.engine.stopping import FinishReason
from specrag.methods.token_decoders import PlainDecoder
from specrag.speculation.decode import Settings, TextSink

LOCK = "numba:compiler_lock"


def notify(step: str) -> None:
    """As numba does when it takes its lock and gives it back."""
    (event.start_event if step == "start" else event.end_event)(LOCK)  # type: ignore[no-untyped-call]


def compile_something() -> float:
    """Seconds that a loop took which nobody has compiled yet."""

    def loop(count: int) -> float:
        total = 0.0
        for number in range(count):
            total += number**0.5
        return total

    began = time.perf_counter()
    assert cast(Callable[[int], float], njit(loop))(3) > 2
    return time.perf_counter() - began


def test_the_clock_stands_still_while_something_is_compiled() -> None:
    compile_something()  # the compiler's own first time
    with without_compiling(time.perf_counter) as clock:
        began = clock()
        seconds = compile_something()
        assert clock() - began < seconds / 4


def test_it_goes_on_behind_nested_compiling_and_never_back() -> None:
    now = [0.0]
    with without_compiling(lambda: now[0]) as clock:
        notify("end")  # of what began earlier
        told = []
        for step in ("", "start", "start", "end", "", "end", ""):
            now[0] += 1
            told.append(clock())
            if step:
                notify(step)
        assert told == [1, 2, 2, 2, 2, 2, 3]
    notify("start")
    now[0] += 5
    notify("end")
    assert clock() == 8


class Compiling(PlainDecoder):
    """Compiles a loop before the first token."""

    seconds = 0.0

    def decode(
        self,
        session: Session,
        settings: Settings,
        text: TextSink,
        clock: Callable[[], float],
        prompt_rows: Sequence[Row] = (),
    ) -> Coroutine[FinishReason]:
        self.seconds = sum(compile_something() for _ in range(8))
        return super().decode(session, settings, text, clock, prompt_rows)


def test_a_first_run_is_told_as_fast_as_the_next(llm: LanguageModel) -> None:
    llm.generate("Hello", max_tokens=2)
    method = Compiling()
    timing = llm.generate("Hello", method=method, max_tokens=2).timing
    assert timing.decode < method.seconds


#: Prints for each attention loop how often it was found on the disk.
_LOOPS = """
from specrag.engine.cpu import bf16_attention, row_attention
loops = [row_attention.attend_paths(64, 3, False)]
if bf16_attention.available(64):
    loops += [bf16_attention.attend_paths(64, 3, fused) for fused in (False, True)]
print({loop._cache_hits for loop in loops})
"""


def test_the_next_process_finds_the_loops_on_the_disk(tmp_path: Path) -> None:
    found = [
        subprocess.run(
            [sys.executable, "-c", _LOOPS],
            env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for _ in range(2)
    ]
    assert found == ["{0}", "{1}"]


def test_a_loop_that_would_not_be_found_is_refused() -> None:
    @inlined
    def double(number: int) -> int:
        return 2 * number

    def run(number: int) -> int:
        return double(number)

    with pytest.raises(
        TypeError, match=r"run closes over double, .*Dispatcher: each process would compile it anew"
    ):
        compiled(run)
