"""Whether what a search found is about the question at all.

The more passages there are about something else, the more similar the best of them is to the question: with the
default encoder the similarity stays below 0.03 + 0.088 sqrt(2 ln n), which grows like the maximum of n normal numbers
(docs/answering.md). A question whose words occur in one passage is about it, whatever its vector says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from specrag.methods.retriever import Retriever, VectorRetriever
from specrag.retrieval import Hit

_MEAN, _SPREAD = 0.03, 0.088

#: Share of a question's words, weighted by rarity, that one passage must contain to be about it.
ENOUGH_WORDS = 0.65


def usual_min_score(passages: int) -> float:
    """The cosine below which even the best of this many passages is about something else."""
    return round(_MEAN + _SPREAD * math.sqrt(2 * math.log(max(passages, 1))), 3)


def least_similarity(retriever: Retriever, min_score: float | None) -> float | None:
    """The similarity that the best passage must reach: as requested, or the usual one; ``None`` without vectors."""
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
        similar: cosine of each passage and the question; empty, or ``None`` for those without vectors.
        min_score: the requested threshold, which then decides alone; ``None`` for the usual one.
    """
    if not hits:
        return True
    least = least_similarity(retriever, min_score)
    known = [similarity for similarity in similar if similarity is not None]
    if least is None or not known or max(known) >= least:
        return False
    return min_score is not None or _shared_words(retriever, question, hits) < ENOUGH_WORDS


def _shared_words(retriever: Retriever, question: str, hits: Sequence[Hit]) -> float:
    from specrag.retrieval import KnowledgeBase

    if not isinstance(retriever, KnowledgeBase):  # other retrievers have no word statistics
        return 0.0
    return max(retriever.shared_words(question, [hit.passage.id for hit in hits]))
