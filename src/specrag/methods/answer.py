"""What a method that answers from passages gives back: the answer, its sources, its citations, its times."""

from __future__ import annotations

from dataclasses import dataclass

from specrag.methods.citations import Citations
from specrag.methods.generation import Generation
from specrag.retrieval.passage import Hit, Passage

#: The answer where nothing relevant was found.
ABSTENTION = "The knowledge base holds nothing about this question."


@dataclass(frozen=True, slots=True)
class Source:
    """A passage in the prompt.

    Attributes:
        number: by which the answer cites it, from 1.
        score: as the search gave it; its scale depends on the index.
        similarity: cosine of its vector and the question's; ``None`` where it was not asked for.
        cited: whether the answer cites it.
        support: share of the answer's content words that the passage holds, whether cited or not; ``None`` where
            there is no answer.
    """

    number: int
    passage: Passage
    score: float
    similarity: float | None = None
    cited: bool = False
    support: float | None = None


@dataclass(frozen=True, slots=True)
class Sources:
    """The first event of a streamed answer: retrieval is done.

    Attributes:
        question: as it was searched with.
        sources: the passages in the prompt, best first; those found, where the answer is an abstention.
        left_out: passages found for which the prompt had no room.
        shortened: whether the best passage was cut, because it alone did not fit.
        abstained: nothing relevant was found: no text will be generated.
        rewrite_seconds: time of rewriting the question.
        retrieval_seconds: time of the search, the question's encoding included.
    """

    question: str
    sources: tuple[Source, ...]
    left_out: tuple[Hit, ...]
    shortened: bool
    abstained: bool
    rewrite_seconds: float
    retrieval_seconds: float


@dataclass(frozen=True, slots=True)
class AnswerStats:
    """Counts and wall-clock seconds of an answer.

    Attributes:
        rewrite_seconds: of rewriting the question; 0 where that was not needed.
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
        """Of decoding alone; 0 where nothing was decoded."""
        return self.completion_tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def total_seconds(self) -> float:
        """From the question to the end of the answer."""
        return self.rewrite_seconds + self.retrieval_seconds + self.prefill_seconds + self.decode_seconds


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer with what it rests on.

    Attributes:
        text: the answer; :data:`ABSTENTION` where nothing relevant was found.
        sources: the passages in the prompt, best first; those found, where the answer is an abstention.
        question: as it was searched with, after rewriting.
        abstained: nothing relevant was found, and no text was generated.
        citations: the citations in the text, checked.
        left_out: passages found for which the prompt had no room.
        shortened: whether the best passage was cut, because it alone did not fit.
        generation: the text as generated, with its tokens; ``None`` where the answer is an abstention.
    """

    text: str
    sources: tuple[Source, ...]
    question: str
    abstained: bool
    citations: Citations
    left_out: tuple[Hit, ...]
    shortened: bool
    generation: Generation | None
    stats: AnswerStats
