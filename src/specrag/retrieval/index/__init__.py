"""Indexes over passages: exact, graph, BM25 and hybrid search, all scored by one kernel."""

from typing import TYPE_CHECKING

from specrag.lazy import lazy_names

if TYPE_CHECKING:
    from specrag.retrieval.index.base import Index, Query, Ranking, norms
    from specrag.retrieval.index.bm25 import BM25Index, BM25Settings
    from specrag.retrieval.index.cache import CAPACITY, SpeculativeCache
    from specrag.retrieval.index.filters import Filter, Where, read_filter
    from specrag.retrieval.index.hnsw import HnswSettings, read_faiss, share_storage
    from specrag.retrieval.index.scoring import (
        LONGEST,
        UNIT_ROUNDOFF,
        Bools,
        Doubles,
        Floats,
        Longs,
        dense_scores,
        hybrid_scores,
        inner_products,
    )
else:
    __getattr__ = lazy_names(__name__)

__all__ = [
    "CAPACITY",
    "LONGEST",
    "UNIT_ROUNDOFF",
    "BM25Index",
    "BM25Settings",
    "Bools",
    "Doubles",
    "Filter",
    "Floats",
    "HnswSettings",
    "Index",
    "Longs",
    "Query",
    "Ranking",
    "SpeculativeCache",
    "Where",
    "dense_scores",
    "hybrid_scores",
    "inner_products",
    "norms",
    "read_faiss",
    "read_filter",
    "share_storage",
]
