"""Nearest-neighbour search over the keys of a kNN-LM datastore: protocol, settings, exact search."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Literal, Protocol, TypeAlias

import numpy as np

from specrag.checks import check_whole, plain
from specrag.errors import InputError
from specrag.methods.knn_lm.store.scoring import GROUP, Halves, distance_slack, distances, scan
from specrag.retrieval.index import LONGEST, Doubles, Floats, Longs, norms

IndexName: TypeAlias = Literal["flat", "hnsw", "pq"]
INDEXES: tuple[IndexName, ...] = ("flat", "hnsw", "pq")

#: Below this size a product quantiser cannot be trained well, and exact search takes no time.
SMALLEST_QUANTISED = 10_240


@dataclass(frozen=True, slots=True, eq=False)
class Neighbours:
    """The entries nearest to a query, by ascending distance, ties by ascending id.

    Args:
        ids: int64 [n].
        distances: squared, float32 [n].
    """

    ids: Longs
    distances: Floats

    def __len__(self) -> int:
        return len(self.ids)


class KeyIndex(Protocol):
    """Finds neighbours. Thread-safe; releases the interpreter lock."""

    def search(self, queries: Floats, k: int, most: int | None = None) -> list[Neighbours]:
        """The nearest entries of each query, bit for bit the same in a batch as one by one.

        Args:
            queries: float32 [queries, dimension].
            k: neighbours wanted, 1 to the number of entries.
            most: return up to this many, if they cost nothing extra or the caller asks for them; the first ``k`` are
                the same as without.

        Raises:
            InputError: a shape does not fit, or a value is not a number.
        """


@dataclass(frozen=True, slots=True)
class GraphSettings:
    """A hierarchical navigable small-world graph (Malkov and Yashunin, 2016) over the keys.

    Args:
        neighbors: links of a node in the upper layers, twice as many in the lowest (M).
        ef_construction: candidates kept while a node is linked.
        ef_search: candidates kept while a query is answered, or k if that is more.
    """

    neighbors: int = 16
    ef_construction: int = 60
    ef_search: int = 64

    name = "hnsw"

    def __post_init__(self) -> None:
        _check_whole(self.values(), least={"neighbors": 2})

    def values(self) -> dict[str, int]:
        """The settings by name."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class QuantiserSettings:
    """Keys of a few bytes in an inverted file (Jegou et al., "Product quantization", 2011); candidates only.

    Args:
        cells: of the inverted file; 0 means four times the square root of the number of entries, at most 4,096.
        code_bytes: maximum bytes of a code; the largest divisor of the dimension up to this is used.
        probes: cells that a query reads.
        candidates: codes that are measured by the kernel, for each neighbour wanted.
    """

    cells: int = 0
    code_bytes: int = 64
    probes: int = 32
    candidates: int = 4

    name = "pq"

    def __post_init__(self) -> None:
        _check_whole(self.values(), least={"cells": 0})

    def values(self) -> dict[str, int]:
        """The settings by name."""
        return asdict(self)


IndexSettings: TypeAlias = GraphSettings | QuantiserSettings


def checked_queries(queries: Floats, dimension: int) -> Floats:
    """Check queries for the compiled loops.

    Raises:
        InputError: a shape or type does not fit, or a value is not a number.
    """
    if queries.ndim != 2 or queries.dtype != np.float32 or queries.shape[1] != dimension:
        shape = f"{queries.dtype} {list(queries.shape)}"
        raise InputError("queries", shape, f"give float32 [queries, {dimension}]")
    if not (norms(queries) <= LONGEST).all():
        raise InputError("queries", "not finite", "check the model's weights and dtype")
    return np.ascontiguousarray(queries)


def check_k(k: int, entries: int) -> int:
    """Check the number of neighbours.

    Raises:
        InputError: it is not from 1 to the number of entries.
    """
    remedy = f"give a whole number from 1 to {entries:,}, the number of the datastore's entries"
    return check_whole("k", plain(k), 1, entries, remedy)


def check_size(settings: IndexSettings, entries: int) -> None:
    """Check that there are enough entries for an index.

    Raises:
        InputError: there are too few.
    """
    if isinstance(settings, QuantiserSettings) and entries < SMALLEST_QUANTISED:
        remedy = f"product quantisation needs {SMALLEST_QUANTISED:,} entries; leave it out, flat search is fast here"
        raise InputError("pq", f"{entries:,} entries", remedy)


def nearest_of(query: Floats, keys: Halves, candidates: Longs, most: int) -> Neighbours:
    """The nearest of some entries, measured by the kernel."""
    found: Floats = np.empty(len(candidates), dtype=np.float32)
    distances(query, keys, candidates, found)
    order = np.lexsort((candidates, found))[:most]
    return Neighbours(candidates[order], found[order])


def _check_whole(values: dict[str, int], least: dict[str, int]) -> None:
    for name, value in values.items():
        check_whole(name, value, least.get(name, 1))


#: Fewer keys than this are not worth a second thread.
_SHARE = 20_000

_NUMBERED: Longs = np.empty(0, dtype=np.int64)


class FlatKeys:
    """All keys, compared one by one.

    Args:
        keys: half-precision bits [entries, dimension], may be memory-mapped; not copied.
        key_norms: squared lengths, float32 [entries].
        largest_norm: the largest length of a key.
        threads: number of threads that share the keys; by default one per processor. It changes no bit of the result.
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
    """The nearest of the keys ``first`` to ``end - 1`` for each query; for the arguments see :func:`scan`."""
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
