"""Shared by the methods that speculate on searches: the stride, and work that goes on beside a search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, Literal, TypeVar

from specrag.engine import Coroutine, Start, Task, Wait
from specrag.errors import Cancelled
from specrag.speculation.schedule import OS3, FixedStride, SharedStrides, StrideSchedule

Result = TypeVar("Result")

#: The schedule that weighs guesses against what they cost.
COST_AWARE: Final = "cost-aware"


def make_schedule(
    stride: int | Literal["os3"], asynchronous: bool, max_match: float | None, shared: SharedStrides
) -> StrideSchedule:
    """The schedule of one request.

    Args:
        stride: a fixed one, or the paper's scheduler.
        asynchronous: whether work goes on during a search.
        max_match: OS3's cap on the match rate; ``None`` uses a confidence bound instead of a cap.
        shared: what all requests learn together.

    Raises:
        InputError: OS3 has no use for this cap.
    """
    if isinstance(stride, str):
        return OS3(asynchronous=asynchronous, max_match=max_match, shared=shared)
    return FixedStride(stride)


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
