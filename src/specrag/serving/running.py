"""Runs the texts of one request in the executor, and gives what they emit to the event loop as it comes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specrag.engine.passes import Coroutine, Emit
from specrag.serving.admission import Ticket

if TYPE_CHECKING:
    from specrag.engine.executor import Executor


@dataclass(frozen=True, slots=True)
class Ended:
    """A text is complete.

    Attributes:
        result: what its coroutine returned.
    """

    result: Any


@dataclass(frozen=True, slots=True)
class Emission:
    """What one of a request's texts has emitted.

    Attributes:
        index: of the text.
        value: a step, another event of its method, or :class:`Ended`.
    """

    index: int
    value: Any


class RunningTexts:
    """The coroutines of one request, side by side.

    The first error ends all of them. Ending the iteration of :meth:`emissions` early does too, before their next
    pass. The ticket is released when the last has ended in the executor, and its memory with it.

    Args:
        executor: runs them.
        starts: make the coroutines.
        ticket: leave to run them.
        deadline: a time of the executor's clock.
        behind: for each text an earlier one that reads the same prompt: its first step is waited for, so that its
            keys and values are found in the prefix cache; ``None`` begins at once.
    """

    def __init__(
        self,
        executor: Executor,
        starts: Sequence[Callable[[], Coroutine[Any]]],
        ticket: Ticket,
        deadline: float | None,
        behind: Sequence[int | None] | None = None,
    ) -> None:
        self._executor = executor
        self._starts = starts
        self._deadline = deadline
        self._behind = behind or [None] * len(starts)
        self._left = _Countdown(len(starts), ticket.release)
        self._news: asyncio.Queue[Emission | Exception | None] = asyncio.Queue()
        self._begun = [asyncio.Event() for _ in starts]

    def interrupt(self, error: Exception) -> None:
        """End them; whoever iterates gets this error."""
        self._news.put_nowait(error)

    async def emissions(self) -> AsyncIterator[Emission]:
        """What they emit, each at its end an :class:`Ended`. To be iterated once."""
        pumps = [asyncio.ensure_future(self._pump(index)) for index in range(len(self._starts))]
        try:
            running = len(pumps)
            while running:
                found = await self._news.get()
                if isinstance(found, Exception):
                    raise found
                if found is None:
                    running -= 1
                else:
                    yield found
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(self, index: int) -> None:
        tracked = _Tracked(self._starts[index], asyncio.get_running_loop(), self._left)
        try:
            first = self._behind[index]
            if first is not None:
                await self._begun[first].wait()
            async with aclosing(self._executor.astream(tracked.run(), deadline=self._deadline)) as emissions:
                async for value in emissions:
                    self._begun[index].set()
                    self._news.put_nowait(Emission(index, value))
            self._news.put_nowait(None)
        except Exception as error:
            self._news.put_nowait(error)
        finally:
            self._begun[index].set()
            if not tracked.began:  # its coroutine will never run, so nobody else counts it
                self._left.count()


class _Countdown:
    """Calls a function once so many have been counted."""

    def __init__(self, number: int, then: Callable[[], object]) -> None:
        self._left = number
        self._then = then

    def count(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._then()


class _Tracked:
    """A coroutine that says at its end, in the event loop, that it has ended; its sessions are closed by then."""

    def __init__(
        self, start: Callable[[], Coroutine[Any]], loop: asyncio.AbstractEventLoop, left: _Countdown
    ) -> None:
        self._start = start
        self._loop = loop
        self._left = left
        self.began = False

    def run(self) -> Coroutine[None]:
        self.began = True
        try:
            result = yield from self._start()
            yield Emit(Ended(result))
        finally:
            # The loop may have been closed under a server that was stopped.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._left.count)
