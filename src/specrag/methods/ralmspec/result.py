"""The result of iterative retrieval: the text, the passage that each part of it rests on, and what it cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specrag.engine import FinishReason
from specrag.methods.citations import support
from specrag.methods.ralmspec.search import Found
from specrag.methods.ralmspec.text import Chunk, Text
from specrag.methods.timeline import IterativeTiming, Span, Timeline
from specrag.request import Details, Event, Result, Source, Timing, Usage
from specrag.retrieval import passage_text
from specrag.speculation import TARGET, DecodedToken, Step
from specrag.speculation.schedule import StrideRound


@dataclass(frozen=True, slots=True)
class Retraction(Event):
    """Text that was shown early turned out wrong.

    Attributes:
        text: the last characters shown, which are to be removed.
        tokens: how many tokens of the previous steps are taken back.
    """

    text: str
    tokens: int

    name = "correction"

    @property
    def text_lost(self) -> int:
        return len(self.text)

    def describe(self) -> dict[str, Any]:
        return {"text": self.text, "tokens": self.tokens}


@dataclass(frozen=True, slots=True)
class RetrievedChunk:
    """Tokens between two retrievals.

    Attributes:
        first: the output token that it begins with.
        tokens: how many it has.
        query: what was searched with before it.
        source: number of the passage in front of the prompt; ``None`` if nothing was found.
        verified: the knowledge base has confirmed this passage; false only after a failure.
    """

    first: int
    tokens: int
    query: str
    source: int | None
    verified: bool


@dataclass(frozen=True, slots=True)
class ChunkCounts:
    """Chunks written in a request.

    Attributes:
        kept: parts of the text.
        discarded: written to their end after a passage that turned out wrong.
        aborted: cut off while they were being written.
        discarded_tokens: tokens of the discarded ones.
    """

    kept: int
    discarded: int
    aborted: int
    discarded_tokens: int


@dataclass(frozen=True, slots=True)
class IterativeAnswer(Details):
    """An answer written with a retrieval every few tokens.

    Attributes:
        text: without stop token or stop string.
        tokens: every token with its source and, if requested, its log-probability.
        finish_reason: ``"stop"`` or ``"length"``.
        sources: the passages used, each once, in the order of their first use.
        chunks: which passage each part of the text was written after.
        rounds: of speculation; empty without it.
        counts: of chunks, including those taken back.
        usage: of the tokens kept; ``prompt_tokens`` are those of the first prompt.
        timing: where the time went.
        timeline: what ran when.
        failure: why the knowledge base could no longer be asked, if the text continued without it.
    """

    text: str
    tokens: tuple[DecodedToken, ...]
    finish_reason: FinishReason
    sources: tuple[Source, ...]
    chunks: tuple[RetrievedChunk, ...]
    rounds: tuple[StrideRound, ...]
    counts: ChunkCounts
    usage: Usage
    timing: IterativeTiming
    timeline: tuple[Span, ...]
    failure: str | None = None

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of the whole request, searches included; 0 if no time passed."""
        return self.usage.completion_tokens / self.timing.total if self.timing.total else 0.0

    def result(self) -> Result:
        """The answer in the form common to all methods."""
        timing = self.timing
        return Result(
            text=self.text,
            tokens=self.tokens,
            finish_reason=self.finish_reason,
            usage=self.usage,
            timing=Timing(timing.prefill, timing.decode, phases={"retrieval": timing.retrieval}),
            sources=self.sources,
            retrieved=len(self.chunks),
            details=self,
        )

    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = {
            "retrievals": len(self.chunks),
            "guessed_right": sum(round.matched for round in self.rounds),
            "discarded_tokens": self.counts.discarded_tokens,
        }
        if self.failure is not None:
            summary["failure"] = "the knowledge base failed in mid-answer"
        return summary

    def record(self) -> dict[str, Any]:
        timing = self.timing
        return {
            "chunks": [asdict(chunk) for chunk in self.chunks],
            "rounds": [asdict(round) for round in self.rounds],
            "chunk_counts": asdict(self.counts),
            "failure": self.failure,
            "seconds": {
                **asdict(timing),
                "generation": timing.generation,
                "retrieval": timing.retrieval,
            },
            "timeline": [asdict(span) for span in self.timeline],
        }

    def notes(self) -> list[str]:
        if self.failure is None:
            return []
        return [f"written on without the knowledge base, which failed ({self.failure})"]

    def figures(self) -> list[str]:
        figures = [f"{len(self.chunks)} retrieval{'s' if len(self.chunks) != 1 else ''}"]
        if self.rounds:
            right = sum(round.matched for round in self.rounds)
            wrong = sum(round.matched < round.stride for round in self.rounds)
            figures.append(f"{right} guessed right, {wrong} wrong")
        return figures


