"""Many threads and event loops share one executor."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from specrag.engine.executor import Executor
from specrag.engine.passes import (
    Coroutine,
    Emit,
)
from tests.engine.executor_toys import SOON, Recorder, greedy, truth


def test_many_threads_share_one_executor(executor: Executor) -> None:
    """Each thread gets its own results; the passes are shared: far fewer than one request after the other."""
    model = Recorder()
    all_there = threading.Barrier(6)
    results: dict[int, list[int]] = {}

    def call(number: int) -> None:
        all_there.wait(SOON)
        for _ in range(10):
            emitted = list(executor.stream(executor.submit(greedy(model, [number, 1], 20))))
            assert emitted == truth(model, [number, 1], 20)[2:]  # nothing is lost when another thread drives
        results[number] = emitted

    threads = [threading.Thread(target=call, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert sorted(results) == list(range(6))
    assert max(len(rows) for rows in model.packed) > 1


def test_asynchronous_requests_share_passes(executor: Executor) -> None:
    model = Recorder()

    async def collect(prompt: list[int]) -> list[int]:
        return [token async for token in executor.astream(greedy(model, prompt, 30))]

    async def main() -> list[list[int]]:
        return await asyncio.gather(*(collect([number, 2]) for number in range(4)))

    assert asyncio.run(main()) == [truth(model, [number, 2], 30)[2:] for number in range(4)]


def test_the_last_emission_is_never_lost() -> None:
    """The driver is another thread: a task may emit and end between two looks of its reader."""
    executor = Executor()

    def short(number: int) -> Coroutine[None]:
        yield Emit(number)

    async def main() -> None:
        for number in range(300):
            assert [value async for value in executor.astream(short(number))] == [number]

    asyncio.run(main())
    executor.close()


def test_cancelling_the_asyncio_task_ends_the_request() -> None:
    executor = Executor()
    model = Recorder()
    ended = threading.Event()

    def careful() -> Coroutine[Any]:
        try:
            return (yield from greedy(model, [1, 2], 10**9))
        finally:
            ended.set()

    async def main() -> None:
        seen = asyncio.Event()

        async def consume() -> None:
            async for _ in executor.astream(careful()):
                seen.set()

        consumer = asyncio.create_task(consume())
        await asyncio.wait_for(seen.wait(), SOON)
        consumer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await consumer
        assert await asyncio.to_thread(ended.wait, SOON)

    asyncio.run(main())
    executor.close()
    assert executor._tasks == []


def test_an_asynchronous_request_raises_what_its_coroutine_raised() -> None:
    executor = Executor()

    def failing() -> Coroutine[None]:
        yield Emit(1)
        raise ValueError("inside")

    async def main() -> list[int]:
        seen: list[int] = []

        async def consume() -> None:
            async for value in executor.astream(failing()):
                seen.append(value)

        with pytest.raises(ValueError, match="inside"):
            await consume()
        return seen

    assert asyncio.run(main()) == [1]
    executor.close()
