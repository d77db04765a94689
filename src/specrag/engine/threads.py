"""Threads that compute beside the one that takes passes.

libgomp, the OpenMP of torch on Linux, gives every thread that computes a team of its own and keeps it while the thread
lives. Once there are more of them than processors, its barriers no longer spin but sleep, for all teams: on two cores a
pass of SmolLM2 then takes twice as long, and goes on doing so (docs/log.md). So one thread takes passes with all
processors, threads beside it compute alone, and models are loaded in a thread that ends.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

_here = threading.local()


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
