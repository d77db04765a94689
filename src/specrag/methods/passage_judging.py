"""How probable it is that a model answers a question about passages with yes: grades without any training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from specrag.engine.passes import Coroutine
from specrag.models.roles import ScoringRequest, TextPart, TextScorer

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
