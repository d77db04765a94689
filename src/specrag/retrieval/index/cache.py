"""The speculative cache of a request: passages retrieved so far, searched before the index (RaLMSpec, section 3)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
from typing import Protocol

import numpy as np

from specrag.checks import check_whole
from specrag.retrieval.index.base import Query, Ranking, best_of, checked_k
from specrag.retrieval.index.scoring import Floats, Longs

#: More than the passages returned by the 32 searches of a request of 128 tokens with a prefetch of 20.
CAPACITY = 1024


class Scores(Protocol):
    """The part of an index that a cache needs."""

    def score(self, queries: Sequence[Query], passage_ids: Longs) -> Floats:
        """See :class:`~specrag.retrieval.index.base.Index`."""


class SpeculativeCache:
    """Passages that the index has returned for this request, ranked by the index's own scores.

    The scores are those of :meth:`Index.score <specrag.retrieval.index.base.Index.score>`, by which the index ranks,
    and ties go to the smaller id, as in the index. So whenever the index's best passage is in the cache, it is also the
    cache's best passage, with bit for bit the same score. Approximate search (HNSW) may miss a passage that the cache
    holds: then the cache's best passage is a different one that ranks before the index's.

    A cache belongs to one request, which makes one call at a time. It holds only ids; the passages stay in the index.

    Args:
        index: the index whose answers are speculated on.
        capacity: the most passages kept, at least 1.
    """

    def __init__(self, index: Scores, capacity: int = CAPACITY) -> None:
        check_whole("capacity", capacity)
        self._index = index
        self._capacity = capacity
        self._ids: Longs = np.empty(0, dtype=np.int64)  # most recently returned first

    def __len__(self) -> int:
        """Number of passages kept."""
        return len(self._ids)

    @property
    def ids(self) -> list[int]:
        """The ids of the passages kept, most recently returned first."""
        ids: list[int] = self._ids.tolist()
        return ids

    @property
    def nbytes(self) -> int:
        """Memory used in bytes: 8 per passage, at most ``8 * capacity``."""
        return self._ids.nbytes

    def add(self, ids: Sequence[int] | Longs) -> None:
        """Keep passages that the index has just returned.

        They become the most recent ones, in the order given; beyond the capacity, those returned the longest ago are
        dropped.

        Args:
            ids: any number of passage ids, best first, as in a :class:`~specrag.retrieval.index.base.Ranking`.
        """
        new = np.asarray(ids, dtype=np.int64)
        order = dict.fromkeys(chain(new.tolist(), self._ids.tolist()))  # removes duplicates, keeps the first
        self._ids = np.array(list(islice(order, self._capacity)), dtype=np.int64)

    def best(self, query: Query) -> int | None:
        """The id of the best passage kept, the index's first result if that is kept; ``None`` if none qualifies.

        Raises:
            InputError: the query lacks the form that the index needs.
        """
        ranking = self.rank(query, 1)
        return int(ranking.ids[0]) if len(ranking) else None

    def rank(self, query: Query, k: int) -> Ranking:
        """The best ``k`` of the passages kept, fewer if there are not that many.

        As with a sparse index, a query without a vector gets only passages that contain one of its terms.

        Raises:
            InputError: the query lacks the form that the index needs; ``k`` is not at least 1.
        """
        k = checked_k(k, self._capacity)
        if not len(self):
            return Ranking(ids=self._ids, scores=np.empty(0, dtype=np.float32))
        scores = self._index.score([query], self._ids)[0]
        ranking = best_of(scores, self._ids, k)
        if query.vector is not None:
            return ranking
        found = int(np.count_nonzero(ranking.scores > 0))
        return Ranking(ids=ranking.ids[:found], scores=ranking.scores[:found])
