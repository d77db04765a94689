"""A knowledge base in PostgreSQL, for those who search knowledge bases of either kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specrag.errors import InputError
from specrag.retrieval.knowledge_base import RERANKED, check_k, rerank
from specrag.retrieval.passage import Hit

if TYPE_CHECKING:
    from specrag.retrieval.pgvector import PgVectorStore
    from specrag.retrieval.reranker import Reranker
    from specrag.serving.settings import Table


class TableBase:
    """A table of PostgreSQL as a :class:`~specrag.methods.retriever.Retriever`.

    Args:
        store: the table.
    """

    def __init__(self, store: PgVectorStore) -> None:
        self.store = store

    def __len__(self) -> int:
        return len(self.store)

    def search(
        self,
        queries: Sequence[str],
        k: int = 5,
        *,
        index: str = "hybrid",  # noqa: ARG002 - a table is searched by the one that it was opened for
        where: Mapping[str, Any] | None = None,
        reranker: Reranker | None = None,
    ) -> list[list[Hit]]:
        """The best passages for each question, best first.

        Raises:
            InputError: there are conditions; they are set when a table is opened.
            StoreUnavailable: the database does not answer.
        """
        if where:
            raise InputError("where", where, "a table of PostgreSQL is searched without conditions here")
        check_k(k, len(self))
        fetched = k if reranker is None else min(max(k, RERANKED), len(self))
        found = []
        for query, ranking in zip(
            queries, self.store.search(self.store.encode(queries), fetched), strict=True
        ):
            passages = self.store.passages(ranking.ids.tolist())
            hits = [
                Hit(passage, score) for passage, score in zip(passages, ranking.scores.tolist(), strict=True)
            ]
            found.append(hits if reranker is None else rerank(reranker, query, hits)[:k])
        return found

    def close(self) -> None:
        """Let the connections go."""
        self.store.close()


def open_table(table: Table) -> TableBase:
    """Connect to a table.

    Raises:
        StoreUnavailable: the database cannot be reached.
        KnowledgeBaseError: the table is none of specrag's.
    """
    from specrag.retrieval.pgvector import PgVectorStore  # needs specrag[stores]

    return TableBase(PgVectorStore.open(table.url.get_secret_value(), table.table, index=table.index))
