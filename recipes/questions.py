"""Rows made from passages: question and answer by a chat model, its passage as evidence, distractors by search.

Speculative RAG trains on public instruction data (section 3.2); rows made from one's own passages need none, and share
nothing with the evaluation data.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from recipes.passages import PassagePool
from recipes.question_prompts import (
    ASPECTS,
    QuestionAnswer,
    Rejected,
    answer_kind,
    contains_phrase,
    question_request,
    read_question,
    read_statement,
    replace_answer,
    statement_request,
)
from recipes.rows import RowRun, Status, write_texts
from specrag.errors import InputError
from specrag.methods.speculative_rag.task import CLAIM_LABELS, Task
from specrag.models.roles import TextGenerator
from specrag.retrieval.passage import Passage
from specrag.training.drafter.rows import GOLD, DrafterRow, keep
from specrag.training.exclusion import EvaluationRows

_LETTERS = "ABCD"
#: A question must find its own passage among this many.
_FOUND_WITHIN = 20
_FEWEST_PASSAGE_WORDS = 25
#: Labels of a claim, in this order: yes, no, and perhaps one for unknown.
_LABELS = (("True", "False"), CLAIM_LABELS)


@dataclass(frozen=True, kw_only=True)
class QuestionSettings:
    """Which rows are made.

    Args:
        rows: how many.
        passages: passages of a row, its evidence included.
        choices, claims: shares of multiple choices and of claims; the other questions are answered in words.
        answer_words: words of the longest answer.
        batch: questions asked at the same time.
        seed: of the order of the passages, and of everything drawn.

    Raises:
        InputError: a value is out of range.
    """

    rows: int = 1000
    passages: int = 10
    choices: float = 0.2
    claims: float = 0.2
    answer_words: int = 6
    batch: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rows", "passages", "answer_words", "batch"):
            if getattr(self, name) < 1:
                raise InputError(name, getattr(self, name), "give at least 1")
        if self.seed < 0:
            raise InputError("seed", self.seed, "give at least 0")
        for name in ("choices", "claims"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(name, getattr(self, name), "give a share from 0 to 1")
        if self.choices + self.claims > 1:
            raise InputError(
                "claims", self.claims, "give shares of choices and claims that are 1 at most together"
            )


def make_questions(
    writer: TextGenerator,
    pool: PassagePool,
    out: Path,
    settings: QuestionSettings,
    *,
    evaluation: EvaluationRows | None = None,
    command: str = "",
    show: Callable[[Status], None] = lambda _: None,
) -> RowRun:
    """Make rows until there are enough or the passages are used up. The same call resumes a run.

    Args:
        writer: asks the questions.
        pool: the passages they are made from.
        out: a folder; created if needed. Each batch is on the disk before the next begins.
        evaluation: the data that no row may be from.
        command: for the card.
        show: called with the run's status.

    Raises:
        InputError: the folder was begun with other settings or passages.
        SpecragError: the writer fails, or the disk refuses; what was made is kept.
    """
    noted = {
        "writer": writer.name,
        "pool": dict(pool.checksums),
        "exclude": evaluation.names if evaluation else [],
    }
    noted |= {
        name: getattr(settings, name) for name in ("passages", "choices", "claims", "answer_words", "seed")
    }
    run = RowRun.open(out, noted, command=command)
    maker = _Maker(pool, settings, evaluation, run)
    tried = run.tried
    for numbers in _batches(pool, settings):
        if len(run.rows) >= settings.rows:
            break
        show(run.status("questions", settings.rows))
        waiting = [number for number in numbers if f"p{number}" not in tried]
        if waiting:
            with run.batch():
                maker.make(writer, waiting)
    show(run.status("questions", settings.rows))
    return run


def _batches(pool: PassagePool, settings: QuestionSettings) -> Iterator[list[int]]:
    """Batches of all passages that are text about something with a name, in an order drawn from the seed."""
    numbers = list(range(len(pool)))
    random.Random(settings.seed).shuffle(numbers)
    fit = (number for number in numbers if _is_fit(pool.passage(number)))
    while batch := list(itertools.islice(fit, settings.batch)):
        yield batch


def _is_fit(passage: Passage) -> bool:
    text = passage.text
    letters = sum(character.isalpha() or character.isspace() for character in text)
    named = bool(passage.title.strip())
    return (
        named and len(text.split()) >= _FEWEST_PASSAGE_WORDS and letters > 0.8 * len(text) and "<" not in text
    )


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A passage with its question, on the way to a row."""

    identifier: str
    passage: Passage
    made: QuestionAnswer
    kind: str


