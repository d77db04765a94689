"""Searches run beside passes, and a request may start others and wait for them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from specrag.engine.executor import Executor
from specrag.engine.passes import (
    Coroutine,
    Search,
    Start,
    Wait,
    gather,
)
from specrag.errors import Cancelled, DeadlineExceeded
from tests.engine.executor_toys import SOON, Recorder, greedy, truth


def test_a_search_runs_beside_the_passes_of_others(executor: Executor) -> None:
    model = Recorder()
    release, threads = threading.Event(), []

    def search() -> str:
        threads.append(threading.current_thread())
        assert release.wait(SOON)
        return "found"

    def before(number: int) -> None:
        if number == 8:
            release.set()  # only the passes of the other request can end the search

    model.before = before

    def asking() -> Coroutine[str]:
        found: str = yield Search(search)
        return found

    asker, other = executor.submit(asking()), executor.submit(greedy(model, [1, 2], 20))
    assert executor.run(asker) == "found"
    assert threads[0] is not threading.current_thread()
    assert executor.run(other) == truth(model, [1, 2], 20)


def test_searches_that_wait_for_another_machine_hold_up_no_others(executor: Executor) -> None:
    """Ten requests wait for a store that does not answer; others look up, search here, and search there too."""
    model = Recorder()
    release, waiting = threading.Event(), threading.Semaphore(0)

    def slow() -> str:
        waiting.release()
        assert release.wait(SOON)
        return "late"

    def asking(function: Callable[[], str], remote: bool) -> Coroutine[str]:
        found: str = yield Search(function, remote)
        return found

    slow_ones = [executor.submit(asking(slow, True)) for _ in range(10)]
    quick = [executor.submit(asking(lambda: "here", False)) for _ in range(3)]
    there = executor.submit(asking(lambda: "there", True))
    other = executor.submit(greedy(model, [1, 2], 5))
    try:
        assert [executor.run(task) for task in quick] == ["here"] * 3
        assert executor.run(there) == "there"
        assert executor.run(other) == truth(model, [1, 2], 5)
        assert all(waiting.acquire(timeout=SOON) for _ in slow_ones)
        assert not any(task.done for task in slow_ones)
    finally:
        release.set()
    assert [executor.run(task) for task in slow_ones] == ["late"] * 10


def test_a_search_that_fails_fails_where_it_was_asked(executor: Executor) -> None:
    def asking() -> Coroutine[str]:
        try:
            yield Search(lambda: 1 // 0)
        except ZeroDivisionError:
            return "handled"
        return "missed"

    assert executor.run(executor.submit(asking())) == "handled"


def test_a_request_can_be_cancelled_while_it_searches(executor: Executor) -> None:
    started, release = threading.Event(), threading.Event()

    def search() -> None:
        started.set()
        assert release.wait(SOON)

    def asking() -> Coroutine[None]:
        yield Search(search)

    task = executor.submit(asking())

    def cancel() -> None:
        assert started.wait(SOON)
        task.cancel()

    thread = threading.Thread(target=cancel)
    thread.start()
    with pytest.raises(Cancelled):
        executor.run(task)
    thread.join()
    release.set()


def test_the_first_of_several_can_be_waited_for(executor: Executor) -> None:
    model = Recorder()

    def racing() -> Coroutine[tuple[int, list[int]]]:
        handles = []
        for steps in (9, 2, 5):
            handles.append((yield Start(greedy(model, [1, steps % 7], steps))))
        first = yield Wait(handles, first=True)
        assert first == [handles[1]]
        passes = model.passes
        handles[0].cancel()
        both = yield Wait(handles)
        assert both == handles
        with pytest.raises(Cancelled):
            handles[0].result()
        assert (yield Wait([])) == []
        assert (yield Wait([], first=True)) == []
        return passes, handles[2].result()

    passes, result = executor.run(executor.submit(racing()))
    assert passes == 3
    assert result == truth(model, [1, 5], 5)
    assert model.passes == 6


def test_gather_packs_and_keeps_the_order(executor: Executor) -> None:
    model = Recorder()
    lengths = [5, 2, 7]
    results = executor.run(executor.submit(gather([greedy(model, [1, n % 7], n) for n in lengths])))
    assert results == [truth(model, [1, n % 7], n) for n in lengths]
    assert model.passes == 1 + 7
    assert executor.run(executor.submit(gather([]))) == []


def test_gather_ends_all_at_the_first_error(executor: Executor) -> None:
    model = Recorder()

    def failing() -> Coroutine[list[int]]:
        yield from greedy(model, [1, 2], 2)
        raise ValueError("early")

    with pytest.raises(ValueError, match="early"):
        executor.run(executor.submit(gather([greedy(model, [3, 4], 500), failing()])))
    assert model.passes == 3


def test_a_requests_end_ends_what_it_started(executor: Executor) -> None:
    model = Recorder()
    ended: list[str] = []

    def child() -> Coroutine[None]:
        try:
            yield from greedy(model, [1, 2], 1000)
        finally:
            ended.append("child")

    def parent() -> Coroutine[str]:
        yield Start(child())
        yield from greedy(model, [3, 4], 2)
        return "done"

    assert executor.run(executor.submit(parent())) == "done"
    assert ended == ["child"]
    assert model.passes <= 4


def test_a_childs_deadline_is_its_parents() -> None:
    now = 0.0

    def tick(number: int) -> None:
        nonlocal now
        now = float(number)

    executor = Executor(clock=lambda: now)
    model = Recorder(tick)
    task = executor.submit(gather([greedy(model, [1, 2], 100), greedy(model, [1, 3], 100)]), deadline=4.0)
    with pytest.raises(DeadlineExceeded):
        executor.run(task)
    assert model.passes == 5
    assert executor._tasks == []
    executor.close()


def test_what_a_child_emits_comes_out_at_the_request(executor: Executor) -> None:
    model = Recorder()
    stream = executor.stream(executor.submit(gather([greedy(model, [1, 2], 3), greedy(model, [1, 2], 3)])))
    output = truth(model, [1, 2], 3)[2:]
    assert list(stream) == [token for token in output for _ in range(2)]
