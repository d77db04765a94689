"""Runs what a pipeline's ``answering`` makes, as :mod:`specrag.methods.facade` does for every method."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from specrag.engine.executor import Executor, Task


def answer_of(pipeline: Any, *words: Any, **options: Any) -> Any:
    """The answer; emissions are dropped."""
    executor = executor_of(pipeline)
    return executor.run(_submit(executor, pipeline, words, options))


def events_of(pipeline: Any, *words: Any, **options: Any) -> Generator[Any, None, Any]:
    """What it emits as it comes; returns the answer. What is wrong is told at the call."""
    executor = executor_of(pipeline)
    return _stream(executor, _submit(executor, pipeline, words, options))


@dataclass(frozen=True)
class Played:
    """A stream to its end."""

    events: list[Any]
    answer: Any


def play(pipeline: Any, *words: Any, **options: Any) -> Played:
    """What it emits, and the answer."""
    return played(events_of(pipeline, *words, **options))


def played(events: Generator[Any, None, Any]) -> Played:
    """A stream to its end."""
    seen = []
    while True:
        try:
            seen.append(next(events))
        except StopIteration as end:
            return Played(seen, end.value)


def executor_of(pipeline: Any) -> Executor:
    """Its own, or its model's."""
    found = getattr(pipeline, "executor", None) or pipeline.llm.executor
    assert isinstance(found, Executor)
    return found


def _submit(executor: Executor, pipeline: Any, words: Any, options: Any) -> Task[Any]:
    timeout = options.get("timeout")
    coroutine = pipeline.answering(*words, **options)
    return executor.submit(coroutine, deadline=None if timeout is None else executor.clock() + timeout)


def _stream(executor: Executor, task: Task[Any]) -> Generator[Any, None, Any]:
    yield from executor.stream(task)
    return task.result()
