"""Approximate search of a large kNN-LM datastore: product-quantised keys propose, half-precision keys decide."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import faiss
import numpy as np

from specrag.errors import InputError
from specrag.retrieval.knn_flat import FlatKeys
from specrag.retrieval.knn_index import (
    Neighbours,
    QuantiserSettings,
    check_k,
    check_size,
    checked_queries,
    nearest_of,
)
from specrag.retrieval.scoring import Floats

_BLOCK = 65_536
_MOST_CELLS = 4096
_POINTS_PER_CELL = 64  # to train with; more takes longer and gains little
_FEWEST_POINTS = 10_240  # faiss wants 39 for each of a code byte's 256 values


class QuantisedKeys:
    """Codes of a few bytes in an inverted file of faiss, over a :class:`~specrag.retrieval.knn_flat.FlatKeys`.

    faiss chooses its arithmetic by the number of queries, so that each is asked alone; the kernel measures the
    candidates. Where the cells read hold too few, exact search takes their place.

    Args:
        codes: faiss's index.
        flat: the same keys.
        settings: as it was built.

    Raises:
        InputError: the codes are not those of these keys.
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
        for first in range(0, count, _BLOCK):
            codes.add(halves[first : first + _BLOCK].astype(np.float32))
        faiss.write_index(codes, str(path))

    @classmethod
    def load(cls, path: Path, flat: FlatKeys, settings: QuantiserSettings) -> QuantisedKeys:
        """Open what :meth:`build` wrote.

        Raises:
            InputError: the file does not hold codes of these keys.
        """
        try:
            codes = faiss.read_index(str(path))
        except RuntimeError as error:
            raise InputError("pq", str(path), "build the index again: faiss cannot read the file") from error
        return cls(codes, flat, settings)

    def search(self, queries: Floats, k: int, most: int | None = None) -> list[Neighbours]:
        """See :class:`~specrag.retrieval.knn_index.KeyIndex`; ``most`` brings no more than the candidates."""
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
