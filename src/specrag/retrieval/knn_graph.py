"""Approximate search of a kNN-LM datastore by a graph in faiss, which reads the half-precision keys where they lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import faiss
import numpy as np

from specrag.errors import InputError
from specrag.retrieval.knn_flat import FlatKeys
from specrag.retrieval.knn_index import GraphSettings, Neighbours, check_k, checked_queries, nearest_of
from specrag.retrieval.scoring import Floats

_HALVES = faiss.ScalarQuantizer.QT_fp16
_BLOCK = 16_384


class GraphKeys:
    """A graph over the keys of a :class:`~specrag.retrieval.knn_flat.FlatKeys`.

    Each query takes its own walk, so that a batch changes nothing, and the kernel measures all candidates. Where a walk
    finds fewer than it should (a graph torn by equal keys) exact search takes its place.

    Args:
        graph: faiss's index, without keys of its own.
        flat: the same keys.
        settings: as the graph was built.

    Raises:
        InputError: the graph is not one of these keys.
    """

    def __init__(self, graph: Any, flat: FlatKeys, settings: GraphSettings) -> None:
        if (graph.ntotal, graph.d) != flat.keys.shape:
            shape = [graph.ntotal, graph.d]
            raise InputError("graph", shape, f"build it for these keys: {list(flat.keys.shape)}")
        self.flat = flat
        self.settings = settings
        self._graph = graph
        self._storage = _shared_storage(flat)  # the graph does not keep it alive
        graph.storage = self._storage
        graph.own_fields = False

    @classmethod
    def build(cls, flat: FlatKeys, settings: GraphSettings, path: Path) -> None:
        """Link all keys and write the graph; needs a copy of the keys in memory meanwhile."""
        built = faiss.IndexHNSWSQ(flat.keys.shape[1], _HALVES, settings.neighbors, faiss.METRIC_L2)
        built.hnsw.efConstruction = settings.ef_construction
        halves = flat.keys.view(np.float16)
        built.train(halves[:1].astype(np.float32))
        for first in range(0, len(flat), _BLOCK):
            built.add(halves[first : first + _BLOCK].astype(np.float32))
        faiss.write_index(built, str(path), faiss.IO_FLAG_SKIP_STORAGE)

    @classmethod
    def load(cls, path: Path, flat: FlatKeys, settings: GraphSettings) -> GraphKeys:
        """Open what :meth:`build` wrote; the graph is mapped, not read.

        Raises:
            InputError: the file is not a graph of these keys.
        """
        try:
            graph = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
        except RuntimeError as error:
            raise InputError(
                "graph", str(path), "build the index again: faiss cannot read the file"
            ) from error
        return cls(graph, flat, settings)

    def search(self, queries: Floats, k: int, most: int | None = None) -> list[Neighbours]:
        """See :class:`~specrag.retrieval.knn_index.KeyIndex`; ``most`` brings no more than the walk has found."""
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


def _shared_storage(flat: FlatKeys) -> Any:
    """An index of faiss that reads these keys where they lie. The caller keeps both alive."""
    nobody = faiss.MaybeOwnedVectorUInt8().owner  # nothing for faiss to free
    address = faiss.cast_integer_to_uint8_ptr(flat.keys.ctypes.data)
    storage = faiss.IndexScalarQuantizer(flat.keys.shape[1], _HALVES, faiss.METRIC_L2)
    storage.codes = faiss.MaybeOwnedVectorUInt8.create_view(address, flat.keys.nbytes, nobody)
    storage.ntotal = len(flat)
    storage.is_trained = True
    return storage
