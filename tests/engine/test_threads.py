"""Threads beside the one that takes passes keep their helpers to themselves."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from specrag.engine.cpu.threads import openmp
from specrag.engine.executor import Executor
from specrag.engine.passes import Coroutine, Search
from specrag.engine.threads import in_own_thread, use_one_thread


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    """Two threads for everything, whatever the tests were started with."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_a_thread_that_computes_alone_leaves_the_others_their_team() -> None:
    with ThreadPoolExecutor(1, initializer=use_one_thread) as threads:
        assert threads.submit(torch.get_num_threads).result() == 1
        threads.submit(use_one_thread).result()
        assert threads.submit(torch.get_num_threads).result() == 1
    assert torch.get_num_threads() == 2


def test_searches_compute_alone() -> None:
    executor = Executor()

    def searching() -> Coroutine[int]:
        count: int = yield Search(torch.get_num_threads)
        return count

    assert executor.run(executor.submit(searching())) == 1
    executor.close()


def test_what_runs_apart_ends_with_its_thread_and_its_errors_come_back() -> None:
    names = in_own_thread(lambda: [threading.current_thread().name])
    assert all(thread.name != names[0] for thread in threading.enumerate())
    with pytest.raises(ValueError, match="wrong"):
        in_own_thread(lambda: (_ for _ in ()).throw(ValueError("wrong")).__next__())


@pytest.mark.parametrize(
    ("said", "told"), [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, "0")]
)
def test_waiting_threads_spin_briefly_unless_the_user_says_otherwise(said: dict[str, str], told: str) -> None:
    """As the OpenMP library itself has read it."""
    if openmp() is None:
        pytest.skip("torch has another OpenMP library than GNU's")
    kept = {
        name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    done = subprocess.run(
        [sys.executable, "-c", "import specrag, torch"],
        env={**kept, **said, "OMP_DISPLAY_ENV": "VERBOSE"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"GOMP_SPINCOUNT = '{told}'" in done.stderr
