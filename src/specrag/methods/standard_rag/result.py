"""What standard RAG reports beside its text: the question searched with, the citations, the times."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from specrag.methods.citations import Citations
from specrag.request import Details, Result, Source, Timing, Usage, nothing_relevant
from specrag.retrieval import Hit


@dataclass(frozen=True, slots=True)
class AnswerStats:
    """Counts and wall-clock seconds of an answer.

    Attributes:
        rewrite_seconds: of rewriting the question; 0 if that was not needed.
        retrieval_seconds: of the search.
        prefill_seconds, decode_seconds: of the answer's text.
        prompt_tokens, completion_tokens: of the answer's text, without the rewriting.
    """

    rewrite_seconds: float
    retrieval_seconds: float
    prefill_seconds: float
    decode_seconds: float
    prompt_tokens: int
    completion_tokens: int

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of decoding alone; 0 if nothing was decoded."""
        return self.completion_tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def total_seconds(self) -> float:
        """From the question to the end of the answer."""
        return self.rewrite_seconds + self.retrieval_seconds + self.prefill_seconds + self.decode_seconds


@dataclass(frozen=True, slots=True)
class Answer(Details):
    """An answer with what it rests on.

    Attributes:
        text: the answer; :data:`~specrag.request.ABSTENTION` in the question's language if nothing relevant was found.
        sources: the passages in the prompt, best first; for an abstention, the passages found.
        question: as it was searched with, after rewriting.
        abstained: nothing relevant was found, and no text was generated.
        least_similarity: see :class:`~specrag.request.Sources`.
        citations: the citations in the text, checked.
        unheld: names and numbers of the text that no passage cited for them has.
        left_out: passages found for which the prompt had no room.
        shortened: whether the best passage was cut because it did not fit even alone.
        generation: the text as generated, with its tokens; ``None`` for an abstention.
    """

    text: str
    sources: tuple[Source, ...]
    question: str
    abstained: bool
    least_similarity: float | None
    citations: Citations
    unheld: tuple[str, ...]
    left_out: tuple[Hit, ...]
    shortened: bool
    generation: Result | None
    stats: AnswerStats

    def result(self) -> Result:
        """The answer in the form common to all methods."""
        stats, generation = self.stats, self.generation
        phases = {"rewrite": stats.rewrite_seconds, "retrieval": stats.retrieval_seconds}
        return Result(
            text=self.text,
            tokens=() if generation is None else generation.tokens,
            finish_reason="stop" if generation is None else generation.finish_reason,
            usage=Usage(0, 0, 0, 0, {}, {}) if generation is None else generation.usage,
            timing=Timing(0.0, 0.0, phases=phases)
            if generation is None
            else replace(generation.timing, phases=phases),
            sources=self.sources,
            retrieved=len(self.sources) + len(self.left_out),
            details=self,
        )

    def summary(self) -> dict[str, Any]:
        return {"abstained": self.abstained, "question": self.question, "unheld": list(self.unheld)}

    def record(self) -> dict[str, Any]:
        return {
            **self.summary(),
            "citations": [
                asdict(citation) | {"supported": citation.supported} for citation in self.citations.found
            ],
            "invalid_citations": list(self.citations.invalid),
            "left_out": len(self.left_out),
            "shortened": self.shortened,
        }

    def notes(self) -> list[str]:
        notes = []
        if self.abstained and self.sources:
            notes.append(nothing_relevant(self.sources, self.least_similarity))
        if self.citations.invalid:
            numbers = ", ".join(f"[{number}]" for number in self.citations.invalid)
            notes.append(f"the answer cites {numbers}, which is no source")
        # A second passage is cited for what the first one lacks.
        held = {citation.sentence for citation in self.citations.found if citation.supported}
        for citation in self.citations.unsupported:
            if citation.sentence not in held:
                notes.append(f"[{citation.number}] holds little of what it is cited for: {citation.sentence}")
        if self.unheld:
            notes.append(f"in no cited passage: {', '.join(self.unheld)}")
        usage = None if self.generation is None else self.generation.usage
        if usage is not None and usage.pasted:
            notes.append(
                f"an approximation: {usage.pasted} of {usage.prompt_tokens} prompt tokens were read behind another text"
            )
        if self.shortened:
            notes.append("the best passage was shortened to fit the prompt")
        if self.left_out:
            passages = "1 passage" if len(self.left_out) == 1 else f"{len(self.left_out)} passages"
            notes.append(f"{passages} left out, since the prompt was full")
        return notes
