"""The executor packs passes and shares them out fairly."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from specrag.engine.executor import Executor, Task
from specrag.engine.outputs import ARGMAX
from specrag.engine.passes import (
    Coroutine,
    Others,
    Pass,
    PassReport,
    gather,
)
from specrag.engine.session import Session
from specrag.speculation.tree import DraftTree
from tests.engine.executor_toys import Recorder, greedy, truth


def test_what_runs_at_once_shares_passes(executor: Executor) -> None:
    model = Recorder()
    prompts = [[1, 2, 3], [4, 5], [6, 0, 1, 2]]
    tasks = [executor.submit(greedy(model, prompt, 5)) for prompt in prompts]
    assert [executor.run(task) for task in tasks] == [truth(model, prompt, 5) for prompt in prompts]
    assert model.packed == [[1, 2, 3], *[[1, 1, 1]] * 5]


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


def ends(prompts: Sequence[int], chunk: int, max_rows: int) -> list[int]:
    """The passes behind which the prompts, all there from the start, have been read."""
    executor = Executor(max_rows=max_rows)
    model = Recorder()
    told = [0] * len(prompts)

    def reading(number: int, rows: int) -> Coroutine[None]:
        yield from Session(model).extend([1] * (rows + 1), chunk=chunk)
        told[number] = model.passes

    for task in [executor.submit(reading(number, rows)) for number, rows in enumerate(prompts)]:
        executor.run(task)
    executor.close()
    return told


def test_the_shortest_prompt_is_read_first_and_no_two_side_by_side() -> None:
    assert ends([160, 40, 80], chunk=20, max_rows=60) == [14, 2, 7]  # the fourth turn is the oldest's


def test_prompts_that_end_in_one_pass_are_in_it_together() -> None:
    assert ends([20, 10, 20, 10], chunk=20, max_rows=60) == [1, 1, 1, 1]


def test_a_long_prompt_is_read_while_short_ones_keep_coming() -> None:
    """It has a quarter of the turns."""
    executor = Executor(max_rows=20)
    model = Recorder()

    def short() -> Coroutine[None]:
        yield from Session(model).extend([1] * 41, chunk=20)

    def endless() -> Coroutine[None]:
        for _ in range(100):
            if long.done:
                return
            yield from gather([short(), short()])

    def reading() -> Coroutine[int]:
        yield from Session(model).extend([2] * 401, chunk=20)
        return model.passes

    long = executor.submit(reading())
    others = executor.submit(endless())
    assert 75 <= executor.run(long) <= 85
    executor.run(others)
    executor.close()


def written_beside(prompts: Sequence[int]) -> list[int]:
    """In each pass how many of three texts are written, beside prompts of so many rows that are read in parts of 20."""
    executor = Executor(max_rows=24)
    model = Recorder()

    def reading(rows: int) -> Coroutine[None]:
        yield from Session(model).extend([1] * (rows + 1), chunk=20)

    tasks: list[Task[Any]] = [executor.submit(greedy(model, [2, 3], 30)) for _ in range(3)]
    tasks += [executor.submit(reading(rows)) for rows in prompts]
    for task in tasks:
        executor.run(task)
    executor.close()
    return [rows.count(1) for rows in model.packed]


def test_texts_are_written_beside_a_prompt_that_is_read() -> None:
    assert written_beside([400])[1:20] == [3] * 19


def test_while_several_prompts_wait_texts_are_written_in_every_second_pass() -> None:
    found = written_beside([100, 100, 100, 100])
    assert found[1:17] == [3, 0] * 8
    assert found[17:20] == [3] * 3  # the last prompt
