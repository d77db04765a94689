"""Search a store, which takes vectors, with questions in words."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specrag.errors import InputError
from specrag.retrieval.index.filters import Filter, Where, read_filter
from specrag.retrieval.knowledge_base import RERANKED, check_k, rerank
from specrag.retrieval.passage import Hit
from specrag.retrieval.stores.base import Closing

if TYPE_CHECKING:
    from specrag.retrieval.encoder.reranker import Reranker
    from specrag.retrieval.stores.registry import Opened

_NARROWED = 16  # the most conditions whose narrowed store is kept


class QuestionSearch(Closing):
    """A store as a :class:`~specrag.methods.retriever.Retriever`.

    Args:
        store: searched with the index that it was opened with; closed along with this object.
    """

    def __init__(self, store: Opened) -> None:
        self.store = store
        self._narrowed: dict[Filter, Any] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.store)

    def narrowed(self, where: Where | None) -> Any:
        """The store, restricted by conditions.

        Raises:
            InputError: a value cannot be used, or no passage satisfies the conditions.
        """
        filter = read_filter(where)
        if filter is None:
            return self.store
        with self._lock:
            known = self._narrowed.get(filter)
        if known is None:
            if not hasattr(self.store, "narrowed"):
                raise InputError("where", where, "this one takes conditions when it is opened")
            known = self.store.narrowed(filter)
            with self._lock:
                if len(self._narrowed) >= _NARROWED:
                    self._narrowed.clear()
                self._narrowed[filter] = known
        return known

    def missing_since(self, moment: float) -> tuple[str, ...]:
        """Shards that have failed to answer since a given ``time.monotonic()`` value."""
        found = getattr(self.store, "missing_since", None)
        return () if found is None else tuple(found(moment))

    def search(
        self,
        queries: Sequence[str],
        k: int = 5,
        *,
        index: str = "hybrid",  # noqa: ARG002 - a store is searched by the one that it was opened for
        where: Where | None = None,
        reranker: Reranker | None = None,
    ) -> list[list[Hit]]:
        """The best passages for each question, best first.

        Raises:
            InputError: ``k`` or a condition cannot be used.
            StoreUnavailable: the database does not answer.
        """
        check_k(k, len(self))
        store = self.narrowed(where)
        fetched = k if reranker is None else min(max(k, RERANKED), len(self))
        found = []
        for query, ranking in zip(queries, store.search(store.encode(queries), fetched), strict=True):
            passages = store.passages(ranking.ids.tolist())
            scores = ranking.scores.tolist()
            hits = [Hit(passage, score) for passage, score in zip(passages, scores, strict=True)]
            found.append(hits if reranker is None else rerank(reranker, query, hits)[:k])
        return found

    def close(self) -> None:
        """Close the store."""
        self.store.close()
