"""Keeps evaluation data out of training data, whatever the format of the data sets."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specrag.bench import normalize_answer, read_json_lines
from specrag.errors import InputError

#: Texts that share this many words in a row count as the same. The usual length for finding test data in training
#: data (Brown et al. 2020, appendix C).
SHARED_WORDS = 13

_QUESTIONS = ("question", "claim", "query", "prompt", "input", "turns")
_ANSWERS = ("answers", "answer", "outputs", "short_answers", "possible_answers", "label", "claim_label")
_CHOICES = ("choices", "options")
_PASSAGES = (
    "passages",
    "passage",
    "evidences",
    "evidence",
    "ctxs",
    "contexts",
    "documents",
    "sentences",
    "positive_ctxs",
)
_TEXTS = ("text", "evidence", "content", "sentence")
_CLAIM = "claim"
_WORD = re.compile(r"\w+")


class EvaluationRows:
    """Questions, and answers with their passages, from JSON lines files, gzipped or not.

    Fields are found by their usual names: ``question``, ``claim``, ``turns`` and such; ``answers`` or ``answer`` with
    ``choices``; ``passages``, ``evidences``, ``ctxs`` and such. Passages are the same if they share thirteen words in
    a row, since data sets cut the same articles at different places; shorter passages if they are equal throughout.

    Args:
        paths: the files; read on construction.

    Raises:
        InputError: a file cannot be read, or holds no questions.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.names = [path.name for path in paths]
        self._questions: set[str] = set()
        #: The normalised answers of each row that has passages; ``None`` for any answer to a claim.
        self._rows: list[frozenset[str | None]] = []
        #: By hash of a run of words: the rows whose passages contain it.
        self._holders: dict[int, tuple[int, ...]] = {}
        for path in paths:
            found = sum(self._add(row) for row in read_json_lines(path))
            if not found:
                names = ", ".join(_QUESTIONS)
                raise InputError("--exclude", str(path), f"there are no questions in it (fields {names})")

    def asks(self, question: str) -> bool:
        """Whether a question or claim is in the evaluation data, ignoring case, punctuation and articles."""
        return normalize_answer(question) in self._questions

    def answers(self, answer: str | None, passages: Sequence[str]) -> bool:
        """Whether an evaluated question has this answer and one of these passages.

        Args:
            answer: in words; ``None`` for a claim, which matches any claim with the same passage.
        """
        wanted = None if answer is None else normalize_answer(answer)
        return any(
            wanted in self._rows[number]
            for passage in passages
            for run in _runs(passage)
            for number in self._holders.get(run, ())
        )

    def _add(self, row: Mapping[str, object]) -> int:
        """Record a row; returns how many questions it holds."""
        questions = [
            text for name in _QUESTIONS for text in map(normalize_answer, _strings(row.get(name))) if text
        ]
        self._questions.update(questions)
        answers: set[str | None] = set(filter(None, map(normalize_answer, _row_answers(row))))
        if _CLAIM in row:
            answers = {None}
        runs = {run for name in _PASSAGES for text in _passage_texts(row.get(name)) for run in _runs(text)}
        if answers and runs:
            mine = (len(self._rows),)
            self._rows.append(frozenset(answers))
            for run in runs:
                before = self._holders.get(run)
                self._holders[run] = mine if before is None else (*before, *mine)
        return len(questions)


def _row_answers(row: Mapping[str, object]) -> Iterator[str]:
    choices: Mapping[str, object] = {}
    for name in _CHOICES:
        value = row.get(name)
        if isinstance(value, dict):
            choices = value
    for name in _ANSWERS:
        for answer in _strings(row.get(name)):
            chosen = choices.get(answer)
            yield chosen if isinstance(chosen, str) else answer


def _passage_texts(value: Any) -> Iterator[str]:
    """The texts in a text, an object with a text, or a list of these."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (text for name in _TEXTS if isinstance(text := value.get(name), str))
    elif isinstance(value, list):
        for each in value:
            yield from _passage_texts(each)


def _strings(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [each for each in values if isinstance(each, str)]


def _runs(text: str) -> Iterator[int]:
    words = _WORD.findall(text.lower())
    if words:
        for start in range(max(1, len(words) - SHARED_WORDS + 1)):
            yield hash(" ".join(words[start : start + SHARED_WORDS]))
