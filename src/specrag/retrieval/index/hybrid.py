"""Exact hybrid search: a weighted sum of dense and BM25 scores."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specrag.checks import check_number
from specrag.errors import InputError
from specrag.retrieval.index.base import (
    Query,
    Ranking,
    checked_k,
    norms,
    query_terms,
    query_vectors,
)
from specrag.retrieval.index.bm25 import BM25Index, Postings
from specrag.retrieval.index.flat import QUERIES_AT_A_TIME, FlatIndex, Heaps
from specrag.retrieval.index.scoring import (
    Bools,
    Floats,
    Longs,
    hybrid_scores,
    hybrid_slack,
    rank_hybrid,
    sparse_bound,
)


class HybridIndex:
    """Ranks by ``weight * dense + (1 - weight) * BM25 / (the most that BM25 could give)``.

    The score depends on the query, the passage and the corpus statistics, but not on what else was found (unlike
    reciprocal ranks), so a cache of a few passages can rank by it too. Search is exact: the sparse part of every
    passage is summed, the dense part is estimated by a matrix product, and the kernel scores the passages that may
    still be among the best, given the rounding error. Every passage has a score, so the ranking always has ``k``
    entries if there are that many passages.

    Args:
        flat, bm25: indexes of the same passages.
        weight: weight of the dense part, 0 to 1.
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
        mask = self.flat.rows.mask(allowed)
        vectors = query_vectors(queries, self.flat.dimension)
        terms = query_terms(queries, self.bm25.vocabulary)
        rankings: list[Ranking] = []
        for start in range(0, len(queries), QUERIES_AT_A_TIME):
            some = slice(start, start + QUERIES_AT_A_TIME)
            rankings.extend(self._search_group(vectors[some], self.bm25.postings(terms[some]), k, mask))
        return rankings

    def _search_group(self, vectors: Floats, postings: Postings, k: int, mask: Bools | None) -> list[Ranking]:
        slack = hybrid_slack(norms(vectors), self.flat.longest, self.flat.dimension, self.weight)
        heaps = Heaps(len(vectors), k)
        terms = np.concatenate(postings.terms)
        offsets = np.cumsum([0, *map(len, postings.terms)], dtype=np.int64)
        bounds = np.array([sparse_bound(own, postings.largest) for own in postings.terms])
        cursors = postings.starts[terms]
        for block in self.flat.blocks(mask):
            rank_hybrid(
                vectors,
                block.vectors,
                block.ids,
                block.products(vectors),
                slack,
                heaps.scores,
                heaps.ids,
                heaps.sizes,
                terms,
                offsets,
                cursors,
                postings.starts,
                postings.rows,
                postings.weights,
                block.rows,
                block.first,
                block.end,
                bounds,
                self.weight,
            )
        return heaps.rankings()

    def score(self, queries: Sequence[Query], passage_ids: Longs) -> Floats:
        """Fused scores by the kernel, float32 [queries, ids given]."""
        dense = self.flat.score(queries, passage_ids)
        sparse = self.bm25.score(queries, passage_ids)
        scores = np.empty_like(dense)
        for place, terms in enumerate(query_terms(queries, self.bm25.vocabulary)):
            hybrid_scores(dense[place], sparse[place], self.bm25.bound(terms), self.weight, scores[place])
        return scores
