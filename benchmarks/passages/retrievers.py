"""Where the passages suite retrieves: indexes on this machine, larger ones, a database, a store that is slow."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.passages.data import Source
from specrag.bench.suite import BenchContext
from specrag.errors import InputError
from specrag.retrieval.index.base import Query, Ranking
from specrag.retrieval.index.flat import FlatIndex
from specrag.retrieval.index.scoring import Bools, Floats, Longs
from specrag.retrieval.passage import Passage

if TYPE_CHECKING:
    from specrag.methods.retriever import PassageRetriever
    from specrag.retrieval.knowledge_base import KnowledgeBase

EXACT, HNSW, SPARSE, REMOTE = "exact dense", "HNSW", "BM25", "pgvector exact"
_INDEXES = {EXACT: "flat", HNSW: "hnsw", SPARSE: "bm25"}

#: The ``source`` of passages that stand for no text.
SYNTHETIC = "synthetic distractor"

_ROWS = 50_000  # random vectors drawn at a time


def sized(passages: int) -> str:
    """The name of the exact dense index cut to so many passages."""
    return f"{EXACT}, {passages:,} passages"


def enlarged(passages: int) -> str:
    """The name of the exact dense index enlarged to so many passages; it tells how."""
    return f"{sized(passages)} (synthetic distractors)"


class Retrievers:
    """The retrievers by name, each made when it is first needed.

    Args:
        context: of the run; enlarged vectors lie beside its records.
        source: of the knowledge base.
    """

    def __init__(self, context: BenchContext, source: Source) -> None:
        self._work = context.out / ".records"
        self._source = source
        self._made: dict[str, PassageRetriever] = {}
        self._stack = ExitStack()

    def close(self) -> None:
        """Stop the database."""
        self._made.clear()
        self._stack.close()

    def get(self, name: str) -> PassageRetriever:
        """One of :data:`EXACT`, :data:`HNSW`, :data:`SPARSE`, :data:`REMOTE` or :func:`sized` and :func:`enlarged`."""
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def _make(self, name: str) -> PassageRetriever:
        from specrag.retrieval.knowledge_base import SingleIndex

        base = self._source.knowledge_base
        if name in _INDEXES:
            return SingleIndex(base, _INDEXES[name])
        if name == REMOTE:
            return self._remote(base)
        found = re.fullmatch(rf"{EXACT}, ([\d,]+) passages(?: \(synthetic distractors\))?", name)
        if found is None:
            raise InputError("retriever", name, f"take {', '.join(_INDEXES)}, {REMOTE} or {sized(1000)}")
        return SizedDense(base, self._vectors(base, int(found[1].replace(",", ""))))

    def _remote(self, base: KnowledgeBase) -> PassageRetriever:
        from specrag.bench.postgres import PostgresServer
        from specrag.retrieval.stores.registry import load, open_store

        server = self._stack.enter_context(PostgresServer({"shared_buffers": "1GB"}))
        load(server.url, base)
        found = open_store(server.url, encoder=base.encoder())
        self._stack.callback(found.close)
        return found

    def _vectors(self, base: KnowledgeBase, count: int) -> Floats:
        real = _vectors_of(base)
        if count <= len(real):
            return real[:count]
        path = self._work / f"vectors-by-id-{len(real)}-to-{count}.npy"
        if not path.is_file():
            _enlarge(path, real, count)
        vectors: Floats = np.load(path, mmap_mode="r")
        return vectors


def _vectors_of(base: KnowledgeBase) -> Floats:
    return base.vectors(base.ids)


def _enlarge(path: Path, real: Floats, count: int) -> None:
    """Write the real vectors and, behind them, unit vectors of random direction; the file is whole or not there.

    In 384 dimensions the cosine of two random directions has a standard deviation of 0.05: they stay far behind a
    passage that has to do with the question.
    """
    temporary = path.with_name(f".{path.name}")
    vectors = np.lib.format.open_memmap(
        temporary, mode="w+", dtype=np.float32, shape=(count, int(real.shape[1]))
    )
    vectors[: len(real)] = real
    rng = np.random.default_rng(0)
    for start in range(len(real), count, _ROWS):
        shape = (min(_ROWS, count - start), real.shape[1])
        drawn = rng.standard_normal(shape, dtype=np.float32)
        vectors[start : start + shape[0]] = drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
    vectors.flush()
    del vectors
    temporary.replace(path)


class SizedDense:
    """Exact dense search over the first passages of a knowledge base, or over all of them and distractors.

    Args:
        base: the knowledge base.
        vectors: float32 [passages, dimension]; the first are those of the knowledge base by their ids, ascending.
            Here a passage's id is its place among them.
    """

    def __init__(self, base: KnowledgeBase, vectors: Floats) -> None:
        self._base = base
        self.index = FlatIndex.build(vectors)

    def __len__(self) -> int:
        return len(self.index)

    def encode(self, texts: Sequence[str]) -> list[Query]:
        return self._base.encode(texts, "flat")

    def search(self, queries: Sequence[Query], k: int, allowed: Bools | None = None) -> list[Ranking]:
        return self.index.search(queries, k, allowed)

    def score(self, queries: Sequence[Query], passage_ids: Longs) -> Floats:
        return self.index.score(queries, passage_ids)

    def passages(self, ids: Sequence[int]) -> list[Passage]:
        known = self._base.ids
        real = iter(self._base.passages([int(known[id]) for id in ids if id < len(known)]))
        return [
            replace(next(real), id=id) if id < len(known) else Passage(id, SYNTHETIC, "", "", "", {})
            for id in ids
        ]


@contextmanager
def threads_apart(retriever: PassageRetriever) -> Iterator[None]:
    """Inside, passes take half of the processors and an exact search the other half."""
    import torch

    assert isinstance(retriever, SizedDense), "an exact search on this machine"
    model, search = torch.get_num_threads(), retriever.index.threads
    torch.set_num_threads(max(model // 2, 1))
    retriever.index.threads = max(search // 2, 1)
    try:
        yield
    finally:
        torch.set_num_threads(model)
        retriever.index.threads = search


class _Altered:
    """A retriever that does one thing otherwise than another."""

    def __init__(self, retriever: PassageRetriever) -> None:
        self._retriever = retriever

    def __len__(self) -> int:
        return len(self._retriever)

    def encode(self, texts: Sequence[str]) -> list[Query]:
        return self._retriever.encode(texts)

    def search(self, queries: Sequence[Query], k: int) -> list[Ranking]:
        return self._retriever.search(queries, k)

    def score(self, queries: Sequence[Query], passage_ids: Longs) -> Floats:
        return self._retriever.score(queries, passage_ids)

    def passages(self, ids: Sequence[int]) -> list[Passage]:
        return self._retriever.passages(ids)


class Slowed(_Altered):
    """A store that answers every search later, as one behind a network would: simulated.

    Args:
        retriever: that answers.
        seconds: that a search of any number of queries takes longer.
    """

    def __init__(self, retriever: PassageRetriever, seconds: float) -> None:
        super().__init__(retriever)
        self.seconds = seconds

    def search(self, queries: Sequence[Query], k: int) -> list[Ranking]:
        time.sleep(self.seconds)
        return super().search(queries, k)


class Spoiled(_Altered):
    """A retriever from whose scores a cache guesses wrong more often: simulated.

    A search finds what it found before, so that the output stays what it was.

    Args:
        retriever: that answers.
        share: of the calls of :meth:`score` that turn the ranking round, 0 to 1.
    """

    def __init__(self, retriever: PassageRetriever, share: float) -> None:
        super().__init__(retriever)
        self._share = share
        self._rng = random.Random(0)

    def score(self, queries: Sequence[Query], passage_ids: Longs) -> Floats:
        scores = super().score(queries, passage_ids)
        return -scores if self._rng.random() < self._share else scores
