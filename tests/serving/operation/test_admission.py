"""The queue in front of the places: order, memory, limits, and what becomes of those who leave it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from specrag.serving.errors import ApiError
from specrag.serving.operation.admission import MAX_PASSED, Admission, Ticket


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 10))


async def settled() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def test_places_are_given_in_order_and_given_back() -> None:
    async def test() -> None:
        admission = Admission(2, 10, None)
        first, second = await admission.enter(1, 0), await admission.enter(1, 0)
        waiting = [asyncio.ensure_future(admission.enter(1, 0)) for _ in range(3)]
        await settled()
        assert (admission.running, admission.waiting) == (2, 3)
        first.release()
        first.release()  # twice is once
        await settled()
        assert [task.done() for task in waiting] == [True, False, False]
        second.release()
        waiting[0].result().release()
        await settled()
        assert all(task.done() for task in waiting)
        for task in waiting:
            task.result().release()
        assert (admission.running, admission.waiting, admission.reserved) == (0, 0, 0)

    run(test)


def test_a_full_queue_is_told_when_to_come_back() -> None:
    async def test() -> None:
        admission = Admission(1, 1, None)
        ticket = await admission.enter(1, 0)
        waiting = asyncio.ensure_future(admission.enter(1, 0))
        await settled()
        with pytest.raises(ApiError) as caught:
            await admission.enter(1, 0)
        assert caught.value.status_code == 429
        assert caught.value.headers is not None
        assert 1 <= int(caught.value.headers["Retry-After"]) <= 60
        ticket.release()
        (await waiting).release()

    run(test)


def test_longer_answers_mean_longer_hints() -> None:
    now = 0.0
    hints = []

    async def test() -> None:
        nonlocal now
        admission = Admission(1, 10, None, clock=lambda: now)
        for _ in range(30):
            ticket = await admission.enter(1, 0)
            now += 12.0
            ticket.release()
        hints.append(admission.retry_after())

    run(test)
    assert 10 <= hints[0] <= 13


def test_memory_that_can_never_be_had_is_refused_and_that_which_is_taken_is_waited_for() -> None:
    async def test() -> None:
        admission = Admission(8, 10, 100)
        with pytest.raises(ApiError) as caught:
            await admission.enter(1, 101)
        assert (caught.value.status_code, caught.value.code) == (400, "request_too_large")
        large = await admission.enter(1, 80)
        waiting = asyncio.ensure_future(admission.enter(1, 40))
        await settled()
        assert not waiting.done()
        assert admission.reserved == 80
        large.release()
        assert (await waiting).amount == 40

    run(test)


def test_small_requests_pass_a_large_one_but_not_for_ever() -> None:
    async def test() -> None:
        admission = Admission(100, 100, 100)
        holder = await admission.enter(1, 30)
        large = asyncio.ensure_future(admission.enter(1, 90))
        await settled()
        passed: list[Ticket] = []
        for _ in range(MAX_PASSED):
            ticket = await asyncio.wait_for(admission.enter(1, 1), 1)
            passed.append(ticket)
        late = asyncio.ensure_future(admission.enter(1, 1))
        await settled()
        assert not late.done()
        for ticket in [holder, *passed]:
            ticket.release()
        await settled()
        assert large.done()
        assert late.done()

    run(test)


def test_who_leaves_the_queue_leaves_nothing_behind() -> None:
    async def test() -> None:
        admission = Admission(1, 10, None)
        ticket = await admission.enter(1, 0)
        gone = asyncio.ensure_future(admission.enter(1, 0))
        stays = asyncio.ensure_future(admission.enter(1, 0))
        await settled()
        # Let in and cancelled in the same moment: the place goes to the next.
        ticket.release()
        gone.cancel()
        await settled()
        assert gone.cancelled()
        assert stays.done()
        stays.result().release()
        assert admission.running == 0

    run(test)


def test_a_closed_admission_sends_everybody_away() -> None:
    async def test() -> None:
        admission = Admission(1, 10, None)
        ticket = await admission.enter(1, 0)
        waiting = asyncio.ensure_future(admission.enter(1, 0))
        await settled()
        admission.close()
        with pytest.raises(ApiError) as caught:
            await waiting
        assert caught.value.status_code == 503
        with pytest.raises(ApiError):
            await admission.enter(1, 0)
        ticket.release()
        assert admission.running == 0

    run(test)


def test_more_places_than_there_are_means_all_of_them() -> None:
    async def test() -> None:
        admission = Admission(4, 10, None)
        ticket = await admission.enter(16, 0)
        assert admission.running == 4
        ticket.release()
        assert admission.running == 0

    run(test)
