"""Exact dense search; a batch of queries reads each vector only once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from specrag.errors import InputError
from specrag.retrieval.index.base import (
    Query,
    Ranking,
    Rows,
    best_of,
    checked_k,
    norms,
    query_vectors,
)
from specrag.retrieval.index.scoring import (
    LONGEST,
    Bools,
    Floats,
    Longs,
    dense_scores,
    dense_slack,
    inner_products,
    largest_norm,
    rank_dense,
)

# Queries and bytes of vectors multiplied at a time: including the products, a search needs some 12 MiB of memory plus
# k entries per query, whatever the number of passages and queries.
QUERIES_AT_A_TIME = 64
_BLOCK_BYTES = 6 << 20
# If more than this share of a block is allowed, the whole block is multiplied.
_DENSE = 0.6
# Bytes of vectors for which another thread pays off.
_PART_BYTES = 12 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A block of passages.

    Attributes:
        first, end: the block spans the rows ``first`` to ``end - 1``.
        rows, ids, vectors: rows, ids and vectors of its passages.
        hidden: positions of passages that may not be returned.
    """

    first: int
    end: int
    rows: Longs
    ids: Longs
    vectors: Floats
    hidden: Longs | None = None

    def products(self, queries: Floats) -> Floats:
        """Inner products in float32, [passages, queries]; NaN for passages that may not be returned."""
        out = np.empty((len(self.vectors), len(queries)), dtype=np.float32)
        inner_products(self.vectors, queries, out)
        if self.hidden is not None:
            out[self.hidden] = np.nan
        return out


class Heaps:
    """The best entries so far for each query of a group, filled by the loops in ``scoring.py``."""

    def __init__(self, queries: int, k: int) -> None:
        self.scores = np.empty((queries, k), dtype=np.float32)
        self.ids = np.empty((queries, k), dtype=np.int64)
        self.sizes = np.zeros(queries, dtype=np.int64)

    def rankings(self) -> list[Ranking]:
        """The entries of each query, best first."""
        return [
            best_of(scores[:size], ids[:size], size)
            for scores, ids, size in zip(self.scores, self.ids, self.sizes.tolist(), strict=True)
        ]


