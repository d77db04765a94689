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
        self._before: list[int] = []

    def enter(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._before = [library.get_num_threads() for library in _libraries()]
                for library in _libraries():
                    _set_threads(library, 1)

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                for library, before in zip(_libraries(), self._before, strict=True):
                    _set_threads(library, before)


_blas = _Blas()


@cache
def _libraries() -> tuple[Any, ...]:
    """Those with threads of their own; OpenMP's limits hold for one that computes with OpenMP, as faiss's."""
    from threadpoolctl import ThreadpoolController

    return tuple(ThreadpoolController().select(threading_layer="pthreads").lib_controllers)


def _set_threads(library: Any, count: int) -> None:
    # threadpoolctl 3.8 obeys the thread alone that asked first, as long as that lives: where it was another, nothing
    # happened, and decoding took 1.6 times as long. Here the users are counted.
    getattr(library, "_real_set_num_threads", library.set_num_threads)(count)


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
