"""Limits on threads that compute beside the one that runs passes.

libgomp, the OpenMP of torch on Linux, gives every thread that computes a pool of worker threads of its own and keeps
it while the thread lives. Once there are more of them than processors, its barriers no longer spin but sleep, in all
pools: on two cores a pass of SmolLM2 then takes twice as long, and goes on doing so
(docs/log/2026-11-22-second-thread-halves-decoding.md). So one thread runs passes on all processors, threads beside it
compute alone, and models are loaded in a thread that ends.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

_here = threading.local()


def use_one_thread() -> None:
    """Limit OpenMP to the calling thread, from now on: an initialiser of thread pools, cheap to repeat."""
    if getattr(_here, "alone", False):
        return
    from threadpoolctl import threadpool_limits

    torch = sys.modules.get("torch")
    if torch is not None:
        torch.get_num_threads()  # at a thread's first question torch sets its own number, which would undo ours
    threadpool_limits(1, user_api="openmp")  # of the calling thread, that is how OpenMP has it
    _here.alone = True


def on_one_thread(function: Callable[[], T]) -> T:
    """Call a function in a thread of its own, limited to it."""
    with ThreadPoolExecutor(1, thread_name_prefix="specrag-alone", initializer=use_one_thread) as threads:
        return threads.submit(function).result()


def in_own_thread(function: Callable[[], T]) -> T:
    """Call a function in a thread of its own, on all processors; the thread and its OpenMP workers end with it."""
    with ThreadPoolExecutor(1, thread_name_prefix="specrag-apart") as threads:
        return threads.submit(function).result()
