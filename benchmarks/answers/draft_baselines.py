"""Other verdicts on the drafts of Speculative RAG (Table 3): without a verifier, by chance, and the best there is."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from specrag.errors import InputError
from specrag.methods.speculative_rag.scoring import Measured, Scoring, score

#: The drafter alone: the draft that it is surest of.
DRAFTER_ALONE = Scoring(self_contain=False, self_reflect=False)


def best_by(measured: Sequence[Measured | None], scoring: Scoring) -> int | None:
    """The index of the best draft under a scoring, the first of equal ones; ``None`` if none can be scored.

    Every switch of a scoring but the evidence and the statement only weighs what one run has measured, so that one run
    answers for all of them.

    Args:
        measured: of each draft; ``None`` for a malformed one.
    """
    totals = [(score(one, scoring).total, -index) for index, one in enumerate(measured) if one is not None]
    return -max(totals)[1] if totals else None


def random_draft(measured: Sequence[Measured | None], seed: int) -> int | None:
    """The index of a draft by chance, malformed ones left out; ``None`` if there is no other."""
    usable = [index for index, one in enumerate(measured) if one is not None]
    return random.Random(seed).choice(usable) if usable else None


def oracle(answers: Sequence[str], right: Callable[[str], bool]) -> int | None:
    """The index of a right draft; ``None`` if there is none: what the verifier leaves on the table.

    Raises:
        InputError: there are no drafts.
    """
    if not answers:
        raise InputError("answers", list(answers), "give at least one draft's answer")
    return next((index for index, answer in enumerate(answers) if answer and right(answer)), None)
