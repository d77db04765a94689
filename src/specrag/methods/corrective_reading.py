"""Corrective reading: grade every passage, read only the good ones (after CRAG; Yan et al., 2024).

CRAG trains an evaluator; here any model that can score grades, by how probable it finds "Yes". Where CRAG would search
the web, since no passage is good, this reads the best one: there is nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specrag.engine.passes import Coroutine
from specrag.errors import InputError
from specrag.methods.draft_task import Task
from specrag.methods.passage_judging import Statement, judging
from specrag.methods.passage_reading import PassageReading, Reading
from specrag.models.roles import TextScorer
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
