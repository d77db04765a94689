"""Threads that compute beside the one that takes passes.

libgomp, the OpenMP of torch on Linux, gives every thread that computes a team of its own and keeps it while the thread
lives. Once there are more of them than processors, its barriers no longer spin but sleep, for all teams: on two cores a
pass of SmolLM2 then takes twice as long, and goes on doing so (docs/log.md). So one thread takes passes with all
processors, threads beside it compute alone, and models are loaded in a thread that ends.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")

_here = threading.local()


class _Blas:
    """numpy's BLAS, whose number of threads is the whole process's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._limit: Any = None

    def enter(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._limit = _controller().limit(limits=1)

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._limit.restore_original_limits()


_blas = _Blas()


@cache
def _controller() -> Any:
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(user_api="blas")


def compute_alone() -> None:
    """Let the calling thread compute without a team from now on; made for pools of threads, cheap to call again."""
    if getattr(_here, "alone", False):
        return
    from threadpoolctl import threadpool_limits

    torch = sys.modules.get("torch")
    if torch is not None:
        torch.get_num_threads()  # at a thread's first question torch sets its own number, which would undo ours
    threadpool_limits(1, user_api="openmp")  # of the calling thread, that is how OpenMP has it
    _here.alone = True


def apart(function: Callable[[], T]) -> T:
    """Call a function in a thread that ends with it, and its team too; it computes with all processors."""
    with ThreadPoolExecutor(1, thread_name_prefix="specrag-apart") as threads:
        return threads.submit(function).result()


@contextlib.contextmanager
def one_blas_thread() -> Iterator[None]:
    """Inside, numpy's products are computed by the thread that asks for them.

    OpenBLAS's threads wait for the next product awake, for some 20 ms, on the processors that the next pass needs:
    behind each exact search decoding took 1.8 times as long. Whoever wants several processors takes threads of its own.
    """
    _blas.enter()
    try:
        yield
    finally:
        _blas.leave()
