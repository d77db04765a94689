"""The threads that run searches beside the passes."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from specrag.engine.passes import Search
from specrag.engine.threads import compute_alone

#: More than the requests that decode at the same time, so that each of them may wait; threads that wait cost nothing.
REMOTE_THREADS = 128


class SearchThreads:
    """Searches on this machine have a few threads; those that wait for another machine have threads of their own.

    So a store that answers late holds up neither look-ups in a request's cache nor searches that are computed here.

    Args:
        local: threads for searches on this machine.
        remote: threads for the others; each begins when it is first needed.
    """

    def __init__(self, local: int, remote: int = REMOTE_THREADS) -> None:
        self._local = ThreadPoolExecutor(
            local, thread_name_prefix="specrag-search", initializer=compute_alone
        )
        self._remote = ThreadPoolExecutor(
            remote, thread_name_prefix="specrag-remote", initializer=compute_alone
        )

    def submit(self, search: Search) -> Future[Any]:
        """Begin a search as soon as a thread is free."""
        return (self._remote if search.remote else self._local).submit(search.function)

    def close(self) -> None:
        """Wait for what is running, and end the threads."""
        self._local.shutdown()
        self._remote.shutdown()