class FlatIndex:
    """All passages' vectors, searched exactly by inner product.

    A block of vectors times a group of queries gives float32 products (:func:`inner_products`); the kernel then scores
    each passage that may still be among the best, given the products' rounding error (``rank_dense``). The result is
    exactly the ranking by :func:`~specrag.retrieval.index.scoring.dense_score`, and a batch reads the vectors once for
    every 64 queries.

    Args:
        vectors: float32 [passages, dimension], C-contiguous, may be memory-mapped; not copied.
        longest: the greatest Euclidean length of a vector, as measured by :meth:`build`.
        rows: which passage each vector belongs to; by default the row's number is the passage's id.

    Attributes:
        threads: the most threads that a search may use, by default the number of processors.

    Raises:
        InputError: the vectors have another shape or type, or are not finite.
    """

    def __init__(self, vectors: Floats, longest: float, rows: Rows | None = None) -> None:
        if vectors.ndim != 2 or vectors.dtype != np.float32 or vectors.shape[1] < 1:
            shape = f"{vectors.dtype} {list(vectors.shape)}"
            raise InputError("vectors", shape, "give float32 [passages, dimension]")
        if not vectors.flags.c_contiguous:
            raise InputError("vectors", "not contiguous", "give rows that lie one after the other")
        if not 0.0 <= longest <= LONGEST:
            raise InputError("vectors", f"length {longest}", "give finite numbers of a length below 2^60")
        self.vectors: Floats = np.asarray(vectors)  # a plain view: slices of a memory map are slow
        self.longest = longest
        self.rows = Rows(len(vectors)) if rows is None else rows
        self.threads = os.cpu_count() or 1

    @classmethod
    def build(cls, vectors: Floats, rows: Rows | None = None) -> FlatIndex:
        """Build an index; reads all vectors once to find the greatest length and to refuse NaN."""
        if vectors.ndim != 2 or vectors.dtype != np.float32:
            return cls(vectors, 0.0)  # raises an error that says what is wrong
        return cls(vectors, float(largest_norm(np.asarray(vectors))), rows)

    @property
    def dimension(self) -> int:
        """Number of elements of a vector."""
        return int(self.vectors.shape[1])

    def __len__(self) -> int:
        return len(self.rows)

    def search(self, queries: Sequence[Query], k: int, allowed: Bools | None = None) -> list[Ranking]:
        """The best passages by inner product; see :class:`~specrag.retrieval.index.base.Index`."""
        k = checked_k(k, len(self))
        mask = self.rows.mask(allowed)
        vectors = query_vectors(queries, self.dimension)
        rankings: list[Ranking] = []
        for start in range(0, len(queries), QUERIES_AT_A_TIME):
            rankings += self._search_group(vectors[start : start + QUERIES_AT_A_TIME], k, mask)
        return rankings

    def _search_group(self, group: Floats, k: int, mask: Bools | None) -> list[Ranking]:
        slack = dense_slack(norms(group), self.longest, self.dimension)
        parts = max(1, min(self.threads, self.vectors.nbytes // _PART_BYTES))

        def search_part(part: int) -> list[Ranking]:
            heaps = Heaps(len(group), k)
            for block in self.blocks(mask, part, parts):
                rank_dense(
                    group,
                    block.vectors,
                    block.ids,
                    block.products(group),
                    slack,
                    heaps.scores,
                    heaps.ids,
                    heaps.sizes,
                )
            return heaps.rankings()

        if parts == 1:
            return search_part(0)
        with ThreadPoolExecutor(parts - 1) as threads:
            others = [threads.submit(search_part, part) for part in range(1, parts)]
            found = [search_part(0), *(other.result() for other in others)]
        return [_merged(rankings, k) for rankings in zip(*found, strict=True)]

    def score(self, queries: Sequence[Query], passage_ids: Longs) -> Floats:
        """Inner products by the kernel, float32 [queries, ids given]."""
        rows = self.rows.find(passage_ids)
        vectors = query_vectors(queries, self.dimension)
        scores = np.empty((len(queries), len(rows)), dtype=np.float32)
        for place in range(len(queries)):
            dense_scores(vectors[place], self.vectors, rows, scores[place])
        return scores

    def blocks(self, mask: Bools | None, part: int = 0, parts: int = 1) -> Iterator[Block]:
        """Blocks of passages in the order of their rows, without blocks and passages that the mask does not allow.

        Args:
            mask: the rows that may be returned, bool [rows]; None for all.
            part, parts: yield every ``parts``-th block, starting at block ``part``, for threads that share the work.
        """
        size = max(256, _BLOCK_BYTES // (4 * self.dimension))
        for first in range(part * size, len(self.vectors), parts * size):
            end = min(first + size, len(self.vectors))
            rows = np.arange(first, end)
            vectors, hidden = self.vectors[first:end], None
            if mask is not None and not mask[first:end].all():
                allowed = mask[first:end]
                kept = int(np.count_nonzero(allowed))
                if not kept:
                    continue
                if kept > _DENSE * len(rows):  # multiplying a few in vain is cheaper than copying the others
                    hidden = np.flatnonzero(~allowed)
                else:
                    rows = rows[allowed]
                    vectors = self.vectors.take(rows, axis=0)
            yield Block(first, end, rows, self.rows.named(rows), vectors, hidden)


def _merged(rankings: Sequence[Ranking], k: int) -> Ranking:
    """Merge the best entries of several parts."""
    return best_of(
        np.concatenate([ranking.scores for ranking in rankings]),
        np.concatenate([ranking.ids for ranking in rankings]),
        k,
    )
