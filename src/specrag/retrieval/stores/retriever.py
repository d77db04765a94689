"""Search a store exactly: its candidates are ranked by the kernel in ``scoring.py``.

A database sums inner products in float32 and in its own order, so its ranking is right except for passages whose scores
lie within a rounding error of each other. It is asked for a few more candidates than wanted, and for still more as long
as one that it left out might be among the best.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from specrag.checks import check_whole
from specrag.errors import InputError
from specrag.retrieval.encoder.loaded import Encoders
from specrag.retrieval.index.base import Query, Ranking, best_of, checked_k, norms, query_vectors
from specrag.retrieval.index.filters import Filter, Where, all_of, check_fields, matches, read_filter
from specrag.retrieval.index.scoring import Floats, Longs, dense_scores, dense_slack
from specrag.retrieval.manifest import KnowledgeBaseError
from specrag.retrieval.passage import Passage
from specrag.retrieval.stores.base import Closing, Fetched, Found, Store, StoreInfo, field_values
from specrag.retrieval.stores.seen_passages import SeenPassages

if TYPE_CHECKING:
    from specrag.retrieval.encoder.encoder import Encoder

REMEMBERED = 8192
"""Passages kept in memory: as many as eight full speculative caches hold."""

#: How many more candidates than k are asked for at first, and the factor by which to ask for more if they do not do.
NEAR_TIES, MORE = 8, 4


class StoreRetriever(Closing):
    """A :class:`~specrag.methods.retriever.PassageRetriever` over a store. Safe to use from several threads.

    Passages that a search has returned stay in memory for a while, with their vectors: scoring and reading them takes
    no round trip. If others have changed the store, open it again.

    Args:
        store: the store; closed along with this object.
        index: ``flat`` (exact) or ``hnsw`` (approximate).
        where: find only passages that satisfy these conditions; searches with conditions are exact.
        breadth: candidates of an approximate search, and the most passages that it returns; by default the store's.
        remembered: the most passages kept in memory.
        encoder: the store's encoder, if it is loaded already, or a collection to get it from.
        record: what is known about the store; by default the store is asked.

    Raises:
        InputError: a value cannot be used, or no passage satisfies the conditions.
        StoreUnavailable: the store does not answer.
        KnowledgeBaseError: it lacks the index, or does not fit the encoder.
    """

    def __init__(
        self,
        store: Store,
        *,
        index: str = "flat",
        where: Where | None = None,
        breadth: int | None = None,
        remembered: int = REMEMBERED,
        encoder: Encoder | Encoders | None = None,
        record: StoreInfo | None = None,
    ) -> None:
        self.store = store
        self.index_name = index
        self._where = where
        self.record = store.info() if record is None else record
        self._filter = read_filter(where)
        self._encoders = encoder if isinstance(encoder, Encoders) else Encoders()
        self._encoder = None if isinstance(encoder, Encoders) else encoder
        self._loading = threading.Lock()
        self._breadth = self._checked_breadth(index, breadth)
        self._seen = SeenPassages(remembered, self.dimension)
        if self._encoder is not None:
            check_encoder(self._encoder, self.record, store.place)
        if self._filter is not None:
            check_fields(self._filter, self.record.fields)
            if not self._finds_any():
                raise InputError("where", where, "no passage satisfies it; widen the conditions")

    def _checked_breadth(self, index: str, breadth: int | None) -> int | None:
        if breadth is not None:
            check_whole("breadth", breadth)
        if index == "flat":
            return None
        if index != "hnsw":
            raise InputError("index", index, "a store has flat and hnsw")
        if self.record.breadth is None:
            raise KnowledgeBaseError(
                f"{self.store.place} has no HNSW index: search it exactly (flat), or load it again with one"
            )
        return self.record.breadth if breadth is None else breadth

    def narrowed(self, where: Where) -> StoreRetriever:
        """A retriever over the same store with further conditions.

        Raises:
            InputError: a value cannot be used, or no passage satisfies the conditions.
        """
        return StoreRetriever(
            self.store,
            index=self.index_name,
            where=all_of([self._where, where]),
            breadth=self._breadth,
            remembered=self._seen.capacity,
            encoder=self._encoder or self._encoders,
            record=self.record,
        )

    def _finds_any(self) -> bool:
        """Whether a passage satisfies the conditions."""
        most = 1
        while True:
            (found,) = self.store.search(np.zeros((1, self.dimension), np.float32), most, self._filter)
            if _allowed(found.passages, self._filter) or found.rest == -np.inf:
                return bool(_allowed(found.passages, self._filter))
            most *= MORE

    def close(self) -> None:
        """Close the store's connections. No search is possible afterwards."""
        self.store.close()

    def __len__(self) -> int:
        """Number of passages, including those excluded by conditions."""
        return self.record.passages

    @property
    def dimension(self) -> int:
        """Number of elements of a vector."""
        return self.record.encoder.dimension

    # -- questions ------------------------------------------------------------------------------------------

    def encoder(self) -> Encoder:
        """The encoder that made the vectors, loaded on first use.

        Raises:
            KnowledgeBaseError: the encoder with this name is a different one now.
        """
        with self._loading:
            if self._encoder is None:
                made = self.record.encoder
                encoder = self._encoders.encoder(made.name, made.dtype)
                check_encoder(encoder, self.record, self.store.place)
                self._encoder = encoder
            return self._encoder

    def encode(self, texts: Sequence[str]) -> list[Query]:
        """Encode questions for :meth:`search`, each alone.

        Raises:
            InputError: a question is empty.
        """
        from specrag.retrieval.knowledge_base import check_queries

        check_queries(texts)
        vectors: Sequence[Floats] = list(self.encoder().encode_queries(texts)) if texts else []
        return [Query(text, vector) for text, vector in zip(texts, vectors, strict=True)]

    # -- searching ------------------------------------------------------------------------------------------

    def search(self, queries: Sequence[Query], k: int) -> list[Ranking]:
        """The best passages by inner product; a batch gives bit for bit the same results as single queries.

        Usually this takes one request for all queries, and another one for those with more near ties than the store
        has sent.

        Raises:
            InputError: a query lacks its vector, or ``k`` is above the breadth of an approximate search.
            StoreUnavailable: the store did not answer.
            KnowledgeBaseError: it is gone, or has been replaced since it was opened.
        """
        k = checked_k(k, max(self.record.passages, 1))
        vectors = query_vectors(queries, self.dimension)
        if self._breadth is not None and self._filter is None and k > self._breadth:
            remedy = f"a walk keeps {self._breadth} candidates: open it with a breadth of at least {k}"
            raise InputError("k", k, remedy)
        return [
            _rank(query, found, k) for query, found in zip(vectors, self._candidates(vectors, k), strict=True)
        ]

    def _candidates(self, vectors: Floats, k: int) -> list[Sequence[Fetched]]:
        """For each query, passages that include its best ``k``."""
        found: list[Sequence[Fetched]] = [()] * len(vectors)
        open_: list[int] = list(range(len(vectors)))
        slacks = dense_slack(norms(vectors), self.record.longest, self.dimension)
        most = k + NEAR_TIES
        breadth = None if self._filter is not None else self._breadth
        while open_:
            asked = vectors[open_]
            limit = most if breadth is None else min(most, breadth)
            answers = self.store.search(asked, limit, self._filter, breadth)
            self._seen.add([one for answer in answers for one in answer.passages])
            later = []
            for place, answer in zip(open_, answers, strict=True):
                found[place] = _allowed(answer.passages, self._filter)
                whole = breadth is not None and limit == breadth
                if not whole and _may_miss(vectors[place], found[place], answer, k, slacks[place]):
                    later.append(place)
            open_, most = later, most * MORE
        return found

    # -- passages -------------------------------------------------------------------------------------------

    def score(self, queries: Sequence[Query], passage_ids: Longs) -> Floats:
        """Inner products by the kernel, float32 [queries, ids given]; no round trip for passages seen recently.

        Raises:
            InputError: as for :meth:`search`, or there is no passage with one of these ids.
            StoreUnavailable: the store did not answer.
        """
        ids = _checked_ids(passage_ids)
        vectors = query_vectors(queries, self.dimension)
        matrix = np.empty((len(ids), self.dimension), dtype=np.float32)
        known = self._seen.vectors(ids, matrix)
        if not known.all():
            found = self._fetch(ids[~known].tolist())
            for place in np.flatnonzero(~known).tolist():
                matrix[place] = found[int(ids[place])].vector
        scores = np.empty((len(vectors), len(ids)), dtype=np.float32)
        rows = np.arange(len(ids))
        for place, vector in enumerate(vectors):
            dense_scores(vector, matrix, rows, scores[place])
        return scores

    def passages(self, ids: Sequence[int]) -> list[Passage]:
        """These passages, in the order given; no round trip for those seen recently.

        Raises:
            InputError: there is no passage with one of these ids.
            StoreUnavailable: the store did not answer.
        """
        wanted = _checked_ids(np.array(ids, dtype=np.int64)).tolist()
        seen = self._seen.passages(wanted)
        missing = [id for id, passage in zip(wanted, seen, strict=True) if passage is None]
        found = self._fetch(missing) if missing else {}
        return [
            found[id].passage if passage is None else passage
            for id, passage in zip(wanted, seen, strict=True)
        ]

    def _fetch(self, ids: Sequence[int]) -> dict[int, Fetched]:
        fetched = self.store.fetch(list(dict.fromkeys(ids)))
        self._seen.add(fetched)
        found = {one.passage.id: one for one in fetched}
        for id in ids:
            if id not in found:
                raise InputError("passage id", id, f"{self.store.place} has no such passage")
        return found

    # -- changes --------------------------------------------------------------------------------------------

    def add(self, passages: Sequence[Passage], vectors: Floats) -> None:
        """Add passages, replacing those with the same ids; see :meth:`Store.add`."""
        self.store.add(passages, vectors)
        self._refresh()

    def remove(self, ids: Sequence[int]) -> None:
        """Remove passages; unknown ids are ignored."""
        self.store.remove(ids)
        self._refresh()

    def _refresh(self) -> None:
        self.record = self.store.info()
        self._seen = SeenPassages(self._seen.capacity, self.dimension)


