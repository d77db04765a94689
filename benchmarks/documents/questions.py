"""The questions, what is right, and the documents that say so."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from specrag.bench.metrics import contains_answer

FOLDER = Path(__file__).parent
FILES = FOLDER / "files"

#: In the order of the tables.
KINDS = ("direct", "table", "multi-hop", "german", "chinese", "follow-up", "unanswerable")


@dataclass(frozen=True, slots=True)
class Question:
    """A question about the documents.

    Attributes:
        identifier: ``q01`` and so on.
        kind: of :data:`KINDS`.
        history: what was said before.
        answers: one of them is in a right answer; none where the documents do not hold it.
        sources: names of the files that hold it.
    """

    identifier: str
    kind: str
    question: str
    history: tuple[Mapping[str, str], ...]
    answers: tuple[str, ...]
    sources: tuple[str, ...]

    @property
    def answerable(self) -> bool:
        """Whether the documents hold the answer."""
        return bool(self.answers)

    def is_right(self, text: str) -> bool:
        """Whether an answer holds one of the right ones, in Chinese as part of the text; never where none is."""
        if not self.answerable:
            return False
        if self.kind == "chinese":
            return any(answer in text for answer in self.answers)
        return contains_answer(text, self.answers)


def load_questions() -> list[Question]:
    """All of them."""
    with (FOLDER / "questions.jsonl").open(encoding="utf-8") as lines:
        return [
            Question(
                identifier=row["id"],
                kind=row["kind"],
                question=row["question"],
                history=tuple(row["history"]),
                answers=tuple(row["answers"]),
                sources=tuple(row["sources"]),
            )
            for row in map(json.loads, lines)
        ]
