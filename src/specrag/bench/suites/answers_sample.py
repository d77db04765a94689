"""A few questions with passages written for this project, for a run without data: that it works, not how well."""

from __future__ import annotations

from specrag.bench.question_data import PassageQuestion
from specrag.retrieval.passage import Passage

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