class Record:
    """Sums up one request as it goes.

    Args:
        text: still empty.
        timeline: of the request.

    Attributes:
        text: the settled text.
        failure: see :class:`IterativeAnswer`.
    """

    def __init__(self, text: Text, timeline: Timeline) -> None:
        self.text = text
        self.failure: str | None = None
        self._timeline = timeline
        self._last = timeline.began
        self._chunks: list[Chunk] = []
        self._retrieved: list[RetrievedChunk] = []
        self._sources: dict[int, Source] = {}
        self._rounds: list[StrideRound] = []
        self._discarded: list[Chunk] = []
        self._aborted = 0

    def step(self, chunk: Chunk) -> Step:
        """A chunk as the caller sees it."""
        now = self._timeline.clock()
        seconds, self._last = now - self._last, now
        drafted: Counter[str] = Counter()
        for step in chunk.steps:
            drafted.update(step.drafted_by)
        return Step(
            tokens=chunk.tokens,
            text=chunk.shown,
            drafted_by=drafted,
            accepted=sum(step.accepted for step in chunk.steps),
            seconds=seconds,
            drafting=sum(step.drafting for step in chunk.steps),
            verifying=sum(step.verifying for step in chunk.steps),
            finish_reason=chunk.text.finish_reason,
        )

    def accept(self, chunk: Chunk, query: str, found: Found) -> None:
        """Add the chunk to the text."""
        first = len(self.text.tokens)
        verified = self.failure is None
        self._retrieved.append(RetrievedChunk(first, len(chunk.tokens), query, self._number(found), verified))
        self._chunks.append(chunk)
        self._timeline.keep(chunk.spans)
        self.text = chunk.text

    def discard(self, chunk: Chunk) -> None:
        """Count a chunk that was written in vain."""
        self._discarded.append(chunk)

    def abort(self) -> None:
        """Count a chunk that was cut off."""
        self._aborted += 1

    def observe(self, round: StrideRound) -> None:
        """Add a round of speculation that has ended."""
        self._rounds.append(round)

    def answer(self) -> IterativeAnswer:
        """The result; the text has ended."""
        total = self._timeline.clock() - self._timeline.began
        text = "".join(chunk.shown for chunk in self._chunks)
        reason = self.text.finish_reason
        assert reason is not None
        spans = self._timeline.spans
        return IterativeAnswer(
            text=text,
            tokens=tuple(token for chunk in self._chunks for token in chunk.tokens),
            finish_reason=reason,
            sources=tuple(_supported(source, text) for source in self._sources.values()),
            chunks=tuple(self._retrieved),
            rounds=tuple(self._rounds),
            counts=ChunkCounts(
                len(self._chunks),
                len(self._discarded),
                self._aborted,
                sum(len(chunk.tokens) for chunk in self._discarded),
            ),
            usage=_usage(self._chunks),
            timing=IterativeTiming.of(spans, total),
            timeline=spans,
            failure=self.failure,
        )

    def _number(self, found: Found) -> int | None:
        passage = found.passage
        if passage is None:
            return None
        if passage.id not in self._sources:
            number = len(self._sources) + 1
            self._sources[passage.id] = Source(number, passage, found.score or 0.0)
        return self._sources[passage.id].number


def _supported(source: Source, text: str) -> Source:
    passage = source.passage
    share = support(text, passage_text(passage.title, passage.text))
    return Source(source.number, passage, source.score, support=share)


def _usage(chunks: Sequence[Chunk]) -> Usage:
    steps = [step for chunk in chunks for step in chunk.steps]
    tokens = [token for step in steps for token in step.tokens]
    drafted: Counter[str] = Counter()
    for step in steps:
        drafted.update(step.drafted_by)
    return Usage(
        prompt_tokens=chunks[0].prompt_tokens,
        cached_tokens=0,
        completion_tokens=len(tokens),
        passes=len(steps),
        drafted_by=dict(drafted),
        accepted_by=dict(Counter(token.source for token in tokens if token.source != TARGET)),
        relaxed=sum(token.relaxed for token in tokens),
    )
