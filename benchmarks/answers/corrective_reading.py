"""Corrective reading: grade every passage, read only the good ones (after CRAG; Yan et al., 2024).

CRAG trains an evaluator; here any model that can score grades, by how probable it finds "Yes". Where CRAG would search
the web, since no passage is good, this reads the best one: there is nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.answers.passage_reading import PassageReading, Reading
from specrag.engine.passes import Coroutine
from specrag.errors import InputError
from specrag.methods.speculative_rag.task import Task
from specrag.models.roles import ScoringRequest, TextPart, TextScorer
from specrag.retrieval.passage import Passage, passage_text

_ASKED = "Does the passage help to answer this?"


class CorrectiveReading:
    """Grades passages, keeps the good ones, answers from them.

    Args:
        evaluator: grades; CRAG's is much smaller than its reader.
        reading: answers.
        upper: a passage with at least this grade is correct. If any is, the others are left out.
        lower: a passage below this grade is incorrect; between the two it is ambiguous, and read if none is correct.

    Raises:
        InputError: a grade is no share, or they are in the wrong order.
    """

    def __init__(
        self, evaluator: TextScorer, reading: PassageReading, *, upper: float = 0.5, lower: float = 0.2
    ) -> None:
        if not 0 <= lower <= upper <= 1:
            raise InputError("upper", upper, f"give shares with 0 <= lower ({lower}) <= upper <= 1")
        self.evaluator = evaluator
        self.reading = reading
        self.upper = upper
        self.lower = lower

    def answering(self, task: Task, passages: Sequence[Passage]) -> Coroutine[Reading]:
        """A coroutine that answers; :attr:`Reading.kept` says from which passages.

        Raises:
            InputError: there are no passages.
            ContextLengthError: the best passage does not fit.
        """
        if not passages:
            raise InputError("passages", [], "give at least one passage")
        statements = [
            Statement(task.asked, f"\nPassage: {passage_text(p.title, p.text.strip())}", _ASKED)
            for p in passages
        ]
        judged = yield from judging(self.evaluator, statements)
        kept = self.keep(judged.shares)
        reading: Reading = yield from self.reading.answering(task, [passages[index] for index in kept])
        numbers = tuple(kept[number - 1] + 1 for number in reading.kept)
        return replace(reading, kept=numbers, judged_tokens=judged.read_tokens)

    def keep(self, grades: Sequence[float]) -> list[int]:
        """Indices of the passages to read, in their order; at least one."""
        for least in (self.upper, self.lower):
            good = [index for index, grade in enumerate(grades) if grade >= least]
            if good:
                return good
        return [max(range(len(grades)), key=grades.__getitem__)]


_YES, _NO = "yes", "no"


@dataclass(frozen=True, slots=True)
class Statement:
    """What is to be judged.

    Args:
        before: what all statements of a call begin with, such as the question; read once.
        text: such as a passage.
        asked: a question that is answered with yes or no.
    """

    before: str
    text: str
    asked: str


@dataclass(frozen=True, slots=True)
class Judged:
    """The grades.

    Attributes:
        shares: P(yes) / (P(yes) + P(no)) for each statement.
        read_tokens: tokens that were read.
    """

    shares: tuple[float, ...]
    read_tokens: int


def judging(scorer: TextScorer, statements: Sequence[Statement]) -> Coroutine[Judged]:
    """Grade statements, all in one call."""
    requests = [
        ScoringRequest(
            statement.before,
            (
                TextPart("text", statement.text, scored=False),
                TextPart("asked", f"\n{statement.asked} (Yes or No)\nAnswer:", scored=False),
                TextPart("answer", answer),
            ),
        )
        for statement in statements
        for answer in (" Yes", " No")
    ]
    scored = yield from scorer.scoring(requests)
    shares = []
    for yes, no in zip(scored[::2], scored[1::2], strict=True):
        difference = no.parts["answer"].total - yes.parts["answer"].total
        shares.append(1 / (1 + math.exp(min(difference, 700.0))))
    return Judged(tuple(shares), sum(one.read_tokens for one in scored))