class _Maker:
    """Makes the rows of a batch."""

    def __init__(
        self,
        pool: PassagePool,
        settings: QuestionSettings,
        evaluation: EvaluationRows | None,
        run: RowRun,
    ) -> None:
        self._pool = pool
        self._settings = settings
        self._evaluation = evaluation
        self._run = run
        self._known: set[str] = set()
        #: Answers of earlier rows, by kind.
        self._answers: dict[str, list[str]] = defaultdict(list)
        for row in run.rows:
            self._note(row)

    def make(self, writer: TextGenerator, numbers: Sequence[int]) -> None:
        """Make rows from passages; each becomes a row or a line that says why not."""
        asked = self._ask(writer, numbers)
        if not asked:
            return
        statements = self._state(writer, asked)
        found = self._pool.find(
            [each.made.question for each in asked], _FOUND_WITHIN + self._settings.passages
        )
        rows: list[DrafterRow] = []
        for each, places in zip(asked, found, strict=True):
            row = self._row(each, places, statements.get(each.identifier))
            if isinstance(row, Rejected):
                self._run.reject(each.identifier, row.reason, each.made.question)
            elif len(self._run.rows) + len(rows) < self._settings.rows:
                rows.append(row)
                self._known.add(each.made.question.lower())
        self._run.add(rows)
        for row in rows:
            self._note(row)

    def _ask(self, writer: TextGenerator, numbers: Sequence[int]) -> list[_Candidate]:
        passages = [self._pool.passage(number) for number in numbers]
        requests = [
            question_request(passage, self._drawn(number, "aspect").choice(ASPECTS))
            for number, passage in zip(numbers, passages, strict=True)
        ]
        asked = []
        for number, passage, text in zip(numbers, passages, write_texts(writer, requests), strict=True):
            made = read_question(passage, text.text, self._settings.answer_words)
            if isinstance(made, Rejected):
                self._run.reject(f"p{number}", made.reason, text.text)
            else:
                asked.append(_Candidate(f"p{number}", passage, made, self._drawn_kind(number)))
        return asked

    def _drawn_kind(self, number: int) -> str:
        draw = self._drawn(number, "kind").random()
        if draw < self._settings.choices:
            return "multiple-choice"
        return "claim-checking" if draw < self._settings.choices + self._settings.claims else "free-form"

    def _drawn(self, number: int | str, what: str) -> random.Random:
        """Draws that depend only on the passage, not on its batch."""
        return random.Random(f"{self._settings.seed}/{number}/{what}")

    def _state(self, writer: TextGenerator, asked: Sequence[_Candidate]) -> dict[str, str]:
        """Statements for the candidates that are to be claims; if a statement fails, the question stays one."""
        claims = [each for each in asked if each.kind == "claim-checking"]
        written = write_texts(writer, [statement_request(each.made) for each in claims])
        statements = {}
        for each, text in zip(claims, written, strict=True):
            statement = read_statement(each.made, text.text)
            if isinstance(statement, str):
                statements[each.identifier] = statement
        return statements

    def _row(self, asked: _Candidate, found: Sequence[int], statement: str | None) -> DrafterRow | Rejected:
        made, own = asked.made, int(asked.identifier[1:])
        if made.question.lower() in self._known:
            return Rejected("the question was asked before")
        if own not in found[:_FOUND_WITHIN]:
            return Rejected("the question does not find its passage")
        others = [self._pool.passage(number) for number in found if number != own]
        beside = [each for each in others if not contains_phrase(f"{each.title} {each.text}", made.answer)]
        beside = beside[: self._settings.passages - 1]
        row = self._with_task(asked, beside, statement)
        if self._evaluation is not None and keep([row], self._evaluation).excluded:
            return Rejected("it is in what is evaluated on")
        return row

    def _with_task(self, asked: _Candidate, beside: Sequence[Passage], statement: str | None) -> DrafterRow:
        draws = self._drawn(asked.identifier, "task")
        task, answer, evidence = Task(asked.made.question), asked.made.answer, [_gold(asked.passage)]
        options = self._others(asked, draws, len(_LETTERS) - 1) if asked.kind == "multiple-choice" else []
        if len(options) == len(_LETTERS) - 1:
            texts = [*options, answer]
            draws.shuffle(texts)
            task = Task(asked.made.question, "multiple-choice", dict(zip(_LETTERS, texts, strict=True)))
            answer = _LETTERS[texts.index(answer)]
        elif statement is not None:
            labels = draws.choice(_LABELS)
            answer = draws.choice(labels)
            other = self._others(asked, draws, 1)
            if answer == labels[1] and not other:
                answer = labels[0]
            if answer == labels[1]:
                statement = replace_answer(statement, asked.made.answer, other[0])
            elif len(labels) > 2 and answer == labels[2]:
                evidence = []  # the passages found beside it do not contain the answer
                if not beside:
                    evidence, answer = [_gold(asked.passage)], labels[0]
            task = Task(statement, "claim-checking", labels=labels)
        source = asked.passage.source
        return DrafterRow(asked.identifier, task, answer, (*evidence, *beside), source=source)

    def _others(self, asked: _Candidate, draws: random.Random, count: int) -> list[str]:
        """Other answers of the same kind, none of which may also be right."""
        wrong = {
            answer.lower(): answer
            for answer in self._answers[answer_kind(asked.made.question, asked.made.answer)]
            if not contains_phrase(asked.passage.text, answer)
            and not contains_phrase(answer, asked.made.answer)
            and not contains_phrase(asked.made.answer, answer)
            and not contains_phrase(asked.made.question, answer)
        }
        return draws.sample(sorted(wrong.values()), count) if len(wrong) >= count else []

    def _note(self, row: DrafterRow) -> None:
        """Remember a row's question and answer; a claim's answer is a label and cannot serve as a wrong option."""
        self._known.add(row.task.text.lower())
        if row.task.kind != "claim-checking":
            self._answers[answer_kind(row.task.text, row.answer_text)].append(row.answer_text)


def _gold(passage: Passage) -> Passage:
    metadata: Mapping[str, object] = {GOLD: True}
    return Passage(passage.id, passage.source, passage.title, passage.place, passage.text, metadata)
