"""Exact search of a kNN-LM datastore: every key is read, once for a group of queries."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from specrag.retrieval.index import norms
from specrag.retrieval.knn_index import Neighbours, check_k, checked_queries
from specrag.retrieval.knn_scoring import GROUP, Halves, distance_slack, scan
from specrag.retrieval.scoring import Doubles, Floats, Longs

#: Fewer keys than this are not worth a second thread.
_SHARE = 20_000

_NUMBERED: Longs = np.empty(0, dtype=np.int64)


class FlatKeys:
    """All keys, compared one by one.

    Args:
        keys: half-precision bits [entries, dimension], may be memory-mapped; not copied.
        key_norms: squared lengths, float32 [entries].
        largest_norm: the greatest length of a key.
        threads: that share the keys; by default one a processor. They change no bit of the result.
    """

    def __init__(
        self, keys: Halves, key_norms: Floats, largest_norm: float, threads: int | None = None
    ) -> None:
        self.keys: Halves = np.asarray(keys)  # a plain view: slices of a memory map are slow
        self.norms: Floats = np.asarray(key_norms)
        self.largest_norm = largest_norm
        self.threads = (os.cpu_count() or 1) if threads is None else threads

    def __len__(self) -> int:
        return len(self.keys)

    def search(self, queries: Floats, k: int, most: int | None = None) -> list[Neighbours]:
        """See :class:`~specrag.retrieval.knn_index.KeyIndex`."""
        k = check_k(k, len(self))
        wanted = min(max(k, most or k), len(self))
        checked = checked_queries(queries, self.keys.shape[1])
        slack = distance_slack(norms(checked), self.largest_norm, self.keys.shape[1])
        found: list[Neighbours] = []
        for start in range(0, len(checked), GROUP):
            end = start + GROUP
            found += self._search_group(checked[start:end], slack[start:end], wanted)
        return found

    def _search_group(self, queries: Floats, slack: Doubles, k: int) -> list[Neighbours]:
        parts = max(1, min(self.threads, len(self) // _SHARE))
        borders = np.linspace(0, len(self), parts + 1).astype(np.int64)

        def search_part(part: int) -> list[Neighbours]:
            first, end = int(borders[part]), int(borders[part + 1])
            return nearest_in(queries, self.keys, self.norms, _NUMBERED, first, end, slack, k)

        if parts == 1:
            return search_part(0)
        with ThreadPoolExecutor(parts - 1) as pool:
            others = [pool.submit(search_part, part) for part in range(1, parts)]
            found = [search_part(0), *(other.result() for other in others)]
        return [_merged([part[place] for part in found], k) for place in range(len(queries))]


def nearest_in(
    queries: Floats,
    keys: Halves,
    key_norms: Floats,
    ids: Longs,
    first: int,
    end: int,
    slack: Doubles,
    k: int,
) -> list[Neighbours]:
    """The nearest of the keys ``first`` to ``end - 1`` for each query; arguments as of :func:`scan`."""
    k = min(k, end - first)
    found: Floats = np.empty((len(queries), k), dtype=np.float32)
    found_ids: Longs = np.empty((len(queries), k), dtype=np.int64)
    sizes: Longs = np.zeros(len(queries), dtype=np.int64)
    if k:
        scan(queries, keys, key_norms, ids, first, end, slack, found, found_ids, sizes)
    orders = [np.lexsort((own_ids, own)) for own, own_ids in zip(found, found_ids, strict=True)]
    return [Neighbours(found_ids[n][order], found[n][order]) for n, order in enumerate(orders)]


def _merged(parts: list[Neighbours], k: int) -> Neighbours:
    ids = np.concatenate([part.ids for part in parts])
    found = np.concatenate([part.distances for part in parts])
    order = np.lexsort((ids, found))[:k]
    return Neighbours(ids[order], found[order])
