"""Reflective reading: an answer from each passage, judged by relevance and support (after Self-RAG; Asai et al., 2024).

Self-RAG trains its model to write reflection tokens; here a model that can score is asked instead whether the passage
is relevant and whether it supports the answer. The weights are Self-RAG's (1 for each), the score is its sum: how
probable the answer is a token, plus the two grades.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.answers.corrective_reading import Statement, judging
from benchmarks.answers.passage_reading import PassageReading, Reading
from specrag.engine.passes import Coroutine
from specrag.errors import InputError
from specrag.methods.speculative_rag.task import Task
from specrag.models.roles import GeneratedText, TextScorer
from specrag.retrieval.passage import Passage, passage_text

_RELEVANT = "Is the passage relevant to this?"
_SUPPORTED = "Does the passage support the answer?"


@dataclass(frozen=True, slots=True)
class Reflected:
    """The answer from one passage.

    Attributes:
        reading: the answer, with the passage's number.
        confidence: mean probability of its tokens (geometric), 0 to 1; 0 where the model does not tell.
        relevant, supported: grades, 0 to 1.
    """

    reading: Reading
    confidence: float
    relevant: float
    supported: float

    def score(self, relevance: float, support: float) -> float:
        """Self-RAG's sum with these weights."""
        return self.confidence + relevance * self.relevant + support * self.supported


class ReflectiveReading:
    """Answers from each passage alone, and takes the answer that is judged best.

    Args:
        critic: judges.
        reading: answers.
        passages: at most so many are read, the best ones; Self-RAG reads 5 or 10.
        relevance, support: weights of the grades.

    Raises:
        InputError: a value cannot be used.
    """

    def __init__(
        self,
        critic: TextScorer,
        reading: PassageReading,
        *,
        passages: int = 5,
        relevance: float = 1.0,
        support: float = 1.0,
    ) -> None:
        if isinstance(passages, bool) or not isinstance(passages, int) or passages < 1:
            raise InputError("passages", passages, "give a whole number from 1 upwards")
        for name, value in (("relevance", relevance), ("support", support)):
            if not 0 <= value < math.inf:
                raise InputError(name, value, "give a weight of 0 or more")
        self.critic = critic
        self.reading = reading
        self.passages = passages
        self.relevance = relevance
        self.support = support

    def answering(self, task: Task, passages: Sequence[Passage]) -> Coroutine[Reading]:
        """A coroutine that answers; :attr:`Reading.kept` is the passage whose answer was taken, tokens are of all.

        Raises:
            InputError: there are no passages.
            ContextLengthError: a passage does not fit.
        """
        reflected = yield from self.reflecting(task, passages)
        best = max(reflected, key=lambda one: one.score(self.relevance, self.support))
        readings = [one.reading for one in reflected]
        return replace(
            best.reading,
            prompt_tokens=sum(reading.prompt_tokens for reading in readings),
            read_tokens=sum(reading.read_tokens for reading in readings),
            completion_tokens=sum(reading.completion_tokens for reading in readings),
            judged_tokens=sum(reading.judged_tokens for reading in readings),
        )

    def reflecting(self, task: Task, passages: Sequence[Passage]) -> Coroutine[list[Reflected]]:
        """A coroutine that gives the answer from each passage with its grades."""
        if not passages:
            raise InputError("passages", [], "give at least one passage")
        read = passages[: self.passages]
        requests = [self.reading.request(task, [passage]) for passage in read]
        written: list[GeneratedText] = yield from self.reading.generator.generating(requests)
        statements = []
        for passage, request, text in zip(read, requests, written, strict=True):
            seen = f"\nPassage: {passage_text(passage.title, passage.text.strip())}"
            answer = f"\nAnswer: {request.lead}{text.text}".rstrip()
            statements.append(Statement(task.asked, seen, _RELEVANT))
            statements.append(Statement(task.asked, seen + answer, _SUPPORTED))
        judged = yield from judging(self.critic, statements)
        reflected = []
        for number, (request, text) in enumerate(zip(requests, written, strict=True)):
            reading = self.reading.read(task, request, text, (number + 1,))
            if number == 0:
                reading = replace(reading, judged_tokens=judged.read_tokens)
            relevant, supported = judged.shares[2 * number : 2 * number + 2]
            reflected.append(Reflected(reading, _confidence(text), relevant, supported))
        return reflected


def _confidence(text: GeneratedText) -> float:
    known = [token.log_prob for token in text.tokens if token.log_prob is not None]
    return math.exp(sum(known) / len(known)) if known else 0.0
