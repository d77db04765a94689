"""Suppress, tap or map the events of a part of a request, such as the steps of rewriting a question."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from specrag.engine import Coroutine, Emit, Start
from specrag.speculation import Step

T = TypeVar("T")


def suppress_events(coroutine: Coroutine[T], emitted: list[object] | None = None) -> Coroutine[T]:
    """Run a coroutine, passing on its requests and suppressing its emissions.

    Args:
        emitted: collects the suppressed emissions.
    """

    def keep(value: object) -> tuple[()]:
        if emitted is not None:
            emitted.append(value)
        return ()

    return map_events(coroutine, keep)


def tap_steps(
    coroutine: Coroutine[T], steps: list[Step], begun: Callable[[], object] = lambda: None
) -> Coroutine[T]:
    """Run a coroutine, passing everything on, and record the steps that it emits.

    Args:
        steps: collects the steps.
        begun: called after the first of them.
    """

    def note(value: object) -> tuple[object]:
        if isinstance(value, Step):
            steps.append(value)
            if len(steps) == 1:
                begun()
        return (value,)

    return map_events(coroutine, note)


def map_events(coroutine: Coroutine[T], tell: Callable[[object], Iterable[object]]) -> Coroutine[T]:
    """Run a coroutine and replace what it, or a coroutine that it starts, emits.

    Args:
        tell: returns what to emit instead of an emission.
    """
    try:
        request = next(coroutine)
        while True:
            if isinstance(request, Emit):
                for value in tell(request.value):
                    yield Emit(value)
                request = coroutine.send(None)
                continue
            if isinstance(request, Start):
                request = Start(map_events(request.coroutine, tell))
            try:
                answer = yield request
            except GeneratorExit:
                coroutine.close()
                raise
            except BaseException as error:  # for the coroutine to handle, such as a cancellation
                request = coroutine.throw(error)
            else:
                request = coroutine.send(answer)
    except StopIteration as stop:
        result: T = stop.value
        return result
