"""Runs coroutines on one device and packs the passes that they request.

Everything that decodes is a coroutine that yields requests (:mod:`specrag.engine.passes`) and is resumed with
the answers. One round of the executor resumes every coroutine that can go on, then runs one packed pass for each
model that was asked for passes. Searches run in threads meanwhile. Cancellation and deadlines are checked between
passes.

A caller that waits for its task drives the rounds, for everybody's tasks; when its own task ends, the next waiting
caller takes over. For asynchronous callers, which must not block, a background thread drives.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from specrag.engine.passes import (
    Coroutine,
    Emit,
    Pass,
    Search,
    SessionModel,
    Start,
    Wait,
    report_pass,
)
from specrag.engine.threads import use_one_thread
from specrag.errors import Cancelled, DeadlineExceeded, SpecragError

T = TypeVar("T")

#: Most rows of one packed pass. A larger pass makes everybody wait longer and yields no more tokens a second.
MAX_ROWS = 1024

#: Every this many turns, the prompt that has waited longest is read on, however much of it is left.
TURN_OF_THE_OLDEST = 4

#: While several prompts wait to be read, requests that write take part in every so many passes. In all of them, clients
#: would wait in front of the first token rather than behind it: eight that each ask again once they have their answer
#: wait twice as long for it, and the median answer is later too (docs/log/2026-11-27-writers-wait-for-readers.md).
TURN_OF_WRITERS = 2

#: The background driver of asynchronous callers ends after this long without a task.
DRIVER_IDLE_SECONDS = 2.0


class Task(Generic[T]):
    """A coroutine that an executor runs. Made by ``Executor.submit``.

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

    def notify_owner(self) -> None:
        """Call the owner's ``notify``."""
        if self.notify is not None:
            # A caller's event loop may have been closed under a request that it left behind.
            with contextlib.suppress(RuntimeError):
                self.notify()


#: More than the requests that decode at the same time, so that all of them may wait; waiting threads cost nothing.
REMOTE_THREADS = 128


class SearchThreads:
    """Thread pools for searches: a small one for this machine, another for searches that wait for a remote store.

    A slow remote store therefore holds up neither lookups in a request's cache nor searches computed on this machine.

    Args:
        local: threads for searches on this machine; the others have :data:`REMOTE_THREADS`, each of which starts when
            it is first needed.
    """

    def __init__(self, local: int) -> None:
        self._local = ThreadPoolExecutor(
            local, thread_name_prefix="specrag-search", initializer=use_one_thread
        )
        self._remote = ThreadPoolExecutor(
            REMOTE_THREADS, thread_name_prefix="specrag-remote", initializer=use_one_thread
        )

    def submit(self, search: Search) -> Future[Any]:
        """Begin a search as soon as a thread is free."""
        return (self._remote if search.remote else self._local).submit(search.function)

    def close(self) -> None:
        """Wait for running searches, then end the threads."""
        self._local.shutdown()
        self._remote.shutdown()


