"""Training rows for a RAG drafter: task, answer, passages and rationale, one JSON object per line.

``{"id", "kind", "question", "options"?, "labels"?, "answer", "passages": [{"title", "text", "gold"?}], "rationale"?,
"source"?}``. Files may be gzipped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrag.bench import contains_answer, normalize_answer, read_text
from specrag.errors import InputError
from specrag.methods.speculative_rag.task import TASK_KINDS, Task
from specrag.retrieval import Passage
from specrag.training.exclusion import EvaluationRows

#: Metadata key that marks a passage as holding the answer; optional.
GOLD = "gold"
#: The file of rows in a folder made by a run.
ROWS = "rows.jsonl"


@dataclass(frozen=True, slots=True)
class DrafterRow:
    """A task and what a drafter should write (Speculative RAG, section 3.2: the triplet and its rationale).

    Args:
        identifier: unique among the rows.
        task: what is asked.
        answer: a choice's letter, a claim's label, otherwise words.
        passages: the passages to answer from; evidence may be marked with :data:`GOLD` in its metadata.
        rationale: the reason for the answer; ``None`` before one is written.
        source: what the row was made from, with its licence, for human readers.

    Raises:
        InputError: a value cannot be used.
    """

    identifier: str
    task: Task
    answer: str
    passages: tuple[Passage, ...]
    rationale: str | None = None
    source: str = ""

    def __post_init__(self) -> None:
        if not self.identifier:
            raise InputError("id", self.identifier, "give each row one of its own")
        if self.task.choices:
            if self.answer not in self.task.choices:
                raise InputError("answer", self.answer, f"take one of {', '.join(self.task.choices)}")
        elif not normalize_answer(self.answer):
            raise InputError("answer", self.answer, "give at least one word")
        if not any(passage.text.strip() for passage in self.passages):
            raise InputError("passages", [], "give at least one with a text")
        if self.rationale is not None and not self.rationale.strip():
            raise InputError("rationale", self.rationale, "give one of at least one word, or none")

    @property
    def answer_text(self) -> str:
        """The answer in words: an option's text in place of its letter."""
        return self.task.options.get(self.answer, self.answer)

    @property
    def evidence(self) -> tuple[Passage, ...]:
        """The passages marked as evidence; if none are, those that contain the answer (for a claim, none)."""
        marked = tuple(passage for passage in self.passages if passage.metadata.get(GOLD))
        if marked or self.task.kind == "claim-checking":
            return marked
        return tuple(each for each in self.passages if contains_answer(each.text, self.answer_text))


@dataclass(frozen=True, slots=True)
class Kept:
    """Rows that share nothing with the evaluation data.

    Attributes:
        rows: in their order.
        same_question: rows left out because of their question or claim.
        same_passage: rows left out because of their answer and a passage.
    """

    rows: tuple[DrafterRow, ...]
    same_question: int
    same_passage: int

    @property
    def excluded(self) -> int:
        """Rows left out."""
        return self.same_question + self.same_passage


def read_rows(paths: Sequence[Path]) -> list[DrafterRow]:
    """The rows of JSON lines files, in order; a folder stands for its :data:`ROWS`.

    Raises:
        InputError: a file cannot be read or holds no rows, or a line is not a row or repeats an id; the message
            names file, line and field.
    """
    rows: list[DrafterRow] = []
    places: dict[str, str] = {}
    for given in paths:
        path = given / ROWS if given.is_dir() else given
        before = len(rows)
        for number, line in enumerate(read_text(path).split("\n"), 1):
            if not line.strip():
                continue
            place = f"{path.name}:{number}"
            row = parse_row(line, place)
            if row.identifier in places:
                remedy = f"it stands at {places[row.identifier]} too; give each row one of its own"
                raise InputError(f"{place}: id", row.identifier, remedy)
            places[row.identifier] = place
            rows.append(row)
        if len(rows) == before:
            raise InputError("rows", str(path), "there are none in it")
    if not rows:
        raise InputError("rows", [], "give at least one file")
    return rows


