"""A coroutine in the executor's care."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from specrag.engine.passes import Coroutine, Pass, Wait
from specrag.errors import Cancelled, DeadlineExceeded, SpecragError

T = TypeVar("T")


class Task(Generic[T]):
    """A coroutine in the executor's care. Made by ``Executor.submit``.

    Its owner uses :attr:`done`, :meth:`cancel` and :meth:`result`; the rest is the executor's.
    """

    def __init__(
        self,
        coroutine: Coroutine[T],
        deadline: float | None,
        parent: Task[Any] | None = None,
        notify: Callable[[], object] | None = None,
    ) -> None:
        self.coroutine = coroutine
        self.deadline = deadline
        self.notify = notify
        self.sink: Task[Any] = self if parent is None else parent.sink
        self.emitted: deque[Any] = deque()
        self.children: list[Task[Any]] = []
        self.cancelled = False
        self.ended = False
        self.value: Any = None
        self.error: BaseException | None = None
        self.answer: Any = None
        self.failure: BaseException | None = None
        self.waiting: Pass | Future[Any] | Wait | None = None

    @property
    def done(self) -> bool:
        """Whether the coroutine has ended."""
        return self.ended

    def cancel(self) -> None:
        """End the coroutine, and those that it started, before their next pass. Safe from any thread."""
        self.cancelled = True
        for child in list(self.children):
            child.cancel()

    def result(self) -> T:
        """What the coroutine returned; raises what it raised."""
        if not self.ended:
            raise SpecragError("task: it has not ended yet; wait for it first")
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[no-any-return]

    def overdue(self, now: float) -> SpecragError | None:
        """Why the coroutine must end now, if it must."""
        if self.cancelled:
            return Cancelled("the request was cancelled")
        if self.deadline is not None and now >= self.deadline:
            return DeadlineExceeded("the request ran past its deadline; give it more time or fewer tokens")
        return None

    def tell(self) -> None:
        """Call the owner's ``notify``."""
        if self.notify is not None:
            # A caller's event loop may have been closed under a request that it left behind.
            with contextlib.suppress(RuntimeError):
                self.notify()
