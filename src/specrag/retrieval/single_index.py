"""One index of a knowledge base together with its encoder and passages: what iterative retrieval searches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specrag.errors import InputError
from specrag.retrieval.hnsw import HnswIndex
from specrag.retrieval.index import Query, Ranking
from specrag.retrieval.knowledge_base import KnowledgeBase, check_index
from specrag.retrieval.passage import Passage
from specrag.retrieval.scoring import Bools, Floats, Longs


class SingleIndex:
    """A :class:`~specrag.methods.retriever.PassageRetriever` over a knowledge base on this machine.

    Args:
        knowledge_base: open; stays its owner's.
        name: one of :data:`~specrag.retrieval.knowledge_base.INDEXES`.
        where: only passages that satisfy these conditions are found.

    Raises:
        InputError: there is no index of this name, or no passage satisfies the conditions.
    """

    remote = False

    def __init__(
        self, knowledge_base: KnowledgeBase, name: str = "flat", where: Mapping[str, Any] | None = None
    ) -> None:
        self.knowledge_base = knowledge_base
        self.name = name
        self.where = where
        check_index(name)
        self._allowed = knowledge_base.allowed(where)
        if self._allowed is not None and not self._allowed.any():
            raise InputError("where", where, "no passage satisfies it; widen the conditions")

    def __len__(self) -> int:
        """Number of passages that can be found."""
        return len(self.knowledge_base) if self._allowed is None else int(np.count_nonzero(self._allowed))

    def encode(self, texts: Sequence[str]) -> list[Query]:
        """The texts in the form that this index searches with."""
        return self.knowledge_base.encode(texts, self.name)

    def search(self, queries: Sequence[Query], k: int, allowed: Bools | None = None) -> list[Ranking]:
        """The best passages that satisfy the conditions, and ``allowed`` too, bool [passages in all].

        The first is the same for every ``k``: what an approximate search finds above it only by walking farther is
        left out.

        Raises:
            KnowledgeBaseError: one of the index's files is damaged.
        """
        both = self._allowed
        if allowed is not None and both is not None:
            both = both & allowed
        index, mask = self.knowledge_base.index(self.name), allowed if both is None else both
        rankings = index.search(queries, k, mask)
        if not isinstance(index, HnswIndex) or k <= index.settings.ef_search:
            return rankings
        first = index.search(queries, 1, mask)
        return [_led_by(one, several) for one, several in zip(first, rankings, strict=True)]

    def score(self, queries: Sequence[Query], passage_ids: Longs) -> Floats:
        """The scores by which :meth:`search` ranks, float32 [queries, ids given]."""
        return self.knowledge_base.index(self.name).score(queries, passage_ids)

    def passages(self, ids: Sequence[int]) -> list[Passage]:
        """These passages, in the order given."""
        return self.knowledge_base.passages(ids)


def _led_by(first: Ranking, ranking: Ranking) -> Ranking:
    """The part of a ranking from another one's first passage on."""
    place = np.flatnonzero(np.isin(ranking.ids, first.ids))
    if not len(place):
        return first
    return Ranking(ids=ranking.ids[place[0] :], scores=ranking.scores[place[0] :])
