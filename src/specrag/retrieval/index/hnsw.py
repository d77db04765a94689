"""Approximate dense search: a hierarchical navigable small-world graph (Malkov and Yashunin, 2016) in faiss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from specrag.checks import check_whole
from specrag.errors import InputError
from specrag.retrieval.index.base import Query, Ranking, best_of, checked_k, query_vectors
from specrag.retrieval.index.flat import FlatIndex
from specrag.retrieval.index.scoring import Bools, Floats, Longs, dense_scores

# With at most this many allowed passages per candidate of a search, exact search over them is faster than walking a
# graph in which most nodes may not be returned.
EXACT_BELOW = 32


@dataclass(frozen=True, slots=True)
class HnswSettings:
    """Settings of the graph and its search.

    Args:
        neighbors: links of a node in the upper layers; the lowest layer has twice as many (M).
        ef_construction: candidates kept while a node is linked.
        ef_search: candidates kept during a search; all of them are scored by the kernel.
    """

    neighbors: int = 32
    ef_construction: int = 80
    ef_search: int = 64

    def __post_init__(self) -> None:
        for name, least in (("neighbors", 2), ("ef_construction", 1), ("ef_search", 1)):
            check_whole(name, getattr(self, name), least)


class HnswIndex:
    """A graph over the vectors of a :class:`~specrag.retrieval.index.flat.FlatIndex`, which it shares.

    faiss walks the graph and returns all its ``max(ef_search, k)`` candidates, which the kernel scores. Each query has
    its own walk, so batching changes nothing, and any ``k`` up to ``ef_search`` gives a prefix of the same ranking. A
    walk that finds fewer candidates (a graph torn by duplicates, a narrow filter) is replaced by exact search.

    The vectors are stored once: the graph is written without them, and in memory faiss reads those of ``flat``, mapped
    or not. The graph may lag behind: all rows added after it are candidates, and rows that no longer hold a passage are
    walked through but not returned.

    Args:
        graph: faiss's index, without its own vectors.
        flat: the same passages, possibly followed by more.
        settings: the settings with which the graph was built.
    """

    def __init__(self, graph: Any, flat: FlatIndex, settings: HnswSettings) -> None:
        if graph.ntotal > len(flat.vectors) or graph.d != flat.dimension:
            shape = [graph.ntotal, graph.d]
            raise InputError("graph", shape, f"build it for these vectors: {list(flat.vectors.shape)}")
        self.flat = flat
        self.settings = settings
        self._graph = graph
        storage = faiss.IndexFlat(flat.dimension, faiss.METRIC_INNER_PRODUCT)
        self._storage = share_storage(graph, storage, flat.vectors[: graph.ntotal])

    @classmethod
    def build(
        cls, flat: FlatIndex, settings: HnswSettings | None = None, threads: int | None = None
    ) -> HnswIndex:
        """Link all vectors, including those of rows that no longer hold a passage. Needs a temporary copy of them.

        A single thread always builds the same graph from the same vectors. faiss 1.15 did so with two threads as well,
        but does not promise it.

        Args:
            flat: the vectors.
            settings: settings of the graph, by default those of :class:`HnswSettings`.
            threads: number of threads, by default as many as OpenMP takes.
        """
        settings = settings or HnswSettings()
        with _threads(threads):
            built = faiss.IndexHNSWFlat(flat.dimension, settings.neighbors, faiss.METRIC_INNER_PRODUCT)
            built.hnsw.efConstruction = settings.ef_construction
            built.add(flat.vectors)
        # Take the detour through bytes: faiss cannot remove a graph's vectors, but it can skip them when serialising.
        graph = faiss.deserialize_index(faiss.serialize_index(built, faiss.IO_FLAG_SKIP_STORAGE))
        return cls(graph, flat, settings)

    def __len__(self) -> int:
        return len(self.flat)

    @property
    def linked(self) -> int:
        """How many rows are in the graph; they are the first ones."""
        return int(self._graph.ntotal)

    def save(self, path: Path) -> None:
        """Write the graph without the vectors."""
        faiss.write_index(self._graph, str(path), faiss.IO_FLAG_SKIP_STORAGE)

    @classmethod
    def load(cls, path: Path, flat: FlatIndex, settings: HnswSettings | None = None) -> HnswIndex:
        """Open a graph written by :meth:`save` over the same vectors; the file is memory-mapped, not read.

        Raises:
            InputError: the file is not a graph, or not a graph of these vectors.
        """
        graph = read_faiss("graph", path, faiss.IO_FLAG_MMAP_IFC)
        return cls(graph, flat, settings or HnswSettings())

    def search(self, queries: Sequence[Query], k: int, allowed: Bools | None = None) -> list[Ranking]:
        """Nearly the best passages by inner product; see :class:`~specrag.retrieval.index.base.Index`."""
        k = checked_k(k, len(self))
        mask = self.flat.rows.mask(allowed)
        vectors = query_vectors(queries, self.flat.dimension)
        total, linked = self.flat.rows.total, self.linked
        allowed_rows = total if mask is None else int(np.count_nonzero(mask))
        added = np.arange(linked, total) if mask is None else np.flatnonzero(mask[linked:]) + linked
        available = allowed_rows - len(added)
        candidates = min(max(self.settings.ef_search, k), linked)
        if available <= EXACT_BELOW * candidates or not len(queries):
            return self.flat.search(queries, k, allowed)
        found = self._walk(vectors, candidates, None if mask is None else mask[:linked])
        rankings = [
            self._rank(vector, np.concatenate([rows[rows >= 0], added]), k)
            for vector, rows in zip(vectors, found, strict=True)
        ]
        # Decided independently of k, so that a smaller k gives a prefix of the same ranking.
        torn = np.flatnonzero(np.count_nonzero(found >= 0, axis=1) < min(candidates, available)).tolist()
        exact = self.flat.search([queries[place] for place in torn], k, allowed)
        for place, ranking in zip(torn, exact, strict=True):
            rankings[place] = ranking
        return rankings

    def score(self, queries: Sequence[Query], passage_ids: Longs) -> Floats:
        """Inner products by the kernel, float32 [queries, ids given]."""
        return self.flat.score(queries, passage_ids)

    def _walk(self, vectors: Floats, candidates: int, mask: Bools | None) -> Longs:
        """The rows of each query's candidates, int64 [queries, candidates]; padded with -1 if there are fewer."""
        parameters = faiss.SearchParametersHNSW(efSearch=candidates)
        if mask is not None:
            bits = np.packbits(mask, bitorder="little")
            parameters = faiss.SearchParametersHNSW(efSearch=candidates, sel=faiss.IDSelectorBitmap(bits))
        _, ids = self._graph.search(vectors, candidates, params=parameters)
        found: Longs = ids
        return found

    def _rank(self, vector: Floats, rows: Longs, k: int) -> Ranking:
        scores = np.empty(len(rows), dtype=np.float32)
        dense_scores(vector, self.flat.vectors, rows, scores)
        return best_of(scores, self.flat.rows.named(rows), k)


