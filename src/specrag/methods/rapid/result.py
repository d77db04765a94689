"""The result of a question about a long context: the answer, what was read for it, and the individual times."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from specrag.methods.rapid.context.retriever import ContextPart, ScoredChunk
from specrag.request import Details, Event, Result, Table

if TYPE_CHECKING:
    from specrag.engine import MemoryNeed


@dataclass(frozen=True, slots=True)
class ContextReading(Event):
    """The first event of a streamed answer: what will be read, and by which model; nothing has been read yet.

    Attributes:
        question: as it was asked and searched with.
        method: the method that decodes.
        fallback: why this is not the method that was requested; empty if it is.
        part: the chunks that the drafter reads, or with ``long-context`` and ``read=part`` the target; ``None`` if no
            part is read.
        prompt_tokens: number that the target reads.
        drafter_tokens: number that the drafter reads as soon as it is asked for a guess; 0 if there is no drafter, or
            it reads what the target reads.
        left_out_tokens: number cut from the middle of the context to make it fit.
        memory: the estimate.
        retrieval_seconds: cutting, encoding and ranking the chunks; 0 if no part is read.
        tokenizing_seconds: making the prompts.
    """

    question: str
    method: str
    fallback: str
    part: ContextPart | None
    prompt_tokens: int
    drafter_tokens: int
    left_out_tokens: int
    memory: MemoryNeed
    retrieval_seconds: float
    tokenizing_seconds: float

    name = "retrieval"

    def describe(self) -> dict[str, Any]:
        return {
            "chunks": len(self.chunks),
            "prompt_tokens": self.prompt_tokens,
            "drafter_tokens": self.drafter_tokens,
            "fallback": self.fallback or None,
            "retrieval_seconds": self.retrieval_seconds,
        }

    @property
    def chunks(self) -> tuple[ScoredChunk, ...]:
        """The part's chunks, in document order."""
        return () if self.part is None else self.part.chunks


@dataclass(frozen=True, slots=True)
class ContextStats:
    """Counts and wall-clock seconds of an answer.

    Attributes:
        retrieval_seconds, tokenizing_seconds: see :class:`ContextReading`.
        prefix_seconds: of reading keys and values from disk, and writing them to it.
        prefill_seconds: of the target's prompt.
        drafter_prefill_seconds: of what the drafter read before its first guess.
        decode_seconds: of the text itself.
        prompt_tokens: number that the target read or knew.
        cached_tokens: those of them that it knew from an earlier question or from disk.
        drafter_tokens: number that the drafter read; 0 if it was never asked for a guess.
        completion_tokens: number generated.
    """

    retrieval_seconds: float
    tokenizing_seconds: float
    prefix_seconds: float
    prefill_seconds: float
    drafter_prefill_seconds: float
    decode_seconds: float
    prompt_tokens: int
    cached_tokens: int
    drafter_tokens: int
    completion_tokens: int

    @property
    def tokens_per_second(self) -> float:
        """Output tokens a second of decoding alone; 0 if nothing was decoded."""
        return self.completion_tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def total_seconds(self) -> float:
        """Seconds from the question to the end of the answer."""
        return (
            self.retrieval_seconds
            + self.tokenizing_seconds
            + self.prefix_seconds
            + self.prefill_seconds
            + self.drafter_prefill_seconds
            + self.decode_seconds
        )


@dataclass(frozen=True, slots=True)
class ContextAnswer(Details):
    """An answer to a question about a long context.

    Attributes:
        text: the answer.
        reading: what was read for it.
        generation: the text as generated, with its tokens.
        prefix_note: what was wrong with keys and values on disk, which were then computed again; empty if nothing.
    """

    text: str
    reading: ContextReading
    generation: Result
    stats: ContextStats
    prefix_note: str = ""

    def result(self) -> Result:
        """The answer in the form common to all methods."""
        stats, generation = self.stats, self.generation
        phases = {
            "retrieval": stats.retrieval_seconds,
            "tokenizing": stats.tokenizing_seconds,
            "prefix": stats.prefix_seconds,
            "drafter_prefill": stats.drafter_prefill_seconds,
        }
        timing = replace(
            generation.timing, prefill=stats.prefill_seconds, decode=stats.decode_seconds, phases=phases
        )
        return Result(
            text=self.text,
            tokens=generation.tokens,
            finish_reason=generation.finish_reason,
            usage=replace(generation.usage, cached_tokens=stats.cached_tokens),
            timing=timing,
            retrieved=len(self.reading.chunks),
            details=self,
        )

    def summary(self) -> dict[str, Any]:
        reading = self.reading
        return {"fallback": reading.fallback or None, "drafter_tokens": reading.drafter_tokens}

    def record(self) -> dict[str, Any]:
        from specrag.engine import peak_bytes

        reading, part = self.reading, self.reading.part
        return {
            "question": reading.question,
            "decoded_by": reading.method,
            "fallback": reading.fallback,
            "chunks": [_describe(scored) for scored in reading.chunks],
            "part": None
            if part is None
            else {
                "tokens": part.tokens,
                "budget": part.budget,
                "context_tokens": part.context_tokens,
                "context_chunks": part.context_chunks,
                "below_threshold": part.below_threshold,
                "whole": part.whole,
            },
            "left_out_tokens": reading.left_out_tokens,
            "drafter_tokens": self.stats.drafter_tokens,
            "prefix_note": self.prefix_note,
            "memory": {
                **{f"{name}_bytes": value for name, value in asdict(reading.memory).items()},
                "estimated_bytes": reading.memory.total,
                "peak_bytes": peak_bytes(),
            },
        }

    def notes(self) -> list[str]:
        reading, notes = self.reading, []
        if reading.left_out_tokens:
            notes.append(
                f"{reading.left_out_tokens:,} tokens of the middle were left out, since they did not fit"
            )
        if reading.fallback:
            notes.append(reading.fallback)
        elif reading.part is not None and reading.part.below_threshold:
            notes.append("no chunk resembles the question; the most similar one was read")
        if self.prefix_note:
            notes.append(self.prefix_note)
        return notes

    def figures(self) -> list[str]:
        known = self.stats.cached_tokens
        return [
            f"{self.stats.prompt_tokens:,} tokens read"
            + (f", {known:,} of them known before" if known else "")
        ]

    def tables(self) -> list[Table]:
        """See :class:`~specrag.request.Details`: the chunks that were read."""
        part = self.reading.part
        if part is None or self.reading.fallback:
            return []
        reads = "the drafter read" if self.reading.drafter_tokens else "the model read"
        if self.reading.drafter_tokens and not self.stats.drafter_tokens:
            reads = "the drafter was never asked; it would have read"
        title = (
            f"{reads} {len(part.chunks)} of {part.context_chunks} chunks, "
            f"{part.tokens:,} of {part.context_tokens:,} tokens:"
        )
        rows = tuple(
            (
                scored.chunk.title or scored.chunk.source,
                ", ".join(text for text in (scored.chunk.source, scored.chunk.place) if text),
                f"score {scored.score:.2f}",
            )
            for scored in part.chunks
        )
        return [Table(title, (), rows, always=True)]


def _describe(scored: ScoredChunk) -> dict[str, Any]:
    chunk = scored.chunk
    return {
        "number": scored.number,
        "source": chunk.source,
        "title": chunk.title,
        "place": chunk.place,
        "tokens": chunk.tokens,
        "score": scored.score,
        "text": chunk.text,
    }
