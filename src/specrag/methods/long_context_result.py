"""What a question about a long context gives back: the answer, what was read for it, and the times apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from specrag.methods.generation import Generation
from specrag.retrieval.context_settings import ContextPart, ScoredChunk

if TYPE_CHECKING:
    from specrag.engine.memory import MemoryNeed


@dataclass(frozen=True, slots=True)
class ContextReading:
    """The first event of a streamed answer: what will be read, by whom; nothing has been read yet.

    Attributes:
        question: as it was asked and searched with.
        method: that decodes.
        fallback: why this is another method than the one asked for; empty where it is not.
        part: the chunks that the drafter, or with ``rag`` the target, reads; ``None`` where nobody reads a part.
        prompt_tokens: that the target reads.
        drafter_tokens: that the drafter reads as soon as it is asked for a guess; 0 where there is none, or it reads
            what the target reads.
        left_out_tokens: of the middle of the context, where it was cut to fit.
        memory: the estimate.
        retrieval_seconds: cutting, encoding and ranking the chunks; 0 where nobody reads a part.
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

    @property
    def chunks(self) -> tuple[ScoredChunk, ...]:
        """Of the part, in document order."""
        return () if self.part is None else self.part.chunks


@dataclass(frozen=True, slots=True)
class ContextStats:
    """Counts and wall-clock seconds of an answer.

    Attributes:
        retrieval_seconds, tokenizing_seconds: as of :class:`ContextReading`.
        prefix_seconds: of reading keys and values from the disk, and writing them there.
        prefill_seconds: of the target's prompt.
        drafter_prefill_seconds: of what the drafter read before its first guess.
        decode_seconds: of the text itself.
        prompt_tokens: that the target read or knew.
        cached_tokens: those of them that it knew from an earlier question or from the disk.
        drafter_tokens: that the drafter read; 0 where it was never asked for a guess.
        completion_tokens: generated.
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
        """Of decoding alone; 0 where nothing was decoded."""
        return self.completion_tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def total_seconds(self) -> float:
        """From the question to the end of the answer."""
        return (
            self.retrieval_seconds
            + self.tokenizing_seconds
            + self.prefix_seconds
            + self.prefill_seconds
            + self.drafter_prefill_seconds
            + self.decode_seconds
        )


@dataclass(frozen=True, slots=True)
class ContextAnswer:
    """An answer to a question about a long context.

    Attributes:
        text: the answer.
        reading: what was read for it.
        generation: the text as generated, with its tokens.
        prefix_note: what was wrong with keys and values on disk, which were then computed anew; empty if nothing.
    """

    text: str
    reading: ContextReading
    generation: Generation
    stats: ContextStats
    prefix_note: str = ""
