"""Limits on threads that compute beside the one that runs passes.

libgomp, the OpenMP of torch on Linux, gives every thread that computes its own pool of worker threads and keeps the
pool while the thread lives. Once there are more workers than processors, the barriers of all pools sleep instead of
spinning: on two cores a pass of SmolLM2 then takes twice as long, from then on
(docs/log/2026-11-22-second-thread-halves-decoding.md). So one thread runs passes on all processors, threads beside it
compute without workers, and models are loaded in a thread that ends.
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
    """Limit the calling thread to one OpenMP thread from now on: an initialiser for thread pools, cheap to repeat."""
    if getattr(_here, "alone", False):
        return
    from threadpoolctl import threadpool_limits

    torch = sys.modules.get("torch")
    if torch is not None:
        torch.get_num_threads()  # the first call in a thread sets torch's own number, which would undo ours
    threadpool_limits(1, user_api="openmp")  # OpenMP's limit applies to the calling thread
    _here.alone = True


def in_own_thread(function: Callable[[], T]) -> T:
    """Call a function in a new thread, on all processors; the thread and its OpenMP workers end with the call."""
    with ThreadPoolExecutor(1, thread_name_prefix="specrag-apart") as threads:
        return threads.submit(function).result()
