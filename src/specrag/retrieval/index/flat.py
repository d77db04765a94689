"""Exact dense search; a batch of queries reads each vector once."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specrag.errors import InputError
from specrag.retrieval.index.base import (
    Query,
    Ranking,
    best_of,
    checked_ids,
    checked_k,
    checked_mask,
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

VECTORS_FILE = "vectors.npy"
SETTINGS_FILE = "flat.json"
FILES = (VECTORS_FILE, SETTINGS_FILE)

# Queries multiplied at a time, and bytes of vectors: with the products a search needs some 12 MiB of memory,
# and k entries a query, whatever the number of passages and queries.
QUERIES_AT_A_TIME = 64
_BLOCK_BYTES = 6 << 20
# Bytes of vectors that are worth a thread.
_PART_BYTES = 12 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A block of passages: ids ``first`` to ``end - 1``, of which ``ids`` are allowed."""

    first: int
    end: int
    ids: Longs
    vectors: Floats

    def products(self, queries: Floats) -> Floats:
        """Inner products in float32, [passages, queries]."""
        out = np.empty((len(self.vectors), len(queries)), dtype=np.float32)
        inner_products(self.vectors, queries, out)
        return out


class Heaps:
    """The best entries so far of each query of a group, filled by the loops of ``scoring.py``."""

    def __init__(self, queries: int, k: int) -> None:
        self.scores = np.empty((queries, k), dtype=np.float32)
        self.ids = np.empty((queries, k), dtype=np.int64)
        self.sizes = np.zeros(queries, dtype=np.int64)

    def rankings(self) -> list[Ranking]:
        """The entries in order."""
        return [
            best_of(scores[:size], ids[:size], size)
            for scores, ids, size in zip(self.scores, self.ids, self.sizes.tolist(), strict=True)
        ]


class FlatIndex:
    """All passages' vectors, searched exactly by inner product.

    A block of vectors times a group of queries gives float32 products (:func:`inner_products`); the kernel then scores
    each passage that the product's rounding error leaves a chance (``rank_dense``). So the result is exactly the
    ranking by :func:`~specrag.retrieval.index.scoring.dense_score`, and a batch reads the vectors once for each 64
    queries.

    Args:
        vectors: float32 [passages, dimension], C-contiguous, may be memory-mapped; not copied.
        longest: the greatest Euclidean length of a vector, as :meth:`build` measures it.

    Attributes:
        threads: that a search may take, by default as many as there are processors.

    Raises:
        InputError: the vectors have another shape or type, or are not finite.
    """

    def __init__(self, vectors: Floats, longest: float) -> None:
        if vectors.ndim != 2 or vectors.dtype != np.float32 or vectors.shape[1] < 1:
            shape = f"{vectors.dtype} {list(vectors.shape)}"
            raise InputError("vectors", shape, "give float32 [passages, dimension]")
        if not vectors.flags.c_contiguous:
            raise InputError("vectors", "not contiguous", "give rows that lie one after the other")
        if not 0.0 <= longest <= LONGEST:
            raise InputError("vectors", f"length {longest}", "give finite numbers of a length below 2^60")
        self._stored = vectors
        self.vectors: Floats = np.asarray(vectors)  # a plain view: slices of a memory map are slow
        self.longest = longest
        self.threads = os.cpu_count() or 1

    @classmethod
    def build(cls, vectors: Floats) -> FlatIndex:
        """Build an index; reads all vectors once to find the longest and to refuse NaN."""
        if vectors.ndim != 2 or vectors.dtype != np.float32:
            return cls(vectors, 0.0)  # says what is wrong
        return cls(vectors, float(largest_norm(np.asarray(vectors))))

    @property
    def dimension(self) -> int:
        """Elements of a vector."""
        return int(self.vectors.shape[1])

    def __len__(self) -> int:
        return len(self.vectors)

    def save(self, folder: Path) -> None:
        """Write :data:`FILES`; vectors that are mapped from the file itself stay as they are."""
        path = folder / VECTORS_FILE
        mapped = getattr(self._stored, "filename", None)
        if mapped is None or not path.exists() or not path.samefile(mapped):
            np.save(path, self.vectors)
        settings = {"passages": len(self), "dimension": self.dimension, "longest": self.longest}
        (folder / SETTINGS_FILE).write_text(json.dumps(settings) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> FlatIndex:
        """Open what :meth:`save` wrote; the vectors are mapped, not read.

        Raises:
            InputError: the files do not belong together.
        """
        settings = json.loads((folder / SETTINGS_FILE).read_text(encoding="utf-8"))
        vectors = np.load(folder / VECTORS_FILE, mmap_mode="r")
        if vectors.shape != (settings["passages"], settings["dimension"]):
            raise InputError(str(folder / VECTORS_FILE), list(vectors.shape), "build the index again")
        return cls(vectors, settings["longest"])

    def search(self, queries: Sequence[Query], k: int, allowed: Bools | None = None) -> list[Ranking]:
        """The best passages by inner product; see :class:`~specrag.retrieval.index.base.Index`."""
        k = checked_k(k, len(self))
        mask = checked_mask(allowed, len(self))
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
        ids = checked_ids(passage_ids, len(self))
        vectors = query_vectors(queries, self.dimension)
        scores = np.empty((len(queries), len(ids)), dtype=np.float32)
        for place in range(len(queries)):
            dense_scores(vectors[place], self.vectors, ids, scores[place])
        return scores

    def blocks(self, mask: Bools | None, part: int = 0, parts: int = 1) -> Iterator[Block]:
        """All passages in ascending order, those of a block that the mask allows.

        Args:
            part, parts: every ``parts``-th block from this one on, for threads that share them.
        """
        rows = max(256, _BLOCK_BYTES // (4 * self.dimension))
        for first in range(part * rows, len(self), parts * rows):
            end = min(first + rows, len(self))
            if mask is None:
                yield Block(first, end, np.arange(first, end), self.vectors[first:end])
                continue
            ids = np.flatnonzero(mask[first:end]) + first
            if len(ids):
                yield Block(first, end, ids, self.vectors.take(ids, axis=0))


def _merged(rankings: Sequence[Ranking], k: int) -> Ranking:
    """Merge the best entries of several parts."""
    return best_of(
        np.concatenate([ranking.scores for ranking in rankings]),
        np.concatenate([ranking.ids for ranking in rankings]),
        k,
    )
