"""Admission: a bounded queue in front of a fixed number of places and a memory budget.

Used from the event loop only. First come, first served, with one exception: while a request does not fit yet, later
ones that fit may pass it, so that a long one does not hold up short ones. It is passed a limited number of times, so
that it does start.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from specrag.serving.errors import ApiError

#: How many requests may pass a waiting one.
MAX_PASSED = 16

#: Longest Retry-After, in seconds.
_LONGEST_HINT = 60

# Weight of the newest answer in the running mean of how long answers take.
_NEWEST = 0.1


class Ticket:
    """Permission to run; give it back with :meth:`release`, which may be called more than once.

    Args:
        admission: the one that issued it.
        places: how many it holds.
        amount: bytes that it holds.
    """

    def __init__(self, admission: Admission, places: int, amount: int) -> None:
        self._admission = admission
        self._began = admission.clock()
        self.places = places
        self.amount = amount
        self.released = False

    def release(self) -> None:
        """Give back the places and the memory."""
        if not self.released:
            self.released = True
            self._admission.take_back(self, self._admission.clock() - self._began)


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request in the queue."""

    places: int
    amount: int
    ready: asyncio.Future[Ticket]
    passed: int = 0


class Admission:
    """Places and memory for all requests.

    Args:
        places: texts that may be written at the same time.
        queue: requests that may wait for a place.
        budget: bytes for keys and values of all of them; ``None`` if the amount of memory is unknown.
        clock: in seconds.
    """

    def __init__(
        self,
        places: int,
        queue: int,
        budget: int | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.clock = clock
        self.places = places
        self.budget = budget
        self.running = 0
        self.reserved = 0
        self._limit = queue
        self._queue: deque[_Waiting] = deque()
        self._mean_seconds = 1.0
        self._closed = False

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    async def enter(self, places: int, amount: int) -> Ticket:
        """Wait for a place.

        Args:
            places: texts that will be written at the same time; capped at the number of all places.
            amount: bytes of keys and values that they may need.

        Raises:
            ApiError: 400 if the memory can never be had, 429 if the queue is full, 503 if the server is stopping.
        """
        if self._closed:
            raise _stopping()
        if self.budget is not None and amount > self.budget:
            raise ApiError(
                400,
                f"this request may need {amount / 2**20:,.0f} MiB of memory and the server has "
                f"{self.budget / 2**20:,.0f} MiB; ask for fewer tokens, passages or choices",
                code="request_too_large",
                param="max_tokens",
            )
        places = min(places, self.places)
        if not self._queue and self._fits(places, amount):
            return self._admit(places, amount)
        if len(self._queue) >= self._limit:
            raise ApiError(
                429,
                f"{len(self._queue)} requests wait already; try again later",
                code="queue_full",
                headers={"Retry-After": str(self.retry_after())},
            )
        waiting = _Waiting(places, amount, asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        self._admit_waiting()
        try:
            return await waiting.ready
        except asyncio.CancelledError:
            if waiting in self._queue:
                self._queue.remove(waiting)
            elif not waiting.ready.cancelled() and waiting.ready.exception() is None:
                waiting.ready.result().release()  # it was admitted at the same moment
            self._admit_waiting()
            raise

    def retry_after(self) -> int:
        """Whole seconds until a place should be free, estimated from how long answers take."""
        rounds = (len(self._queue) + 1) / self.places
        return max(1, min(_LONGEST_HINT, math.ceil(rounds * self._mean_seconds)))

    def close(self) -> None:
        """Admit nobody any more; waiting requests get an error."""
        self._closed = True
        while self._queue:
            waiting = self._queue.popleft()
            if not waiting.ready.done():
                waiting.ready.set_exception(_stopping())

    def take_back(self, ticket: Ticket, seconds: float) -> None:
        """Free a ticket's places and memory."""
        self.running -= ticket.places
        self.reserved -= ticket.amount
        self._mean_seconds += _NEWEST * (seconds - self._mean_seconds)
        self._admit_waiting()

    def _fits(self, places: int, amount: int) -> bool:
        enough = self.budget is None or self.reserved + amount <= self.budget
        return enough and self.running + places <= self.places

    def _admit(self, places: int, amount: int) -> Ticket:
        self.running += places
        self.reserved += amount
        return Ticket(self, places, amount)

    def _admit_waiting(self) -> None:
        passed: list[_Waiting] = []
        for waiting in list(self._queue):
            if self._fits(waiting.places, waiting.amount):
                self._queue.remove(waiting)
                if not waiting.ready.done():  # otherwise its client has just gone
                    waiting.ready.set_result(self._admit(waiting.places, waiting.amount))
                    for other in passed:
                        other.passed += 1
            elif waiting.passed >= MAX_PASSED:
                break
            else:
                passed.append(waiting)


def _stopping() -> ApiError:
    return ApiError(503, "the server is being stopped", code="stopping", headers={"Retry-After": "10"})
