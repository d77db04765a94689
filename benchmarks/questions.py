"""Questions with the passages that somebody has found for them: the form of open-domain question answering sets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from specrag.bench.data import read_json_lines
from specrag.errors import InputError
from specrag.retrieval.passage import Passage


@dataclass(frozen=True, kw_only=True)
class PassageQuestion:
    """A question, the answers that count as right, and passages, best first.

    Attributes:
        answerable: whether a passage holds an answer, as the data set says; true where it does not say.
    """

    identifier: str
    question: str
    answers: tuple[str, ...]
    passages: tuple[Passage, ...]
    answerable: bool = True


def load_passage_questions(path: Path) -> list[PassageQuestion]:
    """Rows of ``question, answers, passages`` with ``title, text`` in each passage, and perhaps ``id, has_answer``.

    Raises:
        InputError: a row lacks a field or holds none of the right kind.
    """
    return [_question(path, number, row) for number, row in enumerate(read_json_lines(path), 1)]


def _question(path: Path, number: int, row: Mapping[str, object]) -> PassageQuestion:
    question, answers, passages = row.get("question"), row.get("answers"), row.get("passages")
    if (
        not isinstance(question, str)
        or not isinstance(answers, list)
        or not isinstance(passages, list)
        or not answers
        or not passages
        or not all(isinstance(answer, str) for answer in answers)
        or not all(
            isinstance(passage, Mapping) and isinstance(passage.get("text"), str) for passage in passages
        )
    ):
        remedy = "give every line a question, a list of answers and a list of passages with a text"
        raise InputError("data file", f"{path.name}:{number}", remedy)
    identifier = str(row.get("id", number))
    return PassageQuestion(
        identifier=identifier,
        question=question,
        answers=tuple(answers),
        passages=tuple(
            Passage(place, path.name, str(passage.get("title", "")), identifier, passage["text"], {})
            for place, passage in enumerate(passages)
        ),
        answerable=bool(row.get("has_answer", True)),
    )


_PASSAGES = (
    ("Copper", "Copper is a soft reddish metal. Its chemical symbol is Cu, from the Latin word cuprum."),
    ("Danube", "The Danube rises in the Black Forest and flows through ten countries into the Black Sea."),
    ("Ferry", "A ferry carries people and vehicles across a river, a lake or a strait."),
    ("Moon", "The Moon is the only natural satellite of the Earth. It causes most of the tides."),
    (
        "Pencil",
        "The core of a pencil is made of graphite and clay; the more clay it holds, the harder it writes.",
    ),
)

SAMPLE_PASSAGES = tuple(
    Passage(number, "sample", title, "", text, {}) for number, (title, text) in enumerate(_PASSAGES)
)


def _sample(identifier: str, question: str, *answers: str) -> PassageQuestion:
    return PassageQuestion(
        identifier=identifier, question=question, answers=answers, passages=SAMPLE_PASSAGES
    )


SAMPLE = (
    _sample("copper", "What is the chemical symbol of copper?", "Cu"),
    _sample("danube", "Into which sea does the Danube flow?", "Black Sea"),
    _sample("moon", "What causes most of the tides?", "the Moon"),
    _sample("pencil", "What is the core of a pencil made of?", "graphite"),
)