def share_storage(graph: Any, storage: Any, rows: NDArray[Any]) -> Any:
    """Let a faiss graph without vectors read them in place.

    Args:
        graph: faiss's.
        storage: an empty faiss index of the vectors' kind.
        rows: the vectors as this kind of index holds them; the caller keeps them alive.

    Returns:
        The storage, which the graph does not keep alive either.
    """
    nobody = faiss.MaybeOwnedVectorUInt8().owner  # nothing for faiss to free
    address = faiss.cast_integer_to_uint8_ptr(rows.ctypes.data)
    storage.codes = faiss.MaybeOwnedVectorUInt8.create_view(address, rows.nbytes, nobody)
    storage.ntotal = len(rows)
    storage.is_trained = True
    graph.storage = storage
    graph.own_fields = False
    return storage


def read_faiss(field: str, path: Path, flags: int = 0) -> Any:
    """An index as faiss wrote it.

    Args:
        field: what an error names.
        flags: of faiss; by default the file is read, not mapped.

    Raises:
        InputError: faiss cannot read the file.
    """
    try:
        return faiss.read_index(str(path), flags)
    except RuntimeError as error:
        raise InputError(field, str(path), "build the index again: faiss cannot read the file") from error


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Set the number of OpenMP threads of the calling thread."""
    before = faiss.omp_get_max_threads()
    try:
        if count is not None:
            faiss.omp_set_num_threads(count)
        yield
    finally:
        faiss.omp_set_num_threads(before)
