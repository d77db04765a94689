"""What a method that answers from passages requires of a retriever."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from specrag.checks import check_whole
from specrag.errors import InputError
from specrag.retrieval import Hit, Passage

if TYPE_CHECKING:
    from specrag.retrieval import KnowledgeBase
    from specrag.retrieval.encoder import Reranker
    from specrag.retrieval.index import Floats, Index, Longs, Query, Ranking, Where


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
        where: Where | None = None,
        reranker: Reranker | None = None,
    ) -> list[list[Hit]]:
        """The best ``k`` passages for each query, best first."""


@runtime_checkable
class VectorRetriever(Protocol):
    """A retriever that can also tell how similar a passage is to a question, whichever index found it."""

    def encode(self, texts: Sequence[str], index: str = "hybrid") -> list[Query]:
        """The texts in the form that an index searches with."""

    def index(self, name: str) -> Index:
        """One of the indexes."""


class PassageRetriever(Protocol):
    """What iterative retrieval needs: an index with its encoder and its passages.

    Safe to use from several threads. :meth:`search` answers a batch bit for bit as it answers each query alone, and
    :meth:`score` gives the scores that it ranks by, so that a cache of a few passages ranks them in the same order.
    Every method may raise :class:`~specrag.errors.SpecragError` if a remote store does not answer; for passages that a
    search returned recently, :meth:`score` and :meth:`passages` should work without the store. A retriever whose
    :meth:`search` waits for no other machine may set an attribute ``remote`` to False (:func:`is_remote`).
    """

    def __len__(self) -> int:
        """Number of passages that a search can find."""

    def encode(self, texts: Sequence[str]) -> list[Query]:
        """The texts in the form that :meth:`search` and :meth:`score` take, each encoded alone."""

    def search(self, queries: Sequence[Query], k: int) -> list[Ranking]:
        """The best ``k`` passages for each query, or all if there are fewer; the first is the same for every k."""

    def score(self, queries: Sequence[Query], passage_ids: Longs) -> Floats:
        """The scores by which :meth:`search` ranks, float32 [queries, ids given]."""

    def passages(self, ids: Sequence[int]) -> list[Passage]:
        """These passages, in the order given."""


def passages_of(given: PassageRetriever | KnowledgeBase) -> PassageRetriever:
    """The retriever for iterative retrieval; for a knowledge base, its exact dense index.

    Raises:
        InputError: it is neither.
    """
    from specrag.retrieval import KnowledgeBase, SingleIndex

    if isinstance(given, KnowledgeBase):
        return SingleIndex(given)
    if not _has(given, "search", "score", "passages"):
        raise InputError("retriever", given, _remedy(given, "a SingleIndex, a StoreRetriever"))
    return given


def check_retriever(given: object) -> None:
    """Check that what is to be searched once for an answer is a :class:`Retriever`.

    Raises:
        InputError: it is not; retrievers for iterative retrieval, which take encoded queries, are not either.
    """
    if isinstance(given, PathLike | str) or not _has(given, "search") or _has(given, "score"):
        raise InputError("knowledge_base", given, _remedy(given, "GivenPassages"))


def _has(given: object, *names: str) -> bool:
    return all(callable(getattr(given, name, None)) for name in ("__len__", *names))


def _remedy(given: object, others: str) -> str:
    if isinstance(given, PathLike | str):
        return f"open it first: specrag.KnowledgeBase.open({str(given)!r})"
    return f"give a specrag.KnowledgeBase or {others}"


def is_remote(retriever: object) -> bool:
    """Whether a search may wait for another machine: unless the retriever's attribute ``remote`` is False."""
    return bool(getattr(retriever, "remote", True))


def similarities(retriever: VectorRetriever, question: str, hits: Sequence[Hit]) -> list[float]:
    """The cosine of the question's vector with each passage's, by the exact dense index."""
    ids = np.array([hit.passage.id for hit in hits], dtype=np.int64)
    scores = retriever.index("flat").score(retriever.encode([question], "flat"), ids)
    return [float(score) for score in scores[0]]


class GivenPassages:
    """Passages that somebody else has found for one question, in order; every search returns the first of them.

    Args:
        passages: best first.
    """

    remote = False

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
        where: Where | None = None,
        reranker: Reranker | None = None,
    ) -> list[list[Hit]]:
        """The first ``k`` passages for every query, scored by 1 / rank.

        Raises:
            InputError: conditions or a reranker were given, which do not apply here.
        """
        if where is not None:
            raise InputError("where", where, "give passages that are filtered already")
        if reranker is not None:
            raise InputError("rerank", "a cross-encoder", "give passages that are ranked already")
        hits = [Hit(passage, 1 / rank) for rank, passage in enumerate(self._passages[:k], 1)]
        return [hits for _ in queries]


def check_k(k: int, passages: int) -> None:
    """Check how many passages to find.

    Raises:
        InputError: it is not a whole number from 1 to the number of passages.
    """
    held = f"the knowledge base has {passages:,} passage{'' if passages == 1 else 's'}"
    check_whole("k", k, 1, passages, f"give a whole number from 1 to {passages}; {held}")
