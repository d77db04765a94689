"""What the retrieval suite reads: questions with the passages that answer them, and a corpus or a part of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from specrag.bench.data import Passage, find_file, load_passages, read_json_lines
from specrag.errors import InputError

_T = TypeVar("_T")

CORPUS = "corpus_wiki_passages.jsonl"
QUESTION_SETS = ("nq", "webq", "triviaqa", "popqa")


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question and the identifiers of the corpus's passages that hold its answer."""

    text: str
    positives: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class Questions:
    """A set of questions, by its name."""

    name: str
    questions: tuple[Question, ...]


def load_questions(folder: Path, *, most: int | None = None) -> list[Questions]:
    """The question sets that the folder holds (``corpus_questions_NAME_dev.jsonl``: question, positive_ids).

    Args:
        most: evenly spread questions of each set; None takes all.

    Raises:
        InputError: there is none of the sets, or a line lacks a field.
    """
    sets = []
    for name in QUESTION_SETS:
        file = f"corpus_questions_{name}_dev.jsonl"
        if not any((folder / f"{file}{ending}").is_file() for ending in ("", ".gz")):
            continue
        path = find_file(folder, file)
        questions = [_question(path, row) for row in read_json_lines(path)]
        sets.append(Questions(name=name, questions=tuple(spread(questions, most))))
    if not any(entry.questions for entry in sets):
        remedy = "give a folder that holds corpus_questions_NAME_dev.jsonl"
        raise InputError("--data", str(folder), f"{remedy} for a NAME of {', '.join(QUESTION_SETS)}")
    return sets


def part_of_corpus(folder: Path, sets: Sequence[Questions], count: int) -> list[Passage]:
    """``count`` passages in the corpus's order: all that answer a question, and others evenly spread."""
    wanted = {
        identifier for entry in sets for question in entry.questions for identifier in question.positives
    }
    passages = list(load_passages(find_file(folder, CORPUS)))
    others = [passage.identifier for passage in passages if passage.identifier not in wanted]
    kept = wanted | set(spread(others, max(count - len(wanted), 0)))
    return [passage for passage in passages if passage.identifier in kept]


def write_corpus(path: Path, passages: Sequence[Passage]) -> Path:
    """Write passages as JSON lines of ``id, title, text``; the file is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text("".join(_lines(passages)), encoding="utf-8")
    return temporary.replace(path)


def _lines(passages: Sequence[Passage]) -> Iterator[str]:
    for passage in passages:
        row = {"id": passage.identifier, "title": passage.title, "text": passage.text}
        yield f"{json.dumps(row, ensure_ascii=False)}\n"


def spread(values: Sequence[_T], count: int | None) -> list[_T]:
    """At most ``count`` values at even distances; all of them for None."""
    if count is None or count >= len(values):
        return list(values)
    return [values[number * len(values) // count] for number in range(count)]


def _question(path: Path, row: dict[str, object]) -> Question:
    text, positives = row.get("question"), row.get("positive_ids")
    if not isinstance(text, str) or not isinstance(positives, list) or not positives:
        raise InputError("data file", path.name, "give every line a question and its positive_ids")
    return Question(text=text, positives=frozenset(str(identifier) for identifier in positives))
