"""Nobody's end disturbs the others: cancelling, deadlines, errors, leaving early."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from specrag.engine.executor import Executor
from specrag.engine.outputs import Row
from specrag.engine.passes import (
    Coroutine,
    Search,
    Segment,
)
from specrag.errors import Cancelled, DeadlineExceeded, SpecragError
from tests.engine.executor_toys import SOON, Recorder, greedy, truth


def test_cancelling_from_another_thread_ends_a_request_before_its_next_pass(executor: Executor) -> None:
    model = Recorder()
    passed, go_on = threading.Event(), threading.Event()

    def before(number: int) -> None:
        if number == 3:
            passed.set()
            assert go_on.wait(SOON)

    model.before = before
    victim, other = executor.submit(greedy(model, [1, 2], 1000)), executor.submit(greedy(model, [3, 4], 10))

    def cancel() -> None:
        assert passed.wait(SOON)
        victim.cancel()
        go_on.set()

    thread = threading.Thread(target=cancel)
    thread.start()
    assert executor.run(other) == truth(model, [3, 4], 10)
    thread.join()
    with pytest.raises(Cancelled):
        executor.run(victim)
    assert model.packed == [*[[1, 1]] * 4, *[[1]] * 7]


def test_a_deadline_ends_a_request_between_passes() -> None:
    now = 0.0

    def tick(number: int) -> None:
        nonlocal now
        now = float(number + 1)

    executor = Executor(clock=lambda: now)
    model = Recorder(tick)
    late, other = (
        executor.submit(greedy(model, [1, 2], 1000), deadline=5.0),
        executor.submit(greedy(model, [3, 4], 10), deadline=12.0),
    )
    assert executor.run(other) == truth(model, [3, 4], 10)
    with pytest.raises(DeadlineExceeded, match="deadline"):
        executor.run(late)
    assert model.packed == [*[[1, 1]] * 5, *[[1]] * 6]
    executor.close()


def test_whoever_awaits_is_told_of_the_deadline_while_a_pass_goes_on(executor: Executor) -> None:
    model = Recorder()
    told = threading.Event()

    def before(number: int) -> None:
        if number == 1:
            assert told.wait(SOON)  # a pass that lasts until the caller has been told

    model.before = before

    async def ask() -> None:
        emissions = executor.astream(greedy(model, [1, 2], 1000), deadline=executor.clock() + 0.05)
        try:
            with pytest.raises(DeadlineExceeded, match="deadline"):
                await asyncio.wait_for(anext(emissions), SOON / 2)
        finally:
            told.set()

    asyncio.run(ask())


def test_a_deadline_holds_after_an_error_that_was_handled() -> None:
    now = 0.0
    executor = Executor(clock=lambda: now)

    def broken() -> None:
        raise OSError("the store is away")

    def stubborn() -> Coroutine[str]:
        nonlocal now
        with pytest.raises(OSError, match="away"):
            yield Search(broken)
        now = 10.0
        try:
            yield Search(lambda: None)
        except DeadlineExceeded:
            return "ended"
        return "went on"

    assert executor.run(executor.submit(stubborn(), deadline=5.0)) == "ended"
    executor.close()


def test_an_error_in_one_request_does_not_touch_the_others(executor: Executor) -> None:
    model = Recorder()

    def failing() -> Coroutine[list[int]]:
        yield from greedy(model, [1, 2], 2)
        raise ValueError("its own fault")

    def wrong() -> Coroutine[None]:
        yield "nonsense"  # type: ignore[misc]

    bad, worse, good = (
        executor.submit(failing()),
        executor.submit(wrong()),
        executor.submit(greedy(model, [3, 4], 6)),
    )
    assert executor.run(good) == truth(model, [3, 4], 6)
    with pytest.raises(ValueError, match="its own fault"):
        executor.run(bad)
    with pytest.raises(SpecragError, match="no request"):
        executor.run(worse)


@pytest.mark.parametrize("fault", ["raise", "too few answers"])
def test_a_pass_that_fails_reaches_everyone_in_it_and_nobody_else(executor: Executor, fault: str) -> None:
    class Faulty(Recorder):
        def forward(self, segments: Sequence[Segment]) -> list[list[Row]]:
            answers = super().forward(segments)
            if self.passes == 3:
                if fault == "raise":
                    raise MemoryError("no room for the pass")
                return answers[:-1]
            return answers

    faulty, sound = Faulty(), Recorder()
    victims = [executor.submit(greedy(faulty, [i, 2], 6)) for i in (1, 3)]
    other = executor.submit(greedy(sound, [1, 2], 6))
    expected: tuple[type[Exception], str] = (
        (MemoryError, "no room") if fault == "raise" else (SpecragError, "1 answers for 2 segments")
    )
    for victim in victims:
        with pytest.raises(expected[0], match=expected[1]):
            executor.run(victim)
    assert executor.run(other) == truth(sound, [1, 2], 6)
    assert executor.run(executor.submit(greedy(faulty, [1, 2], 6))) == truth(faulty, [1, 2], 6)


def test_ctrl_c_during_a_pass_leaves_the_executor_usable(executor: Executor) -> None:
    def interrupt(number: int) -> None:
        if number == 2:
            model.before = lambda _: None
            raise KeyboardInterrupt

    model = Recorder(interrupt)
    task, other = executor.submit(greedy(model, [1, 2], 50)), executor.submit(greedy(model, [3, 4], 4))
    with pytest.raises(KeyboardInterrupt):
        executor.run(task)
    assert task.done
    with pytest.raises(Cancelled):
        task.result()
    assert executor.run(other) == truth(model, [3, 4], 4)


def test_closing_a_stream_early_ends_its_request(executor: Executor) -> None:
    model = Recorder()
    closed: list[bool] = []

    def careful() -> Coroutine[list[int]]:
        try:
            return (yield from greedy(model, [1, 2], 1000))
        finally:
            closed.append(True)

    stream = executor.stream(executor.submit(careful()))
    assert [next(stream) for _ in range(3)] == truth(model, [1, 2], 3)[2:]
    stream.close()
    assert closed == [True]
    assert model.passes == 4


def test_closing_the_executor_ends_everything() -> None:
    model = Recorder()
    executor = Executor()
    running, waiting = (
        executor.submit(greedy(model, [1, 2], 1000)),
        executor.submit(greedy(model, [1, 2], 1000)),
    )
    next(executor.stream(running))
    executor.close()
    for task in (running, waiting):
        with pytest.raises(Cancelled):
            task.result()
    assert executor._tasks == []


def test_an_unfinished_task_has_no_result(executor: Executor) -> None:
    task = executor.submit(greedy(Recorder(), [1, 2], 3))
    with pytest.raises(SpecragError, match="not ended"):
        task.result()
    executor.run(task)
