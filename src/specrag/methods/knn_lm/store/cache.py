"""The speculative cache of kNN-LM: entries that follow retrieved ones in their texts (RaLMSpec, section 5.3).

A token's neighbours are rarely found again. But if the text continues as a neighbour's text did, the entries after
that neighbour are the next ones to be found.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specrag.checks import check_whole
from specrag.methods.knn_lm.store.datastore import Datastore
from specrag.methods.knn_lm.store.index import Neighbours, checked_queries, nearest_in
from specrag.methods.knn_lm.store.scoring import Halves, distance_slack
from specrag.retrieval.index import Floats, Longs, norms

#: Entries after each neighbour, as in the paper.
FOLLOWERS = 10

#: Maximum number of entries kept: 5 MB for keys of 576 elements.
CAPACITY = 4_096


class FollowerCache:
    """Entries copied from a datastore, ranked as the datastore ranks them.

    One request owns a cache and makes one call at a time.

    Args:
        datastore: whose entries they are.
        followers: entries after each neighbour that are kept (n).
        capacity: maximum number of entries kept; those added longest ago are dropped first.

    Raises:
        InputError: a number is not at least 1.
    """

    def __init__(self, datastore: Datastore, followers: int = FOLLOWERS, capacity: int = CAPACITY) -> None:
        check_whole("followers", followers)
        check_whole("capacity", capacity)
        self._datastore = datastore
        self._followers = followers
        self._capacity = min(capacity, len(datastore))
        self._ids: Longs = np.empty(0, dtype=np.int64)  # the most recently added first
        self._rows: Longs = np.empty(0, dtype=np.int64)  # the row of each of them
        self._keys: Halves = np.empty((0, datastore.dimension), dtype=np.uint16)
        self._norms: Floats = np.empty(0, dtype=np.float32)
        self._row_ids: Longs = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        """Number of entries kept."""
        return len(self._ids)

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept: at most ``capacity * (2 * dimension + 28)``."""
        arrays = (self._ids, self._rows, self._keys, self._norms, self._row_ids)
        return sum(array.nbytes for array in arrays)

    def add(self, found: Sequence[Neighbours]) -> None:
        """Keep what follows the neighbours of some queries.

        Among one query's followers, those directly after a neighbour count as more recent than later ones, and at the
        same offset those of the nearest neighbour come first.

        Args:
            found: for queries in the order of the text, newest last.
        """
        offsets = np.arange(1, self._followers + 1)
        wanted: Longs = np.empty(0, dtype=np.int64)
        for neighbours in reversed(found):
            new = (offsets[:, None] + neighbours.ids[None, :]).ravel()
            wanted = _distinct(np.concatenate([wanted, new[new < len(self._datastore)]]))[: self._capacity]
            if len(wanted) == self._capacity:
                break
        self._keep(_distinct(np.concatenate([wanted, self._ids]))[: self._capacity])

    def nearest(self, query: Floats, k: int) -> Neighbours:
        """The nearest ``k`` of the entries kept, or all if there are fewer, for a float32 [dimension] query."""
        queries = checked_queries(query[None], self._datastore.dimension)
        slack = distance_slack(
            norms(queries), self._datastore.manifest.largest_norm, self._datastore.dimension
        )
        count = len(self)
        (found,) = nearest_in(queries, self._keys, self._norms, self._row_ids, 0, count, slack, k)
        return found

    def _keep(self, ids: Longs) -> None:
        """Hold exactly these entries, in this order; those already held keep their rows."""
        if len(ids) > len(self._keys):
            self._grow(len(ids))
        order = np.argsort(self._ids)
        place = np.searchsorted(self._ids, ids, sorter=order)
        place = order[np.minimum(place, len(order) - 1)] if len(order) else place
        held = self._ids[place] == ids if len(order) else np.zeros(len(ids), dtype=np.bool_)
        rows = np.empty(len(ids), dtype=np.int64)
        rows[held] = self._rows[place[held]]
        # The rows in use are always the first ones, so a look-up reads nothing else.
        free = np.ones(len(ids), dtype=np.bool_)
        free[rows[held]] = False
        rows[~held] = np.flatnonzero(free)
        self._keys[rows[~held]] = self._datastore.halves[ids[~held]]
        self._norms[rows[~held]] = self._datastore.flat.norms[ids[~held]]
        self._row_ids[rows[~held]] = ids[~held]
        self._ids, self._rows = ids, rows

    def _grow(self, entries: int) -> None:
        size = min(max(entries, 2 * len(self._keys)), self._capacity)
        keys, key_norms, row_ids = self._keys, self._norms, self._row_ids
        self._keys = np.empty((size, self._datastore.dimension), dtype=np.uint16)
        self._norms = np.empty(size, dtype=np.float32)
        self._row_ids = np.empty(size, dtype=np.int64)
        self._keys[: len(keys)], self._norms[: len(keys)] = keys, key_norms
        self._row_ids[: len(keys)] = row_ids


def _distinct(ids: Longs) -> Longs:
    """Each id once, at its first position."""
    _, first = np.unique(ids, return_index=True)
    return ids[np.sort(first)]
