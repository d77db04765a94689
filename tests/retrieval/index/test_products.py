"""Inner products against float64, for every way that vectors and queries divide into fours and twos."""

from __future__ import annotations

import numpy as np
import pytest

from specrag.retrieval.index.base import norms
from specrag.retrieval.index.scoring import dense_slack, inner_products


@pytest.mark.parametrize("dimension", [1, 3, 16, 77, 384])
def test_every_pair_within_the_bound(dimension: int) -> None:
    random = np.random.default_rng(dimension)
    for rows in range(10):
        for count in range(1, 11):
            vectors = random.standard_normal((rows, dimension), dtype=np.float32) * np.float32(1e3)
            queries = random.standard_normal((count, dimension), dtype=np.float32)
            out = np.full((rows, count), np.nan, dtype=np.float32)
            inner_products(vectors, queries, out)
            exact = vectors.astype(np.float64) @ queries.astype(np.float64).T
            longest = float(norms(vectors).max()) if rows else 0.0
            assert (np.abs(out - exact) <= dense_slack(norms(queries), longest, dimension)).all()
