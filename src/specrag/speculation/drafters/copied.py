"""How sure a copied token is.

Three things tell: how many tokens in front of it agree, whether its copy is the most promising one, and what the
target itself found likely when it last stood behind the token in front.
"""

from __future__ import annotations

import math
from bisect import bisect, bisect_left
from itertools import product
from typing import Protocol, runtime_checkable

#: Largest lengths of the classes of agreeing tokens; the last class is open.
_LENGTHS = (1, 2, 3, 5, 8, 16)
#: Least log-probabilities, in nats, of the classes of opinions; below them the token was not among the likeliest.
_LOG_PROBS = (-1e9, math.log(0.2), math.log(0.6))
_UNKNOWN = len(_LOG_PROBS) + 1

# Log-odds of acceptance, given that the token in front was accepted, by logistic regression over the copies of 36
# Spec-Bench prompts with odd ids (SmolLM2; docs/log.md). A request's own experience soon outweighs them.
_LENGTH_ODDS = (-1.25, 0.1, 0.4, 1.0, 1.4, 2.15, 2.9)
_RANK_ODDS = (0.0, -0.45)
_OPINION_ODDS = (-1.15, -0.7, 0.0, 1.45, 0.0)

#: Rate of acceptance by grade, to begin with.
COPY_RATES = tuple(
    1 / (1 + math.exp(-sum(odds))) for odds in product(_LENGTH_ODDS, _RANK_ODDS, _OPINION_ODDS)
)


@runtime_checkable
class Opinionated(Protocol):
    """Remembers what the target found likely behind a token."""

    def opinion(self, before: int, token: int) -> float | None:
        """Nats: the log-probability of ``token`` when the target last stood behind ``before``.

        Minus infinity if it was not among the likeliest, ``None`` where nothing is known.
        """


def copy_grade(matched: int, rank: int, opinion: float | None) -> int:
    """The grade of a copied token, an index into :data:`COPY_RATES`.

    Args:
        matched: tokens in front of it that agree, those copied before it included; at least 1.
        rank: of its copy among those of the round, 0 for the most promising.
        opinion: see :meth:`Opinionated.opinion`.
    """
    length = bisect_left(_LENGTHS, matched)
    held = _UNKNOWN if opinion is None else bisect(_LOG_PROBS, opinion)
    return (length * len(_RANK_ODDS) + min(rank, 1)) * len(_OPINION_ODDS) + held
