"""Approximate search of a kNN-LM datastore with faiss: an HNSW graph, or product-quantised keys.

Both only propose candidates; the kernel of ``scoring.py`` measures them with the half-precision keys, which the graph
reads in place.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import faiss
import numpy as np

from specrag.errors import InputError
from specrag.methods.knn_lm.store.index import (
    FlatKeys,
    GraphSettings,
    Neighbours,
    QuantiserSettings,
    check_k,
    check_size,
    checked_queries,
    nearest_of,
)
from specrag.retrieval.index import Floats, read_faiss, share_storage

_HALVES = faiss.ScalarQuantizer.QT_fp16
_GRAPH_BLOCK = 16_384


class GraphKeys:
    """A graph over the keys of a :class:`~specrag.methods.knn_lm.store.index.FlatKeys`.

    Each query walks the graph separately, so a batch changes nothing, and the kernel measures all candidates. If a walk
    finds fewer than it should (a graph torn by equal keys), exact search takes its place.

    Args:
        graph: faiss's index, without keys of its own.
        flat: the same keys.
        settings: those that the graph was built with.

    Raises:
        InputError: the graph does not belong to these keys.
    """

    def __init__(self, graph: Any, flat: FlatKeys, settings: GraphSettings) -> None:
        if (graph.ntotal, graph.d) != flat.keys.shape:
            shape = [graph.ntotal, graph.d]
            raise InputError("graph", shape, f"build it for these keys: {list(flat.keys.shape)}")
        self.flat = flat
        self.settings = settings
        self._graph = graph
        storage = faiss.IndexScalarQuantizer(flat.keys.shape[1], _HALVES, faiss.METRIC_L2)
        self._storage = share_storage(graph, storage, flat.keys)

    @classmethod
    def build(cls, flat: FlatKeys, settings: GraphSettings, path: Path) -> None:
        """Link all keys and write the graph; temporarily needs a copy of the keys in memory."""
        built = faiss.IndexHNSWSQ(flat.keys.shape[1], _HALVES, settings.neighbors, faiss.METRIC_L2)
        built.hnsw.efConstruction = settings.ef_construction
        halves = flat.keys.view(np.float16)
        built.train(halves[:1].astype(np.float32))
        for first in range(0, len(flat), _GRAPH_BLOCK):
            built.add(halves[first : first + _GRAPH_BLOCK].astype(np.float32))
        faiss.write_index(built, str(path), faiss.IO_FLAG_SKIP_STORAGE)

    @classmethod
    def load(cls, path: Path, flat: FlatKeys, settings: GraphSettings) -> GraphKeys:
        """Open what :meth:`build` wrote; the graph is mapped, not read.

        Raises:
            InputError: the file is not a graph of these keys.
        """
        return cls(read_faiss("graph", path, faiss.IO_FLAG_MMAP_IFC), flat, settings)

    def search(self, queries: Floats, k: int, most: int | None = None) -> list[Neighbours]:
        """See :class:`~specrag.methods.knn_lm.store.index.KeyIndex`; ``most`` is limited to what the walk found."""
        k = check_k(k, len(self.flat))
        checked = checked_queries(queries, self.flat.keys.shape[1])
        candidates = min(max(self.settings.ef_search, k), len(self.flat))
        wanted = max(k, most or k)
        if not len(checked):
            return []
        parameters = faiss.SearchParametersHNSW(efSearch=candidates)
        _, walked = self._graph.search(checked, candidates, params=parameters)
        return [
            nearest_of(query, self.flat.keys, ids, wanted)
            if (ids >= 0).all()
            else self.flat.search(query[None], k, most)[0]
            for query, ids in zip(checked, walked, strict=True)
        ]


_CODES_BLOCK = 65_536
_MOST_CELLS = 4096
_POINTS_PER_CELL = 64  # for training; more takes longer and gains little
_FEWEST_POINTS = 10_240  # faiss wants 39 for each of a code byte's 256 values


class QuantisedKeys:
    """Codes of a few bytes in an inverted file of faiss, over a :class:`~specrag.methods.knn_lm.store.index.FlatKeys`.

    faiss chooses its arithmetic by the number of queries, so each query is searched alone; the kernel measures the
    candidates. If the cells read hold too few, exact search takes their place.

    Args:
        codes: faiss's index.
        flat: the same keys.
        settings: those that it was built with.

    Raises:
        InputError: the codes do not belong to these keys.
    """

    def __init__(self, codes: Any, flat: FlatKeys, settings: QuantiserSettings) -> None:
        if (codes.ntotal, codes.d) != flat.keys.shape:
            shape = [codes.ntotal, codes.d]
            raise InputError("codes", shape, f"build them for these keys: {list(flat.keys.shape)}")
        self.flat = flat
        self.settings = settings
        self._codes = codes

    @classmethod
    def build(cls, flat: FlatKeys, settings: QuantiserSettings, path: Path) -> None:
        """Train with a sample of the keys, encode all, and write the codes.

        Raises:
            InputError: there are too few keys to train with.
        """
        count, dimension = flat.keys.shape
        check_size(settings, count)
        cells = settings.cells or min(_MOST_CELLS, int(4 * np.sqrt(count)))
        cells = min(cells, count // _POINTS_PER_CELL)
        pieces = max(size for size in range(1, settings.code_bytes + 1) if dimension % size == 0)
        coarse = faiss.IndexFlatL2(dimension)
        codes = faiss.IndexIVFPQ(coarse, dimension, cells, pieces, 8)
        codes.cp.max_points_per_centroid = _POINTS_PER_CELL
        halves = flat.keys.view(np.float16)
        sample = np.linspace(0, count - 1, min(count, max(_FEWEST_POINTS, _POINTS_PER_CELL * cells))).astype(
            np.int64
        )
        codes.train(halves[sample].astype(np.float32))
        for first in range(0, count, _CODES_BLOCK):
            codes.add(halves[first : first + _CODES_BLOCK].astype(np.float32))
        faiss.write_index(codes, str(path))

    @classmethod
    def load(cls, path: Path, flat: FlatKeys, settings: QuantiserSettings) -> QuantisedKeys:
        """Open what :meth:`build` wrote.

        Raises:
            InputError: the file does not hold codes of these keys.
        """
        return cls(read_faiss("pq", path), flat, settings)

    def search(self, queries: Floats, k: int, most: int | None = None) -> list[Neighbours]:
        """See :class:`~specrag.methods.knn_lm.store.index.KeyIndex`; ``most`` is limited to the candidates."""
        k = check_k(k, len(self.flat))
        checked = checked_queries(queries, self.flat.keys.shape[1])
        return [self._search_one(query, k, most) for query in checked]

    def _search_one(self, query: Floats, k: int, most: int | None) -> Neighbours:
        parameters = faiss.SearchParametersIVF(nprobe=min(self.settings.probes, self._codes.nlist))
        wanted = min(self.settings.candidates * k, len(self.flat))
        _, proposed = self._codes.search(query[None], wanted, params=parameters)
        candidates = proposed[0][proposed[0] >= 0]
        if len(candidates) < k:
            return self.flat.search(query[None], k, most)[0]
        return nearest_of(query, self.flat.keys, candidates, max(k, most or k))
