"""A knowledge base in PostgreSQL with pgvector, with the same protocol as local indexes.

Exact search gives, bit for bit, what :class:`~specrag.retrieval.index.flat.FlatIndex` gives for the same vectors, and a
batch what single searches give. Passages that a search has returned stay in memory for a while, with their vectors:
scoring and reading them takes no round trip.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np

from specrag.errors import InputError
from specrag.retrieval.index.base import Query, Ranking, checked_ids, checked_k, checked_mask, query_vectors
from specrag.retrieval.index.filters import Where, check_fields, read_filter
from specrag.retrieval.index.hnsw import HnswSettings
from specrag.retrieval.index.scoring import Bools, Floats, Longs, dense_scores
from specrag.retrieval.knowledge_base import KnowledgeBase, check_queries
from specrag.retrieval.passage import Passage
from specrag.retrieval.progress import Reporter
from specrag.retrieval.stores.pgvector.connection import ConnectionSettings, Database, database_url
from specrag.retrieval.stores.pgvector.search import TableSearch
from specrag.retrieval.stores.pgvector.table import (
    DEFAULT_TABLE,
    Collection,
    FoundStore,
    StoreRecord,
    check_encoder,
    check_index,
    check_table,
    check_walk,
    find_store,
    load,
)
from specrag.retrieval.stores.seen_passages import SeenPassages

if TYPE_CHECKING:
    from specrag.retrieval.encoder.encoder import Encoder

REMEMBERED = 8192
"""Passages that a store keeps in memory: those of eight full speculative caches."""


class PgVectorStore:
    """A table of passages, searched by one of its indexes. Made by :meth:`open`; safe to use from several threads.

    A :class:`~specrag.methods.retriever.PassageRetriever`. A request that runs into a transient failure is tried
    again within its time; a table that another load has replaced is noticed, and has to be opened again.

    Args:
        database: where it is.
        table: its name.
        found: what is known of it.
        index: ``flat`` (exact) or ``hnsw``.
        ef_search: candidates of a walk through the HNSW index.
        remembered: passages kept in memory.
        encoder: the table's, if it is loaded already.
    """

    def __init__(
        self,
        database: Database,
        table: str,
        found: FoundStore,
        index: str,
        ef_search: int,
        remembered: int,
        encoder: Encoder | None,
    ) -> None:
        self.table = table
        self.record = found.record
        self.index = index
        self.ef_search = ef_search
        self._database = database
        self._seen = SeenPassages(remembered, self.dimension)
        self._search = TableSearch(database, table, found, self._seen)
        self._encoder = encoder
        self._loading = threading.Lock()
        self._allowed: Bools | None = None

    @staticmethod
    def create(
        url: str | None,
        knowledge_base: KnowledgeBase,
        table: str = DEFAULT_TABLE,
        *,
        hnsw: HnswSettings | None = None,
        replace: bool = False,
        progress: Reporter = lambda _: None,
        connection: ConnectionSettings | None = None,
    ) -> StoreRecord:
        """Load a knowledge base into a table; arguments as of :func:`~specrag.retrieval.stores.pgvector.table.load`."""
        return load(
            url,
            Collection.of(knowledge_base),
            table,
            hnsw=hnsw,
            replace=replace,
            progress=progress,
            connection=connection,
        )

    @classmethod
    def open(
        cls,
        url: str | None,
        table: str = DEFAULT_TABLE,
        *,
        index: str = "flat",
        where: Where | None = None,
        encoder: Encoder | None = None,
        ef_search: int | None = None,
        remembered: int = REMEMBERED,
        connection: ConnectionSettings | None = None,
    ) -> PgVectorStore:
        """Open a table for searching.

        Args:
            url: of the database; None for that of the environment.
            table: made by :meth:`create`.
            index: ``flat`` or ``hnsw``.
            where: only passages that satisfy these conditions are found, as for
                :meth:`KnowledgeBase.search <specrag.retrieval.knowledge_base.KnowledgeBase.search>`.
            encoder: used in place of loading the one that the table names.
            ef_search: candidates of a walk through the HNSW index, and the most passages of a search; by default
                as it was built.
            remembered: passages kept in memory with their vectors; see
                :class:`~specrag.retrieval.stores.seen_passages.SeenPassages`.
            connection: time limits, retries, connections.

        Raises:
            InputError: a value cannot be used, or no passage satisfies the conditions.
            StoreUnavailable: the database cannot be reached.
            KnowledgeBaseError: the table is not there, is none of specrag's, lacks the index, or does not fit the
                encoder.
        """
        check_index(index)
        if ef_search is not None:
            check_walk(ef_search)
        database = Database(database_url(url), check_table(table), connection or ConnectionSettings())
        with database.connect() as own:
            found = find_store(own, table, database.place, index)
        if encoder is not None:
            check_encoder(encoder, found.record, database.place)
        built = found.record.hnsw or HnswSettings()
        store = cls(database, table, found, index, ef_search or built.ef_search, remembered, encoder)
        database.open()
        try:
            store._allowed = store.allowed(where)
            if store._allowed is not None and not store._allowed.any():
                raise InputError("where", where, "no passage satisfies it; widen the conditions")
        except BaseException:
            store.close()
            raise
        return store

    def close(self) -> None:
        """Close all connections. Nothing can be searched afterwards."""
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        """Number of passages that a search can find."""
        return self.record.passages if self._allowed is None else int(np.count_nonzero(self._allowed))

    @property
    def dimension(self) -> int:
        """Elements of a vector."""
        return self.record.encoder.dimension

    # -- questions ------------------------------------------------------------------------------------------

    def encoder(self) -> Encoder:
        """The encoder that made the vectors, loaded on first use.

        Raises:
            KnowledgeBaseError: the one of this name is another now.
        """
        with self._loading:
            if self._encoder is None:
                from specrag.retrieval.encoder.encoder import load_encoder  # it imports torch

                made = self.record.encoder
                encoder = load_encoder(made.name, dtype=made.dtype)
                check_encoder(encoder, self.record, self._database.place)
                self._encoder = encoder
            return self._encoder

    def encode(self, texts: Sequence[str]) -> list[Query]:
        """Questions in the form that :meth:`search` takes, each encoded alone.

        Raises:
            InputError: a question is empty.
        """
        check_queries(texts)
        vectors: Sequence[Floats] = list(self.encoder().encode_queries(texts)) if texts else []
        return [Query(text, vector) for text, vector in zip(texts, vectors, strict=True)]

    def allowed(self, where: Where | None) -> Bools | None:
        """The passages that satisfy every condition, bool [passages]; None if there is no condition.

        Reads all rows of the table; ask once for several searches.

        Raises:
            InputError: a field does not exist, an operator is unknown, or a value cannot be compared.
        """
        filter = read_filter(where)
        if filter is None:
            return None
        check_fields(filter, self.record.fields)
        return self._search.allowed(filter)

    # -- searching ------------------------------------------------------------------------------------------

    def search(self, queries: Sequence[Query], k: int, allowed: Bools | None = None) -> list[Ranking]:
        """The best passages by inner product; see :class:`~specrag.retrieval.index.base.Index`.

        One round trip for all queries, as a rule; another one for those of which the database had more near ties
        than it sent, or whose walk found too little. With conditions the search is exact: pgvector's walk applies
        them only to what it has found.

        Raises:
            InputError: a query lacks its vector; ``k`` is above ``ef_search`` in an HNSW index.
            StoreUnavailable: the database did not answer.
            KnowledgeBaseError: the table has been replaced since it was opened.
        """
        if self._allowed is not None:
            allowed = self._allowed if allowed is None else self._allowed & allowed
        mask = checked_mask(allowed, self.record.passages)
        k = checked_k(k, self.record.passages)
        vectors = query_vectors(queries, self.dimension)
        if not len(vectors):
            return []
        if self.index == "flat" or mask is not None:
            return self._search.exact(vectors, k, mask)
        if k > self.ef_search:
            remedy = (
                f"a walk keeps {self.ef_search} candidates: open the table with ef_search of at least {k}"
            )
            raise InputError("k", k, remedy)
        return self._search.walk(vectors, k, self.ef_search)

    # -- passages -------------------------------------------------------------------------------------------

    def score(self, queries: Sequence[Query], passage_ids: Longs) -> Floats:
        """Inner products by the kernel, float32 [queries, ids given]; no round trip for passages seen lately.

        Raises:
            InputError: as for :meth:`search`; an id is not that of a passage.
            StoreUnavailable: the database did not answer.
        """
        ids = checked_ids(passage_ids, self.record.passages)
        vectors = query_vectors(queries, self.dimension)
        matrix = np.empty((len(ids), self.dimension), dtype=np.float32)
        known = self._seen.vectors(ids, matrix)
        if not known.all():
            found = self._search.fetch(ids[~known].tolist())
            for place in np.flatnonzero(~known).tolist():
                matrix[place] = found[int(ids[place])].vector
        scores = np.empty((len(vectors), len(ids)), dtype=np.float32)
        rows = np.arange(len(ids))
        for place, vector in enumerate(vectors):
            dense_scores(vector, matrix, rows, scores[place])
        return scores

    def passages(self, ids: Sequence[int]) -> list[Passage]:
        """These passages, in the order given; no round trip for those seen lately.

        Raises:
            InputError: there is no passage of this number.
            StoreUnavailable: the database did not answer.
        """
        wanted = checked_ids(np.array(ids, dtype=np.int64), self.record.passages).tolist()
        seen = self._seen.passages(wanted)
        missing = [id for id, passage in zip(wanted, seen, strict=True) if passage is None]
        found = self._search.fetch(missing) if missing else {}
        return [
            found[id].passage if passage is None else passage
            for id, passage in zip(wanted, seen, strict=True)
        ]