def parse_row(line: str, place: str) -> DrafterRow:
    """Parse a row from its line.

    Args:
        place: file and line, for errors.

    Raises:
        InputError: it is not a row.
    """
    try:
        values = json.loads(line)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise InputError(place, line, "write one whole JSON object a line")
    try:
        return _row(values)
    except InputError as error:
        raise InputError(f"{place}: {error.field}", error.value, error.remedy) from None


def row_json(row: DrafterRow) -> str:
    """A row as a line, without the line end."""
    values: dict[str, Any] = {"id": row.identifier, "kind": row.task.kind, "question": row.task.text}
    if row.task.options:
        values["options"] = dict(row.task.options)
    if row.task.labels:
        values["labels"] = list(row.task.labels)
    values["answer"] = row.answer
    values["passages"] = [
        {"title": passage.title, "text": passage.text} | ({GOLD: True} if passage.metadata.get(GOLD) else {})
        for passage in row.passages
    ]
    if row.rationale is not None:
        values["rationale"] = row.rationale
    if row.source:
        values["source"] = row.source
    return json.dumps(values, ensure_ascii=False)


def without_evaluation(rows: Sequence[DrafterRow], paths: Sequence[Path]) -> Kept:
    """The rows that share neither a question nor an answer and its passage with evaluation files.

    Raises:
        InputError: a file cannot be read, or holds no questions.
    """
    return keep(rows, EvaluationRows(paths))


def keep(rows: Sequence[DrafterRow], evaluation: EvaluationRows) -> Kept:
    """Like :func:`without_evaluation`, with evaluation files already read."""
    kept: list[DrafterRow] = []
    same_question = same_passage = 0
    for row in rows:
        if evaluation.asks(row.task.text):
            same_question += 1
        elif evaluation.answers(_answers(row), [passage.text for passage in row.passages]):
            same_passage += 1
        else:
            kept.append(row)
    return Kept(tuple(kept), same_question, same_passage)


def _answers(row: DrafterRow) -> str | None:
    """The answer in words; ``None`` for a claim, since each data set has its own label names."""
    return None if row.task.kind == "claim-checking" else row.answer_text


def _row(values: Mapping[str, Any]) -> DrafterRow:
    kind = values.get("kind", TASK_KINDS[0])
    options, labels, passages = (values.get(name) or empty for name, empty in _LISTS.items())
    if not isinstance(options, dict) or not all(isinstance(text, str) for text in options.values()):
        raise InputError("options", options, 'give an object of letters and texts, such as {"A": "tin"}')
    if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
        raise InputError("labels", labels, "give a list of texts")
    identifier = values.get("id")
    if not isinstance(identifier, str | int):
        raise InputError("id", identifier, "give a text")
    if not isinstance(passages, list) or not passages:
        raise InputError("passages", passages, "give a list of at least one with a title and a text")
    return DrafterRow(
        identifier=str(identifier),
        task=Task(_text(values, "question"), kind, options, tuple(labels)),
        answer=_text(values, "answer"),
        passages=tuple(_passage(each, place, str(identifier)) for place, each in enumerate(passages)),
        rationale=_text(values, "rationale") if values.get("rationale") is not None else None,
        source=_text(values, "source") if values.get("source") is not None else "",
    )


_LISTS: Mapping[str, Any] = {"options": {}, "labels": [], "passages": []}


def _passage(value: Any, place: int, source: str) -> Passage:
    if not isinstance(value, dict) or not isinstance(value.get("text"), str) or not value["text"].strip():
        raise InputError("passages", value, "give each a text of at least one word")
    title = value.get("title") or ""
    if not isinstance(title, str):
        raise InputError("passages", value, "give the title as a text")
    return Passage(place, source, title, "", value["text"], {GOLD: True} if value.get(GOLD) else {})


def _text(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name)
    if not isinstance(value, str):
        raise InputError(name, value, "give a text")
    return value
