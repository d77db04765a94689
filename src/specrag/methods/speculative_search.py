"""Shared by the methods that speculate on searches: the stride, and work that goes on beside a search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, Literal, TypeAlias, TypeVar

from specrag.engine.executor import Task
from specrag.engine.passes import Coroutine, Start, Wait
from specrag.errors import Cancelled, InputError
from specrag.speculation.schedule.strides import OS3, FixedStride, SharedStrides, StrideSchedule

Result = TypeVar("Result")

#: A fixed stride, the paper's scheduler by name, or a function that makes a schedule for a request.
Stride: TypeAlias = int | Literal["os3"] | Callable[[], StrideSchedule]

#: The schedule that weighs guesses against what they cost.
COST_AWARE: Final = "cost-aware"

#: The paper's cap on the estimated match rate.
MAX_MATCH = 0.6


def make_schedule(
    stride: Stride,
    asynchronous: bool,
    max_match: float | None,
    shared: SharedStrides,
    names: tuple[str, ...] = ("os3",),
) -> StrideSchedule:
    """The schedule of one request.

    Args:
        stride: as the caller chose it.
        asynchronous: whether work goes on during a search.
        max_match: OS3's cap on the match rate; ``None`` uses a confidence bound instead of a cap.
        shared: what all requests learn together.
        names: the schedules that the caller knows, for the error about an unknown one.

    Raises:
        InputError: a value cannot be used.
    """
    if isinstance(stride, str):
        if stride != "os3":
            known = ", ".join((*names[:-1], f"or {names[-1]}"))
            raise InputError("stride", stride, f"give a whole number of at least 1, {known}")
        return OS3(asynchronous=asynchronous, max_match=max_match, shared=shared)
    return stride() if callable(stride) else FixedStride(stride)


@dataclass(frozen=True, slots=True)
class Beside(Generic[Result]):
    """The result of a search, and what became of the work beside it.

    Attributes:
        found: the search's result.
        finished: whether the work came to its end; otherwise it was cut off.
    """

    found: Result
    finished: bool


def search_beside(
    searching: Coroutine[Result], working: Coroutine[None], wanted: Callable[[Result], bool]
) -> Coroutine[Beside[Result]]:
    """Search and work at once; the work is cut off at its next pass if the search makes it useless.

    Args:
        searching, working: run side by side.
        wanted: whether the work is still useful, once the search's result is known; may raise to end both.
    """
    search: Task[Result]
    work: Task[None]
    search = yield Start(searching)
    work = yield Start(working)
    yield Wait([search, work], first=True)
    yield Wait([search])
    found = search.result()
    if not wanted(found):
        work.cancel()
    yield Wait([work])
    try:
        work.result()
    except Cancelled:
        return Beside(found, finished=False)
    return Beside(found, finished=True)
