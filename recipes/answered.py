"""Rows from public questions whose gold passage is known, with near misses beside it or in its place.

Nothing is written by a model: the rationale is the sentence of the gold passage that contains the answer. In a share of
the rows no passage contains it, so that a drafter learns to say so.

    python -m recipes.answered QUESTIONS --passages FILE --exclude FILE --out FOLDER
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from recipes.passages import FilePassages, PassagePool
from recipes.question_prompts import contains_phrase
from recipes.rows import RowRun
from specrag.bench.data import read_json_lines
from specrag.bench.metrics import contains_answer
from specrag.cli.common import this_command
from specrag.errors import InputError
from specrag.methods.speculative_rag.task import Task
from specrag.models.catalog.store import sha256_of
from specrag.retrieval.passage import Passage
from specrag.training.drafter.rows import GOLD, DrafterRow, keep
from specrag.training.exclusion import EvaluationRows

_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[\"'A-Z0-9(])")
#: A sentence with fewer words says nothing; one with more is not an answer.
_FEWEST, _MOST = 4, 40
#: Numbers of passages of a row, drawn uniformly from these.
_SIZES = (1, 2, 2, 2, 3)
_SEARCHED = 20


@dataclass(frozen=True, kw_only=True)
class AnsweredSettings:
    """Which rows are made.

    Args:
        rows: how many.
        missing: share of the rows whose passages do not contain the answer.
        seed: of everything drawn.

    Raises:
        InputError: a value is out of range.
    """

    rows: int = 5000
    missing: float = 0.4
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise InputError("rows", self.rows, "give at least 1")
        if not 0 <= self.missing <= 1:
            raise InputError("missing", self.missing, "give a share from 0 to 1")


@dataclass(frozen=True, slots=True)
class _Question:
    identifier: str
    text: str
    answers: Sequence[str]
    gold: Passage
    sentence: str
    answer: str
    misses: Sequence[Passage]


def make_answered_rows(
    questions: Path,
    pool: PassagePool,
    out: Path,
    settings: AnsweredSettings,
    *,
    evaluation: EvaluationRows | None = None,
    command: str = "",
) -> RowRun:
    """Make rows from questions, several of each with different passages, until there are enough.

    Args:
        questions: JSON lines of ``id``, ``question``, ``answers`` and the gold ``passage``, an object of ``title`` and
            ``text``.
        pool: where near misses are found.
        out: a folder; created if needed.
        evaluation: the data that no row may be from.
        command: for the card.

    Raises:
        InputError: a line is not such a question, or the folder was begun with other settings.
        SpecragError: the disk refuses.
    """
    noted = {
        "missing": settings.missing,
        "seed": settings.seed,
        "pool": dict(pool.checksums),
        "questions": {questions.name: sha256_of(questions)},
        "exclude": evaluation.names if evaluation else [],
    }
    run = RowRun.open(out, noted, command=command)
    if len(run.rows) < settings.rows:
        with run.batch():
            usable = list(_usable(questions, pool, evaluation, run))
            rows = list(_rows(usable, settings, questions.name)) if usable else []
            run.add(rows[len(run.rows) :])  # the others exist, from a run that was stopped or that made fewer
    return run


def _usable(
    path: Path, pool: PassagePool, evaluation: EvaluationRows | None, run: RowRun
) -> Iterator[_Question]:
    """The questions whose answer is in one sentence of the gold passage, with passages that do not contain it."""
    lines = list(read_json_lines(path))
    known = run.tried
    asked = [_checked(row, f"{path.name}:{number}") for number, row in enumerate(lines, 1)]
    for row, found in zip(asked, pool.find([row["question"] for row in asked], _SEARCHED), strict=True):
        question = _question(row, [pool.passage(number) for number in found], path.name)
        if isinstance(question, _Question) and _is_evaluated(question, evaluation):
            question = "it is in what is evaluated on"
        if isinstance(question, _Question):
            yield question
        elif row["id"] not in known:
            run.reject(row["id"], question, row["question"])


def _is_evaluated(question: _Question, evaluation: EvaluationRows | None) -> bool:
    row = _row(question, 0, [question.gold], "")
    return evaluation is not None and bool(keep([row], evaluation).excluded)


def _checked(row: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    gold = row.get("passage")
    if not isinstance(row.get("id"), str) or not isinstance(row.get("question"), str):
        raise InputError(place, row, "give every question an id and a text")
    answers = row.get("answers")
    if not isinstance(answers, list) or not all(isinstance(each, str) for each in answers):
        raise InputError(f"{place}: answers", answers, "give a list of texts")
    if not isinstance(gold, dict) or not isinstance(gold.get("text"), str):
        raise InputError(f"{place}: passage", gold, "give an object of title and text")
    return row


def _question(row: Mapping[str, Any], found: Sequence[Passage], source: str) -> _Question | str:
    gold = Passage(0, source, row["passage"].get("title") or "", "", row["passage"]["text"], {GOLD: True})
    sentences = [part.strip() for part in _SENTENCE.split(gold.text)]
    for answer in row["answers"]:
        for sentence in sentences:
            if _FEWEST <= len(sentence.split()) <= _MOST and contains_phrase(sentence, answer):
                misses = [each for each in found if not _holds(each, row["answers"])]
                if len(misses) < max(_SIZES):
                    return "what is found beside it holds the answer"
                return _Question(row["id"], row["question"], row["answers"], gold, sentence, answer, misses)
    return "no sentence of a usual length holds an answer"


def _holds(passage: Passage, answers: Sequence[str]) -> bool:
    return contains_answer(f"{passage.title} {passage.text}", answers)


def _rows(questions: Sequence[_Question], settings: AnsweredSettings, source: str) -> Iterator[DrafterRow]:
    """Rows of all questions in turn; no question gets the same passages twice."""
    made, seen = 0, set()
    for number in range(20 * settings.rows):
        if made == settings.rows:
            return
        question, turn = questions[number % len(questions)], number // len(questions)
        draws = random.Random(f"{settings.seed}/{question.identifier}/{turn}")
        missing = draws.random() < settings.missing
        passages = _passages(question, missing, draws)
        key = (question.identifier, tuple(passage.text for passage in passages))
        if key not in seen:
            seen.add(key)
            made += 1
            yield _row(question, turn, passages, source)


def _passages(question: _Question, missing: bool, draws: random.Random) -> list[Passage]:
    """Near misses, drawn from the nearest; unless ``missing``, with the gold passage among them, most often first."""
    size = draws.choice(_SIZES)
    beside = size if missing else size - 1
    nearest = question.misses[: 3 * size]
    chosen = sorted(draws.sample(range(len(nearest)), beside))
    passages = [nearest[place] for place in chosen]
    if not missing:
        passages.insert(draws.choice((0, 0, draws.randrange(size))), question.gold)
    return passages


def _row(question: _Question, turn: int, passages: Sequence[Passage], source: str) -> DrafterRow:
    return DrafterRow(
        f"{question.identifier}-{turn}",
        Task(question.text),
        question.answer,
        tuple(passages),
        rationale=question.sentence,
        source=source,
    )


def main(
    questions: Annotated[Path, typer.Argument(help="JSON lines with question, answers and gold passage.")],
    passages: Annotated[
        list[Path], typer.Option(help="JSON lines of title and text: where misses are found.")
    ],
    out: Annotated[Path, typer.Option(help="Folder of the rows.")],
    exclude: Annotated[list[Path] | None, typer.Option(help="What is evaluated on; may be repeated.")] = None,
    rows: Annotated[int, typer.Option(help="How many.")] = 5000,
    missing: Annotated[float, typer.Option(help="Share without the answer.")] = 0.4,
    seed: Annotated[int, typer.Option(help="Of everything drawn.")] = 0,
) -> None:
    """Make rows for a drafter of public questions."""
    settings = AnsweredSettings(rows=rows, missing=missing, seed=seed)
    evaluation = EvaluationRows(exclude) if exclude else None
    pool, command = FilePassages(passages), this_command("python -m recipes.answered")
    run = make_answered_rows(questions, pool, out, settings, evaluation=evaluation, command=command)
    typer.echo(f"{len(run.rows)} rows in {out}")


if __name__ == "__main__":
    typer.run(main)