class Executor:
    """Runs coroutines and packs the passes that they request.

    Args:
        clock: seconds, for deadlines.
        max_rows: most rows of a packed pass; a single larger segment still runs, alone.
        search_threads: threads for searches on this machine; searches that wait for another machine have their own.

    Attributes:
        on_pass: called with the number of segments and rows of each packed pass, in the thread that drives.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        max_rows: int = MAX_ROWS,
        search_threads: int = 2,
    ) -> None:
        self.on_pass: Callable[[int, int], object] | None = None
        self._clock = clock
        self._max_rows = max_rows
        self._threads = SearchThreads(search_threads)
        self._changed = threading.Condition()
        self._driven = False
        self._driver: threading.Thread | None = None
        self._arrived: deque[Task[Any]] = deque()
        self._tasks: list[Task[Any]] = []
        self._reading_turns: Counter[int] = Counter()  # by model

    @property
    def clock(self) -> Callable[[], float]:
        """The clock of the deadlines, in seconds."""
        return self._clock

    def submit(
        self,
        coroutine: Coroutine[T],
        *,
        deadline: float | None = None,
        notify: Callable[[], object] | None = None,
    ) -> Task[T]:
        """Schedule a coroutine; it advances once somebody waits. Safe from any thread.

        Args:
            deadline: a time on the executor's clock, after which the coroutine is ended.
            notify: called from the thread that drives whenever the task has emitted something or ended.
        """
        task = Task(coroutine, deadline, notify=notify)
        with self._changed:
            self._arrived.append(task)
            self._changed.notify_all()
        return task

    def run(self, task: Task[T]) -> T:
        """Drive until the task has ended; its emissions are dropped."""
        for _ in self.stream(task):
            pass
        return task.result()

    def stream(self, task: Task[T]) -> Generator[Any, None, T]:
        """Drive until the task has ended, yielding what it emits; returns what the coroutine returned.

        Closing the generator early cancels the task. Raises what the coroutine raised.
        """
        try:
            while True:
                # Checked before the emissions are read: another thread may drive, and the last may come in between.
                ended = task.done
                while task.emitted:
                    yield task.emitted.popleft()
                if ended:
                    break
                if not task.done:
                    self._advance_once()
        finally:
            if not task.done:
                task.cancel()
                while not task.done:
                    self._advance_once()
        return task.result()

    async def astream(
        self, coroutine: Coroutine[Any], *, deadline: float | None = None
    ) -> AsyncGenerator[Any, None]:
        """:meth:`submit` and :meth:`stream` for asyncio; a background thread drives.

        Ending the iteration early, as a cancelled asyncio task does, cancels the coroutine.
        """
        loop = asyncio.get_running_loop()
        news = asyncio.Event()
        task = self.submit(coroutine, deadline=deadline, notify=lambda: loop.call_soon_threadsafe(news.set))
        self._drive_in_background()
        try:
            while True:
                news.clear()
                ended = task.done
                while task.emitted:
                    yield task.emitted.popleft()
                if ended:
                    break
                await self._news(news, task)
        finally:
            task.cancel()
        task.result()

    async def _news(self, news: asyncio.Event, task: Task[Any]) -> None:
        """Wait for news of a task, at most until its deadline: a pass of other tasks may take longer."""
        left = None if task.deadline is None else task.deadline - self.clock()
        try:
            async with asyncio.timeout(left):
                await news.wait()
        except TimeoutError:
            if (reason := task.overdue(self.clock())) is not None:
                raise reason from None

    def _drive_in_background(self) -> None:
        with self._changed:
            if self._driver is None:
                self._driver = threading.Thread(target=self._drive, name="specrag-driver", daemon=True)
                self._driver.start()

    def _drive(self) -> None:
        """Run rounds while there are tasks; end ``DRIVER_IDLE_SECONDS`` after the last."""
        while True:
            with self._changed:
                if not self._tasks and not self._arrived:
                    self._changed.wait(timeout=DRIVER_IDLE_SECONDS)
                    if not self._tasks and not self._arrived:
                        self._driver = None
                        return
            try:
                self._advance_once()
            except BaseException:
                with self._changed:
                    self._driver = None  # the next asynchronous caller starts another
                raise

    def close(self) -> None:
        """Cancel what is running and stop the search threads."""
        with self._changed:
            tasks = [*self._tasks, *self._arrived]
        for task in tasks:
            task.cancel()
        for task in tasks:
            while not task.done:
                self._advance_once()
        with self._changed:
            # Another thread may still be in the round that ended the last task.
            self._changed.wait_for(lambda: not self._driven)
        self._threads.close()

    # -- driving --------------------------------------------------------------------------------------------

    def _advance_once(self) -> None:
        """Run a round, or wait until the thread that drives has run one."""
        with self._changed:
            if self._driven:
                self._changed.wait(timeout=1.0)
                return
            self._driven = True
        try:
            self._round()
        finally:
            with self._changed:
                self._driven = False
                self._changed.notify_all()

    def _round(self) -> None:
        with self._changed:
            while self._arrived:
                self._tasks.append(self._arrived.popleft())
        self._resume_all()
        passes = [task for task in self._tasks if isinstance(task.waiting, Pass)]
        if passes:
            self._run_passes(passes)
            # Resumed at once, so that the results are handed out before the next pass begins.
            self._resume_all()
            return
        with self._changed:
            ready = any(isinstance(task.waiting, Future) and task.waiting.done() for task in self._tasks)
            if self._tasks and not ready and not self._arrived:
                self._changed.wait(timeout=0.1)

    def _resume_all(self) -> None:
        """Resume every coroutine that can go on, until each waits for a pass, a search or another task."""
        progress = True
        while progress:
            progress = False
            for task in list(self._tasks):
                if self._can_go_on(task):
                    self._resume(task)
                    progress = True
        self._tasks = [task for task in self._tasks if not task.done]

    def _can_go_on(self, task: Task[Any]) -> bool:
        if task.done:
            return False
        if task.overdue(self._clock()) is not None:
            return True
        waiting = task.waiting
        if isinstance(waiting, Pass):
            return False
        if isinstance(waiting, Future):
            if not waiting.done():
                return False
            task.failure = waiting.exception()
            task.answer = None if task.failure else waiting.result()
        elif isinstance(waiting, Wait):
            ended = [handle for handle in waiting.handles if handle.done]
            if len(ended) < (min(1, len(waiting.handles)) if waiting.first else len(waiting.handles)):
                return False
            task.answer = ended
        return True

    def _resume(self, task: Task[Any]) -> None:
        """Advance one coroutine to its next pass, search or wait."""
        overdue = task.overdue(self._clock())
        if overdue is not None:
            # Raised only once: the coroutine may still need passes to clean up.
            task.failure = overdue
            task.cancelled, task.deadline = False, None
        task.waiting = None
        try:
            while task.waiting is None:
                failure, answer = task.failure, task.answer
                task.failure = task.answer = None
                self._serve(
                    task, task.coroutine.send(answer) if failure is None else task.coroutine.throw(failure)
                )
        except StopIteration as stop:
            task.value = stop.value
        except BaseException as error:
            task.error = error
            if not isinstance(error, Exception):
                raise
        finally:
            if task.waiting is None:
                task.ended = True
                for child in task.children:
                    child.cancel()
                task.notify_owner()

    def _serve(self, task: Task[Any], request: object) -> None:
        """Handle what a coroutine yielded: at once, or by letting the task wait for it."""
        if isinstance(request, Emit):
            task.sink.emitted.append(request.value)
            task.sink.notify_owner()
        elif isinstance(request, Start):
            child = Task(request.coroutine, task.deadline, parent=task)
            task.children.append(child)
            self._tasks.append(child)
            task.answer = child
        elif isinstance(request, Search):
            task.waiting = self._threads.submit(request)
            task.waiting.add_done_callback(self._wake)
        elif isinstance(request, Pass | Wait):
            task.waiting = request
        else:
            task.failure = SpecragError(f"coroutine: it yielded {request!r}, which is no request")

    def _wake(self, _: Future[Any]) -> None:
        with self._changed:
            self._changed.notify_all()

    def _run_passes(self, tasks: list[Task[Any]]) -> None:
        """One packed pass for each model."""
        groups: dict[int, list[Task[Any]]] = {}
        for task in tasks:
            groups.setdefault(id(_asked(task).model), []).append(task)
        for group in groups.values():
            chosen: list[Task[Any]] = []
            rows = 0
            for task in self._in_order(group):
                if not chosen or rows + _rows(task) <= self._max_rows:
                    chosen.append(task)
                    rows += _rows(task)
            self._run_pass(_asked(group[0]).model, chosen)
            # Tasks that have just run go behind the others, so that none waits forever.
            served = {id(task) for task in chosen}
            self._tasks.sort(key=lambda task: id(task) in served)

    def _in_order(self, group: list[Task[Any]]) -> Iterator[Task[Any]]:
        """The tasks for a model's next pass, the most important first.

        Prompts are read one at a time, the one with the least left first: read side by side, all would finish late.
        Prompts that the pass completes are in it too, and so are decoding tasks, unless further prompts wait.

        Args:
            group: the tasks that wait for a pass, longest waiting first.
        """
        readers = sorted(
            (task for task in group if _asked(task).unread), key=lambda task: _asked(task).unread
        )
        writers = [task for task in group if not _asked(task).unread]
        if readers:
            lead = readers[0]
            if len(readers) > 1:
                key = id(_asked(lead).model)
                self._reading_turns[key] += 1
                if self._reading_turns[key] % TURN_OF_THE_OLDEST == 0:
                    lead = next(task for task in group if _asked(task).unread)
                if self._reading_turns[key] % TURN_OF_WRITERS:
                    writers = []
            if group[0] is not lead and writers and group[0] is writers[0]:
                yield writers.pop(0)
            yield lead
            readers.remove(lead)
        yield from writers
        yield from (task for task in readers if _asked(task).unread <= _rows(task))

    def _run_pass(self, model: SessionModel, tasks: list[Task[Any]]) -> None:
        segments = [_asked(task).segment for task in tasks]
        began = self._clock()
        try:
            answers = model.forward(segments)
            if len(answers) != len(tasks):
                raise SpecragError(
                    f"model: {len(answers)} answers for {len(tasks)} segments; mend its forward"
                )
        except Exception as error:
            for task in tasks:
                task.failure, task.waiting = error, None
            return
        report_pass(segments, self._clock() - began)
        if self.on_pass is not None:
            self.on_pass(len(tasks), sum(map(_rows, tasks)))
        for task, answer in zip(tasks, answers, strict=True):
            task.answer, task.waiting = answer, None


def _asked(task: Task[Any]) -> Pass:
    """The pass that a task waits for."""
    assert isinstance(task.waiting, Pass)
    return task.waiting


def _rows(task: Task[Any]) -> int:
    """The number of rows of that pass."""
    return len(_asked(task).segment.tokens)


def run(coroutine: Coroutine[T]) -> T:
    """Run one coroutine to its end in an executor of its own."""
    executor = Executor()
    try:
        return executor.run(executor.submit(coroutine))
    finally:
        executor.close()
