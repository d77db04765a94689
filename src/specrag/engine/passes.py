"""Segments, the requests that coroutines yield (passes and others), and the protocol of models that run passes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

from specrag.engine.outputs import Outputs, Row

T = TypeVar("T")


class Cache(Protocol):
    """A model's cache of one sequence: the keys and values of its first ``length`` tokens.

    A pass writes a segment's rows behind ``length`` without counting them; :meth:`accept` keeps some of them and
    drops the rest.
    """

    @property
    def length(self) -> int:
        """Number of tokens that the cache holds."""

    def accept(self, rows: Sequence[int]) -> None:
        """Keep these rows of the last segment, given as offsets from ``length`` in ascending order.

        The kept rows close up behind ``length``, which grows by their number. A second call refers to the rows
        behind the new ``length``, provided that the rows kept so far were the first ones.
        """

    def truncate(self, length: int) -> None:
        """Drop everything behind the first ``length`` tokens."""

    def fork(self, length: int) -> Cache:
        """A cache that shares the first ``length`` tokens with this one; copies nothing."""

    def reserve(self, length: int) -> None:
        """Make room for ``length`` tokens in one step."""

    @property
    def nbytes(self) -> int:
        """Bytes held by this cache alone, without shared extents."""

    def extents(self) -> Sequence[Any]:
        """The buffers that this cache reads, shared ones included; each has ``nbytes``."""

    def clear(self) -> None:
        """Release the memory. The cache is empty afterwards and can be used again."""


@dataclass(frozen=True, slots=True)
class Others:
    """The other segments of a packed pass.

    Attributes:
        segments: their number.
        rows: their total number of rows.
        context: tokens in front of their rows, summed over segments.
        row_context: rows times tokens in front of them, summed over segments.
    """

    segments: int = 0
    rows: int = 0
    context: int = 0
    row_context: int = 0

    def without(self, some: Others) -> Others:
        """These segments less ``some``."""
        return Others(
            self.segments - some.segments,
            self.rows - some.rows,
            self.context - some.context,
            self.row_context - some.row_context,
        )


@dataclass(frozen=True, slots=True)
class PassReport:
    """Timing of the pass that a segment was in.

    Attributes:
        seconds: duration of the whole packed pass, without the wait for it.
        others: what was computed beside the segment.
        writing: those of the others that were not reading a prompt.
    """

    seconds: float
    others: Others
    writing: Others


@dataclass(slots=True)
class Segment:
    """The rows of one sequence in a pass.

    Args:
        cache: the sequence's keys and values; the rows follow its ``length`` tokens.
        tokens: one token per row.
        parents: for each row, the row of this segment that it follows, -1 for the cache's last token; rows come
            after their parents. ``None`` means a chain: each row follows the one before it.
        outputs: what each row returns.
        features: for a model that reads hidden states beside tokens (an EAGLE head): one vector per row.
        written: rows of the tree that earlier passes wrote behind the cache's ``length`` tokens and that stay there;
            this segment's rows are written behind them. ``parents`` then begins with the parents of those rows. The
            cache must not be changed in between.
        report: set by the executor once the pass has run.
    """

    cache: Any
    tokens: Sequence[int]
    parents: Sequence[int] | None
    outputs: Sequence[Outputs]
    features: Sequence[Any] | None = None
    written: int = 0
    report: PassReport | None = None

    def depths(self) -> list[int]:
        """Distance of each row from the cache's last token, minus one; rows already written come first.

        Row ``i`` is at position ``cache.length + depths()[i]``.
        """
        if self.parents is None:
            return list(range(len(self.tokens)))
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return depths


def report_pass(segments: Sequence[Segment], seconds: float) -> None:
    """Set each segment's :class:`PassReport`."""
    every = _together(segments)
    # A segment that reads a prompt requests no logits of its first row.
    writes = [bool(segment.outputs) and segment.outputs[0].needs_logits for segment in segments]
    writing = _together([segment for segment, does in zip(segments, writes, strict=True) if does])
    for segment, does in zip(segments, writes, strict=True):
        mine = _together([segment])
        segment.report = PassReport(seconds, every.without(mine), writing.without(mine) if does else writing)


def _together(segments: Sequence[Segment]) -> Others:
    rows = [len(segment.tokens) for segment in segments]
    contexts = [segment.cache.length for segment in segments]
    products = [count * context for count, context in zip(rows, contexts, strict=True)]
    return Others(len(segments), sum(rows), sum(contexts), sum(products))


class SessionModel(Protocol):
    """A model that keeps sessions: passes over segments, logits, hidden states."""

    @property
    def vocab_size(self) -> int:
        """Number of logits in a row."""

    @property
    def context_length(self) -> int:
        """Largest number of tokens in a sequence."""

    def new_cache(self) -> Any:
        """An empty :class:`Cache`."""

    def forward(self, segments: Sequence[Segment]) -> list[list[Row]]:
        """Run one packed pass over all rows of all segments; returns the answers in the same order."""


@dataclass(frozen=True, slots=True)
class Pass:
    """A request: run this segment. Answered with the segment's ``list[Row]``.

    Args:
        unread: rows of a prompt still to be read, the segment's included; 0 if the segment decodes.
    """

    model: SessionModel
    segment: Segment
    unread: int = 0


@dataclass(frozen=True, slots=True)
class Search:
    """A request: call ``function`` in a thread while other work goes on. Answered with what it returns.

    Args:
        remote: it may wait long for another machine; such searches have their own threads, so that they hold up
            nothing that is computed on this one.
    """

    function: Callable[[], Any]
    remote: bool = False


@dataclass(frozen=True, slots=True)
class Start:
    """A request: run this coroutine concurrently. Answered at once with a handle for :class:`Wait`."""

    coroutine: Coroutine[Any]


@dataclass(frozen=True, slots=True)
class Wait:
    """A request: resume when all of these handles have ended, or the first of them.

    Answered with the list of handles that have ended. A handle's ``result()`` gives its value.
    """

    handles: Sequence[Any]
    first: bool = False


@dataclass(frozen=True, slots=True)
class Emit:
    """A message to the caller, such as newly decoded tokens; the coroutine goes on at once."""

    value: Any


Request: TypeAlias = Pass | Search | Start | Wait | Emit
Coroutine: TypeAlias = Generator[Request, Any, T]


def gather(coroutines: Sequence[Coroutine[T]]) -> Coroutine[list[T]]:
    """Run coroutines concurrently, with their passes packed together; returns their results in the order given.

    The first error ends all of them.
    """
    handles = []
    for coroutine in coroutines:
        handles.append((yield Start(coroutine)))
    running = handles
    try:
        while running:
            for handle in (yield Wait(running, first=True)):
                handle.result()
            running = [handle for handle in running if not handle.done]
    finally:
        for handle in handles:
            handle.cancel()
    return [handle.result() for handle in handles]
