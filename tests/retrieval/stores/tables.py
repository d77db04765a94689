"""Collections of made-up passages for PostgreSQL, and what is compared of searches."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import psycopg

from specrag.retrieval.index.base import Query, Ranking
from specrag.retrieval.index.hnsw import HnswSettings
from specrag.retrieval.index.scoring import Floats
from specrag.retrieval.manifest import EncoderRecord
from specrag.retrieval.passage import Passage
from specrag.retrieval.progress import Reporter
from specrag.retrieval.stores.base import Collection, Limits, Loading, StoreInfo
from specrag.retrieval.stores.pgvector.store import DEFAULT_TABLE, PgVectorStore, table_address
from specrag.retrieval.stores.retriever import StoreRetriever


def passage(id: int) -> Passage:
    """A passage that tells its number everywhere."""
    return Passage(id, f"source {id}", f"title {id}", f"line {id}", f"text {id}", {"number": id})


def collection(vectors: Floats, first: int = 0) -> Collection:
    """Passages with these vectors, numbered from ``first`` on."""
    record = EncoderRecord("made-up", "fp32", "0123456789abcdef", vectors.shape[1])
    ids = np.arange(first, first + len(vectors), dtype=np.int64)
    return Collection(ids, lambda ids: vectors[ids - first], lambda ids: [passage(id) for id in ids], record)


def load(
    url: str,
    loaded: Collection,
    table: Any = DEFAULT_TABLE,
    *,
    hnsw: HnswSettings | None = None,
    replace: bool = False,
    progress: Reporter = lambda _: None,
) -> StoreInfo:
    """Load a table of PostgreSQL."""
    return PgVectorStore.load(
        table_address(url, table), loaded, Loading(replace=replace, progress=progress), hnsw
    )


def open_table(
    url: str | None, table: Any = DEFAULT_TABLE, *, connection: Limits | None = None, **options: Any
) -> StoreRetriever:
    """Open a table of PostgreSQL for searching."""
    if "ef_search" in options:
        options["breadth"] = options.pop("ef_search")
    store = PgVectorStore.open(table_address(url, table), connection)
    try:
        return StoreRetriever(store, **options)
    except BaseException:
        store.close()
        raise


def random_vectors(count: int, dimension: int, seed: int = 0) -> Floats:
    """Vectors that are all different."""
    return np.random.default_rng(seed).standard_normal((count, dimension)).astype(np.float32)


def near_ties(rng: np.random.Generator, count: int, dimension: int) -> Floats:
    """Vectors with the same elements in other places, large ones that cancel each other among them.

    All have the same inner product with a vector of ones, but a sum in float32 finds a different one for most.
    """
    elements = rng.standard_normal(dimension)
    elements[: dimension // 2] *= 1000
    elements[dimension // 2 : 2 * (dimension // 2)] = -elements[: dimension // 2] * (1 + 2e-4)
    return np.stack([rng.permutation(elements) for _ in range(count)]).astype(np.float32)


def questions(vectors: Floats) -> list[Query]:
    """Queries with these vectors."""
    return [Query("made up", vector) for vector in vectors]


def same(first: Sequence[Ranking], second: Sequence[Ranking]) -> bool:
    """Equal ids, and scores equal to the bit."""
    return len(first) == len(second) and all(
        a.ids.tolist() == b.ids.tolist() and a.scores.tobytes() == b.scores.tobytes()
        for a, b in zip(first, second, strict=True)
    )


@contextmanager
def connected(url: str) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
    """A connection of the test's own, which may break."""
    with closing(psycopg.connect(url, autocommit=True)) as connection:
        yield connection


def wait_for(url: str, condition: str, *parameters: object) -> Any:
    """Ask until a query gives a row; its first value."""
    end = time.monotonic() + 30
    with connected(url) as connection:
        while time.monotonic() < end:
            row = connection.execute(condition.encode(), parameters).fetchone()
            if row is not None:
                return row[0]
            time.sleep(0.01)
    raise AssertionError(f"never happened: {condition}")


def leftovers(url: str) -> int:
    """Tables that a load has made and not put in place."""
    with connected(url) as connection:
        row = connection.execute(
            "SELECT count(*) FROM pg_class WHERE relkind = 'r' AND relname ~ '^specrag_[0-9a-f]{32}$'"
        ).fetchone()
    assert row is not None
    return int(row[0])
