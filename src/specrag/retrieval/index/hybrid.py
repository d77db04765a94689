"""Exact hybrid search: a weighted sum of dense and BM25 scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specrag.checks import check_number
from specrag.errors import InputError
from specrag.retrieval.index.base import (
    Query,
    Ranking,
    checked_ids,
    checked_k,
    checked_mask,
    norms,
    query_terms,
    query_vectors,
)
from specrag.retrieval.index.bm25 import BM25Index
from specrag.retrieval.index.flat import QUERIES_AT_A_TIME, FlatIndex, Heaps
from specrag.retrieval.index.scoring import (
    Bools,
    Doubles,
    Floats,
    Ints,
    Longs,
    hybrid_scores,
    hybrid_slack,
    rank_hybrid,
    sparse_bound,
)

FILES = ()  # it has none of its own: it is made of the two others


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Some queries in both forms; ``terms`` and ``offsets`` as in ``rank_hybrid``."""

    vectors: Floats
    terms: Ints
    offsets: Longs
    bounds: Doubles


class HybridIndex:
    """Ranks by ``weight * dense + (1 - weight) * BM25 / (the most that BM25 could give)``.

    The score depends on the query, the passage and the corpus statistics, not on what else was found (as
    reciprocal ranks would), so that a cache of a few passages can rank by it too. Search is exact: the
    sparse part of every passage is summed, the dense part estimated by a matrix product, and the kernel
    scores what the rounding error leaves a chance. Every passage has a score, so that the ranking always has
    ``k`` entries where there are so many.

    Args:
        flat, bm25: the same passages.
        weight: of the dense part, 0 to 1.
    """

    def __init__(self, flat: FlatIndex, bm25: BM25Index, weight: float = 0.5) -> None:
        if len(flat) != len(bm25):
            sizes = [len(flat), len(bm25)]
            raise InputError("passages", sizes, "give a dense and a sparse index of the same passages")
        check_number("weight", weight, 0, 1, remedy="give a number from 0 (sparse only) to 1 (dense only)")
        self.flat = flat
        self.bm25 = bm25
        self.weight = float(weight)

    def __len__(self) -> int:
        return len(self.flat)

    def search(self, queries: Sequence[Query], k: int, allowed: Bools | None = None) -> list[Ranking]:
        """The best passages by the fused score; see :class:`~specrag.retrieval.index.base.Index`."""
        k = checked_k(k, len(self))
        mask = checked_mask(allowed, len(self))
        vectors = query_vectors(queries, self.flat.dimension)
        terms = query_terms(queries, len(self.bm25.postings.largest))
        rankings: list[Ranking] = []
        for start in range(0, len(queries), QUERIES_AT_A_TIME):
            stop = start + QUERIES_AT_A_TIME
            rankings.extend(self._search_group(self._group(vectors[start:stop], terms[start:stop]), k, mask))
        return rankings

    def _group(self, vectors: Floats, terms: Sequence[Ints]) -> _Group:
        return _Group(
            vectors=vectors,
            terms=np.concatenate(terms),
            offsets=np.cumsum([0, *map(len, terms)], dtype=np.int64),
            bounds=np.array([sparse_bound(own, self.bm25.postings.largest) for own in terms]),
        )

    def _search_group(self, group: _Group, k: int, mask: Bools | None) -> list[Ranking]:
        postings = self.bm25.postings
        slack = hybrid_slack(norms(group.vectors), self.flat.longest, self.flat.dimension, self.weight)
        heaps = Heaps(len(group.vectors), k)
        cursors = postings.starts[group.terms]
        for block in self.flat.blocks(mask):
            rank_hybrid(
                group.vectors,
                block.vectors,
                block.ids,
                block.products(group.vectors),
                slack,
                heaps.scores,
                heaps.ids,
                heaps.sizes,
                group.terms,
                group.offsets,
                cursors,
                postings.starts,
                postings.passages,
                postings.weights,
                block.first,
                block.end,
                group.bounds,
                self.weight,
            )
        return heaps.rankings()

    def score(self, queries: Sequence[Query], passage_ids: Longs) -> Floats:
        """Fused scores by the kernel, float32 [queries, ids given]."""
        ids = checked_ids(passage_ids, len(self))
        dense = self.flat.score(queries, ids)
        sparse = self.bm25.score(queries, ids)
        scores = np.empty_like(dense)
        for place, terms in enumerate(query_terms(queries, len(self.bm25.postings.largest))):
            bound = sparse_bound(terms, self.bm25.postings.largest)
            hybrid_scores(dense[place], sparse[place], bound, self.weight, scores[place])
        return scores
