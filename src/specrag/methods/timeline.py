"""Measures what ran when during a request: where its time went, and what ran side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Literal, Self, TypeAlias

Activity: TypeAlias = Literal["encode", "look-up", "search", "prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Span:
    """Something that ran.

    Attributes:
        activity: ``encode`` a query, ``look-up`` in the cache, ``search`` of the knowledge base, ``prefill`` of a
            prompt, ``decode`` of a chunk's tokens.
        place: the output token that it was for, the first one if there are several.
        start, end: seconds since the request began.
        kept: whether its outcome is part of the result; false for chunks taken back or cut off.
    """

    activity: Activity
    place: int
    start: float
    end: float
    kept: bool

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Clocked:
    """When something ran, in seconds of the clock that measured it."""

    activity: Activity
    start: float
    end: float


class Timeline:
    """Collects the spans of one request.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.began = clock()
        self._spans: list[Span] = []

    @property
    def spans(self) -> tuple[Span, ...]:
        """All spans so far, ordered by their ends."""
        return tuple(self._spans)

    def add(self, times: Sequence[Clocked], place: int) -> None:
        """Add what a thread has measured."""
        for time in times:
            start, end = time.start - self.began, time.end - self.began
            self._spans.append(Span(time.activity, place, start, end, kept=True))

    def measure(self, activity: Activity, place: int) -> Measured:
        """Measures what runs in its ``with`` block; not kept until :meth:`keep` says so."""
        return Measured(self, activity, place)

    def note(self, span: Span) -> int:
        """Add a span and return its number."""
        self._spans.append(span)
        return len(self._spans) - 1

    def lengthen(self, first: int, second: int, seconds: float) -> None:
        """Move the border between two adjacent spans, giving the beginning of the second to the first."""
        border = min(self._spans[first].end + seconds, self._spans[second].end)
        self._spans[first] = replace(self._spans[first], end=border)
        self._spans[second] = replace(self._spans[second], start=border)

    def keep(self, numbers: Sequence[int]) -> None:
        """Mark these spans' outcome as part of the result."""
        for number in numbers:
            self._spans[number] = replace(self._spans[number], kept=True)

    def seconds(self, numbers: Sequence[int]) -> float:
        """The total time of these spans."""
        return sum(self._spans[number].seconds for number in numbers)


class Measured:
    """A ``with`` block whose time is recorded, even if an error ends it.

    Attributes:
        number: of its span, available after the block.
    """

    def __init__(self, timeline: Timeline, activity: Activity, place: int) -> None:
        self._timeline = timeline
        self._activity: Activity = activity
        self._place = place
        self.number = -1

    def __enter__(self) -> Self:
        self._start = self._timeline.clock()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        began = self._timeline.began
        span = Span(
            self._activity, self._place, self._start - began, self._timeline.clock() - began, kept=False
        )
        self.number = self._timeline.note(span)


@dataclass(frozen=True, slots=True)
class IterativeTiming:
    """Wall-clock seconds of a request, by what they were spent on.

    Attributes:
        total: from the question to the end of the text.
        encoding: of queries.
        lookup: in the speculative cache.
        searching: in the knowledge base.
        prefill: reading prompts.
        decode: of output tokens.
        discarded: the part of prefill and decode whose tokens were taken back.
        overlapped: seconds in which a search and the model ran at the same time; part of both.
    """

    total: float
    encoding: float
    lookup: float
    searching: float
    prefill: float
    decode: float
    discarded: float
    overlapped: float

    @classmethod
    def of(cls, spans: Sequence[Span], total: float) -> IterativeTiming:
        """Sum up the spans."""

        def seconds(activity: Activity) -> float:
            return sum(span.seconds for span in spans if span.activity == activity)

        written = [span for span in spans if span.activity in ("prefill", "decode")]
        return cls(
            total=total,
            encoding=seconds("encode"),
            lookup=seconds("look-up"),
            searching=seconds("search"),
            prefill=seconds("prefill"),
            decode=seconds("decode"),
            discarded=sum(span.seconds for span in written if not span.kept),
            overlapped=sum(
                max(min(search.end, other.end) - max(search.start, other.start), 0.0)
                for search in spans
                if search.activity == "search"
                for other in written
            ),
        )

    @property
    def generation(self) -> float:
        """Seconds in which the model worked (G in the paper's Figure 4)."""
        return self.prefill + self.decode

    @property
    def retrieval(self) -> float:
        """Seconds of encoding and searching in which the model did not work (R in the paper's Figure 4)."""
        return self.encoding + self.searching - self.overlapped
