"""A part of a request whose steps are nobody else's business, such as rewriting a question."""

from __future__ import annotations

from typing import TypeVar

from specrag.engine.passes import Coroutine, Emit

T = TypeVar("T")


def quietly(coroutine: Coroutine[T], emitted: list[object] | None = None) -> Coroutine[T]:
    """Run a coroutine, passing on what it asks for and keeping back what it emits.

    Args:
        emitted: what it emits is appended here.
    """
    try:
        request = next(coroutine)
        while True:
            if isinstance(request, Emit):
                if emitted is not None:
                    emitted.append(request.value)
                request = coroutine.send(None)
                continue
            try:
                answer = yield request
            except GeneratorExit:
                coroutine.close()
                raise
            except BaseException as error:  # the coroutine's own to handle, such as a cancellation
                request = coroutine.throw(error)
            else:
                request = coroutine.send(answer)
    except StopIteration as stop:
        result: T = stop.value
        return result