def _allowed(passages: Sequence[Fetched], filter: Filter | None) -> Sequence[Fetched]:
    """The passages that satisfy a filter, which a store may have applied only in part."""
    if filter is None:
        return passages
    return [one for one in passages if matches(filter, field_values(one.passage))]


def _may_miss(query: Floats, found: Sequence[Fetched], answer: Found, k: int, slack: float) -> bool:
    """Whether a passage that the store left out may be among the best ``k``."""
    if answer.rest == -np.inf:
        return False
    if len(found) < k:
        return True
    return answer.rest + slack >= float(_rank(query, found, k).scores[-1])


def _rank(query: Floats, found: Sequence[Fetched], k: int) -> Ranking:
    """The best ``k`` by the kernel's scores."""
    if not found:
        return Ranking(ids=np.empty(0, dtype=np.int64), scores=np.empty(0, dtype=np.float32))
    matrix = np.stack([one.vector for one in found])
    scores = np.empty(len(found), dtype=np.float32)
    dense_scores(query, matrix, np.arange(len(found)), scores)
    return best_of(scores, np.array([one.passage.id for one in found], dtype=np.int64), k)


def _checked_ids(passage_ids: Longs) -> Longs:
    ids = np.asarray(passage_ids)
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise InputError("passage_ids", f"{ids.dtype} {list(ids.shape)}", "give a list of whole numbers")
    return np.ascontiguousarray(ids, dtype=np.int64)


def check_encoder(encoder: Encoder, record: StoreInfo, place: str) -> None:
    """Check that an encoder is the one that made the vectors.

    Raises:
        KnowledgeBaseError: it makes different vectors.
    """
    made = record.encoder
    if encoder.dimension != made.dimension:
        raise KnowledgeBaseError(
            f"encoder: {encoder.name!r} makes vectors of {encoder.dimension} dimensions and {place} holds "
            f"{made.dimension}: use {made.name!r}, or load a knowledge base made with this one"
        )
    if encoder.fingerprint != made.fingerprint:
        raise KnowledgeBaseError(
            f"encoder: {encoder.name!r} ({encoder.fingerprint}) does not fit {place}, made with {made.name!r} "
            f"({made.fingerprint}): use that one, or load a knowledge base made with this one"
        )
