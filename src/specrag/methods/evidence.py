"""Whether what a search found is about the question at all.

The most similar of many passages about something else is the more similar, the more there are: with the default encoder
it stays below 0.03 + 0.088 sqrt(2 ln n), the growth of the greatest of n normal numbers (docs/answering.md). A question
whose words stand in one passage is about it whatever its vector says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from specrag.errors import InputError
from specrag.methods.retriever import Retriever, VectorRetriever
from specrag.retrieval.passage import Hit

_MEAN, _SPREAD = 0.03, 0.088

#: Share of a question's words, weighed by how rare they are, that one passage must hold to be about it.
ENOUGH_WORDS = 0.65


def usual_min_score(passages: int) -> float:
    """Below this cosine even the best of so many passages is about something else."""
    return round(_MEAN + _SPREAD * math.sqrt(2 * math.log(max(passages, 1))), 3)


def check_min_score(min_score: float | None, retriever: object) -> None:
    """Check a threshold.

    Raises:
        InputError: it is no cosine, or there are no vectors to compare.
    """
    if min_score is None:
        return
    if isinstance(min_score, bool) or not isinstance(min_score, int | float) or not -1 <= min_score <= 1:
        raise InputError("min_score", min_score, "give a cosine similarity from -1 to 1, or None")
    if not isinstance(retriever, VectorRetriever):
        raise InputError("min_score", min_score, "give None, since there are no vectors to compare")


def least_similarity(retriever: Retriever, min_score: float | None) -> float | None:
    """What the best passage must reach: what was asked for, else the usual; ``None`` without vectors."""
    if not isinstance(retriever, VectorRetriever):
        return None
    return usual_min_score(len(retriever)) if min_score is None else min_score


def is_about_nothing(
    retriever: Retriever,
    question: str,
    hits: Sequence[Hit],
    similar: Sequence[float | None],
    min_score: float | None,
) -> bool:
    """Whether no passage found is about the question.

    Args:
        similar: cosine of each passage and the question; empty or ``None`` where they have no vectors.
        min_score: what was asked for, which decides alone; ``None`` for the usual.
    """
    if not hits:
        return True
    least = least_similarity(retriever, min_score)
    known = [similarity for similarity in similar if similarity is not None]
    if least is None or not known or max(known) >= least:
        return False
    return min_score is not None or _shared_words(retriever, question, hits) < ENOUGH_WORDS


def _shared_words(retriever: Retriever, question: str, hits: Sequence[Hit]) -> float:
    from specrag.retrieval.knowledge_base import KnowledgeBase

    if not isinstance(retriever, KnowledgeBase):  # another knows no words
        return 0.0
    return max(retriever.shared_words(question, [hit.passage.id for hit in hits]))
