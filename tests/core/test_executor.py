"""The executor packs passes, shares them out fairly, and lets nobody's end disturb the others."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from specrag.engine.executor import Executor
from specrag.engine.outputs import ARGMAX, Row
from specrag.engine.passes import (
    Coroutine,
    Emit,
    Others,
    Pass,
    PassReport,
    Search,
    Segment,
    Start,
    Wait,
    gather,
)
from specrag.engine.session import Session
from specrag.engine.task import Task
from specrag.errors import Cancelled, DeadlineExceeded, SpecragError
from specrag.models.toy import ToyModel
from specrag.speculation.tree import EMPTY, DraftTree

#: For events that must come; long enough for a busy machine, and a failure when it passes.
SOON = 20.0


class Recorder(ToyModel):
    """The toy, with a record of the rows of each segment of each pass, and a hook before each pass."""

    def __init__(self, before: Callable[[int], None] = lambda _: None) -> None:
        super().__init__(vocab_size=7, order=2, seed=1, context_length=100_000)
        self.packed: list[list[int]] = []
        self.before = before

    def forward(self, segments: Sequence[Segment]) -> list[list[Row]]:
        self.before(self.passes)
        self.packed.append([len(segment.tokens) for segment in segments])
        return super().forward(segments)


def greedy(model: ToyModel, prompt: Sequence[int], steps: int, chunk: int = 512) -> Coroutine[list[int]]:
    """Prefill and decode; emits each token."""
    session = Session(model)
    yield from session.extend(prompt, chunk=chunk)
    for _ in range(steps):
        rows = yield from session.score(EMPTY, ARGMAX)
        session.commit((), rows[0].argmax)
        yield Emit(session.tokens[-1])
    return session.tokens


def truth(model: ToyModel, prompt: Sequence[int], steps: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(steps):
        tokens.append(int(model.logits(tokens).argmax()))
    return tokens


@pytest.fixture
def executor() -> Iterator[Executor]:
    executor = Executor()
    yield executor
    executor.close()
    give_up = time.monotonic() + SOON
    while executor._tasks and time.monotonic() < give_up:  # another thread may be about to strike them off
        time.sleep(0.001)
    assert executor._tasks == []
    assert not executor._arrived


# --- packing -------------------------------------------------------------------------------------------------


def test_what_runs_at_once_shares_passes(executor: Executor) -> None:
    model = Recorder()
    prompts = [[1, 2, 3], [4, 5], [6, 0, 1, 2]]
    tasks = [executor.submit(greedy(model, prompt, 5)) for prompt in prompts]
    assert [executor.run(task) for task in tasks] == [truth(model, prompt, 5) for prompt in prompts]
    assert model.packed == [[2, 1, 3], *[[1, 1, 1]] * 5]


def test_a_pass_tells_what_was_in_it_and_what_it_took() -> None:
    now = itertools.count(0, 5)
    executor = Executor(clock=lambda: float(next(now)))
    model = Recorder()

    def scored(prompt: Sequence[int], guesses: int) -> Coroutine[PassReport | None]:
        session = Session(model)
        yield from session.extend(prompt)
        yield from session.score(DraftTree.chain([1] * guesses, "a guess"), ARGMAX)
        return session.report

    first, second = executor.run(executor.submit(gather([scored([1, 2, 3], 4), scored([3, 2, 1, 0], 1)])))
    executor.close()
    assert first is not None
    assert second is not None
    assert first.others == Others(segments=1, rows=2, context=3, row_context=6)
    assert second.others == Others(segments=1, rows=5, context=2, row_context=10)
    assert first.seconds == second.seconds == 5


def test_a_pass_tells_writers_from_readers_of_prompts() -> None:
    executor = Executor()
    model = Recorder()

    def writing(prompt: Sequence[int]) -> Coroutine[list[PassReport | None]]:
        session = Session(model)
        yield from session.extend(prompt)
        reports = []
        for _ in range(2):
            yield from session.score(DraftTree.chain([1, 1], "a guess"), ARGMAX)
            reports.append(session.report)
        return reports

    def reading() -> Coroutine[list[PassReport | None]]:
        yield from Session(model).extend([1, 2, 3, 4, 5, 6, 0, 1, 2, 3], chunk=3)
        return []

    reports, _ = executor.run(executor.submit(gather([writing([1, 2]), reading()])))
    executor.close()
    for report in reports:
        assert report is not None
        assert (report.others.segments, report.others.rows) == (1, 3)
        assert report.writing == Others()


def test_each_model_has_a_pass_of_its_own(executor: Executor) -> None:
    models = [Recorder(), Recorder()]
    tasks = [executor.submit(greedy(models[i % 2], [1, 2, 3], 4)) for i in range(4)]
    for task in tasks:
        executor.run(task)
    assert [model.packed for model in models] == [[[2, 2], *[[1, 1]] * 4]] * 2


def test_a_pass_has_no_more_rows_than_allowed() -> None:
    executor = Executor(max_rows=5)
    model = Recorder()
    tasks = [executor.submit(greedy(model, [1] * 4, 6)) for _ in range(7)]
    for task in tasks:
        assert executor.run(task) == truth(model, [1] * 4, 6)
    assert max(sum(rows) for rows in model.packed) <= 5
    assert [5 - sum(rows) for rows in model.packed].count(0) >= 6  # and they are full while there is work
    executor.close()


def test_a_segment_larger_than_a_pass_runs_alone() -> None:
    executor = Executor(max_rows=5)
    model = Recorder()
    large, small = executor.submit(greedy(model, [1] * 20, 1)), executor.submit(greedy(model, [2, 3], 1))
    executor.run(large)
    executor.run(small)
    assert [19] in model.packed
    executor.close()


def test_a_long_prefill_and_short_decodings_share_the_passes() -> None:
    """Neither starves: between two turns of anybody come fewer passes than there are tasks."""
    executor = Executor(max_rows=64)
    model = Recorder()
    turns: dict[str, list[int]] = {}

    def noting(name: str, coroutine: Coroutine[list[int]]) -> Coroutine[list[int]]:
        answer = None
        while True:
            try:
                request = coroutine.send(answer)
            except StopIteration as stop:
                result: list[int] = stop.value
                return result
            answer = yield request
            if isinstance(request, Pass):
                turns.setdefault(name, []).append(model.passes)

    work = {"prefill": greedy(model, [1] * 1501, 1, chunk=60)}
    work |= {f"decode {i}": greedy(model, [2, i], 60) for i in range(6)}
    tasks = [executor.submit(noting(name, coroutine)) for name, coroutine in work.items()]
    for task in tasks:
        executor.run(task)
    assert len(turns["prefill"]) == 26
    for name, passes in turns.items():
        waits = [later - earlier for earlier, later in itertools.pairwise(passes)]
        assert max(waits) <= len(tasks), (name, waits)
    assert max(sum(rows) for rows in model.packed) <= 64
    executor.close()


def test_newcomers_join_and_do_not_push_in(executor: Executor) -> None:
    """A request that arrives while others run is in the very next pass."""
    model = Recorder()
    newcomers: list[Task[list[int]]] = []

    def before(number: int) -> None:
        if number == 3:
            newcomers.append(executor.submit(greedy(model, [5, 6], 2)))

    model.before = before
    first = executor.submit(greedy(model, [1, 2], 6))
    executor.run(first)
    assert executor.run(newcomers[0]) == truth(model, [5, 6], 2)
    assert model.packed[:5] == [[1], [1], [1], [1], [1, 1]]


# --- ends ----------------------------------------------------------------------------------------------------


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
    stream.close()  # type: ignore[attr-defined]
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


# --- searches and children -----------------------------------------------------------------------------------


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


# --- threads and asyncio -------------------------------------------------------------------------------------


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
