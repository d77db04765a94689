"""What a method that answers from passages needs of whatever finds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from specrag.errors import InputError
from specrag.retrieval.passage import Hit, Passage

if TYPE_CHECKING:
    from specrag.retrieval.index import Index, Query
    from specrag.retrieval.reranker import Reranker


class Retriever(Protocol):
    """Finds passages for questions: a knowledge base, or passages that somebody else has found."""

    def __len__(self) -> int:
        """Number of passages."""

    def search(
        self,
        queries: Sequence[str],
        k: int = 5,
        *,
        index: str = "hybrid",
        where: Mapping[str, Any] | None = None,
        reranker: Reranker | None = None,
    ) -> list[list[Hit]]:
        """The best ``k`` passages for each query, best first."""


@runtime_checkable
class VectorRetriever(Protocol):
    """A retriever that also tells how similar a passage is to a question, whatever index has found it."""

    def encode(self, texts: Sequence[str], index: str = "hybrid") -> list[Query]:
        """The texts in the form that an index searches with."""

    def index(self, name: str) -> Index:
        """One of the indexes."""


def similarities(retriever: VectorRetriever, question: str, hits: Sequence[Hit]) -> list[float]:
    """The cosine of the question's vector with each passage's, by the exact dense index."""
    ids = np.array([hit.passage.id for hit in hits], dtype=np.int64)
    scores = retriever.index("flat").score(retriever.encode([question], "flat"), ids)
    return [float(score) for score in scores[0]]


class GivenPassages:
    """Passages that somebody else has found for one question, in their order; every search gives the first of them.

    Args:
        passages: best first.
    """

    def __init__(self, passages: Sequence[Passage]) -> None:
        self._passages = tuple(passages)

    def __len__(self) -> int:
        return len(self._passages)

    def search(
        self,
        queries: Sequence[str],
        k: int = 5,
        *,
        index: str = "hybrid",  # noqa: ARG002 - there is none
        where: Mapping[str, Any] | None = None,
        reranker: Reranker | None = None,
    ) -> list[list[Hit]]:
        """The first ``k`` passages for every query, scored by 1 / rank.

        Raises:
            InputError: conditions or a reranker were given, which have no say here.
        """
        if where is not None or reranker is not None:
            raise InputError("where", where, "give passages that are filtered and ranked already")
        hits = [Hit(passage, 1 / rank) for rank, passage in enumerate(self._passages[:k], 1)]
        return [hits for _ in queries]
