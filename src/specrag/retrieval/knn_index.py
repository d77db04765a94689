"""What searches the keys of a kNN-LM datastore: neighbours by squared distance, each measured by the one kernel."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal, Protocol, TypeAlias

import numpy as np

from specrag.errors import InputError
from specrag.retrieval.index import norms
from specrag.retrieval.knn_scoring import Halves, distances
from specrag.retrieval.rounding import LONGEST
from specrag.retrieval.scoring import Floats, Longs

IndexName: TypeAlias = Literal["flat", "hnsw", "pq"]
INDEXES: tuple[IndexName, ...] = ("flat", "hnsw", "pq")

#: Below this a product quantiser cannot be trained well, and exact search takes no time.
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
    """Finds neighbours. Safe to use from several threads; lets the interpreter lock go."""

    def search(self, queries: Floats, k: int, most: int | None = None) -> list[Neighbours]:
        """The nearest entries of each query, bit for bit the same in a batch as one by one.

        Args:
            queries: float32 [queries, dimension].
            k: neighbours wanted, 1 to the number of entries.
            most: give up to this many, where they cost nothing more or are asked for by the caller's own choice;
                the first ``k`` are the same as without.

        Raises:
            InputError: a shape does not fit, or a number is none.
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
        """By name."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class QuantiserSettings:
    """Keys of a few bytes in an inverted file (Jegou et al., "Product quantization", 2011); candidates only.

    Args:
        cells: of the inverted file; 0 is four times the root of the number of entries, at most 4,096.
        code_bytes: most bytes of a code; the largest divisor of the dimension up to it is taken.
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
        """By name."""
        return asdict(self)


IndexSettings: TypeAlias = GraphSettings | QuantiserSettings


def checked_queries(queries: Floats, dimension: int) -> Floats:
    """The queries, ready for the loops.

    Raises:
        InputError: a shape or type does not fit, or a number is none.
    """
    if queries.ndim != 2 or queries.dtype != np.float32 or queries.shape[1] != dimension:
        shape = f"{queries.dtype} {list(queries.shape)}"
        raise InputError("queries", shape, f"give float32 [queries, {dimension}]")
    if not (norms(queries) <= LONGEST).all():
        raise InputError("queries", "not finite", "check the model's weights and dtype")
    return np.ascontiguousarray(queries)


def check_k(k: int, entries: int) -> int:
    """The number of neighbours.

    Raises:
        InputError: it is not from 1 to the number of entries.
    """
    if isinstance(k, bool) or not isinstance(k, int | np.integer) or not 1 <= k <= entries:
        raise InputError(
            "k", k, f"give a whole number from 1 to {entries:,}, the number of the datastore's entries"
        )
    return int(k)


def check_size(settings: IndexSettings, entries: int) -> None:
    """Make sure that there are entries enough for an index.

    Raises:
        InputError: there are not.
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
        lowest = least.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
            raise InputError(name, value, f"give a whole number of at least {lowest}")
