"""Passages in several places, searched as one: a batch goes to all places in parallel, and the results are merged.

All scores come from the same kernel, so the result is bit for bit that of a single store with all passages.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from specrag.errors import InputError, StoreUnavailable
from specrag.retrieval.index.base import Index, Query, Ranking, Rows, best_of, checked_k
from specrag.retrieval.index.bm25 import BM25Index
from specrag.retrieval.index.filters import Where, all_of
from specrag.retrieval.index.flat import FlatIndex
from specrag.retrieval.index.hybrid import HybridIndex
from specrag.retrieval.index.scoring import Bools, Floats, Longs
from specrag.retrieval.manifest import EncoderRecord, KnowledgeBaseError
from specrag.retrieval.passage import Passage, passage_text
from specrag.retrieval.stores.base import Closing
from specrag.retrieval.stores.retriever import StoreRetriever

if TYPE_CHECKING:
    from specrag.retrieval.knowledge_base import KnowledgeBase, SingleIndex

T = TypeVar("T")

#: Failures remembered for :meth:`ShardedRetriever.missing_since`, and passages whose shard is remembered.
_FAILURES, _HOMES = 4096, 65_536

_AT_ONCE = 1000  # passages read at a time


class ShardedRetriever(Closing):
    """A :class:`~specrag.methods.retriever.PassageRetriever` over several. Safe to use from several threads.

    Passages keep their ids: one that is in two shards is found once.

    Args:
        shards: retrievers over passages with vectors of the same encoder; closed along with this object.
        names: names of the shards, for errors and for :meth:`missing_since`.
        partial: leave out a shard that does not answer, and report it by :meth:`missing_since`; otherwise it is an
            error.
        absent: names of shards that could not be opened.

    Raises:
        InputError: there are no shards.
        KnowledgeBaseError: their vectors come from different encoders.
    """

    def __init__(
        self,
        shards: Sequence[StoreRetriever | SingleIndex],
        names: Sequence[str],
        *,
        partial: bool = False,
        absent: Sequence[str] = (),
    ) -> None:
        if not shards:
            raise InputError("shards", [], "name at least one")
        _check_encoders([_encoder_record(shard) for shard in shards], names)
        self.shards = tuple(shards)
        self.names = tuple(names)
        self.partial = partial
        self.absent = tuple(absent)
        self._active = tuple(range(len(shards)))
        self.remote = any(getattr(shard, "remote", True) for shard in shards)
        self._clock: Callable[[], float] = time.monotonic
        self._pool = ThreadPoolExecutor(max(8, 2 * len(shards)), "specrag-shards")
        self._failures: deque[tuple[float, str]] = deque(maxlen=_FAILURES)
        self._homes: dict[int, int] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Number of passages that a search can find."""
        return sum(len(shard) for shard in self.shards)

    def close(self) -> None:
        """Close all shards."""
        self._pool.shutdown(cancel_futures=True)
        for shard in self.shards:
            if isinstance(shard, StoreRetriever):
                shard.close()
            else:
                shard.knowledge_base.close()

    def narrowed(self, where: Where) -> ShardedRetriever:
        """A retriever over the same shards with conditions; shards in which no passage satisfies them are not asked.

        Raises:
            InputError: a value cannot be used, or no passage satisfies the conditions.
            StoreUnavailable: a shard does not answer; with ``partial``, none of them does.
        """
        refused: list[InputError] = []

        def narrow(number: int) -> StoreRetriever | SingleIndex | None:
            try:
                return _narrowed(self.shards[number], where)
            except InputError as error:
                refused.append(error)
                return None

        answers = self._each(narrow)
        found = {number: shard for number, shard in answers.items() if shard is not None}
        # Every shard refuses, because it lacks a field or has no such passage: raise the first error.
        if not found:
            raise refused[0]
        shards = [found.get(number, shard) for number, shard in enumerate(self.shards)]
        other = ShardedRetriever(shards, self.names, partial=self.partial, absent=self.absent)
        other._active = tuple(found)
        other._failures, other._pool = self._failures, self._pool
        return other

    def missing_since(self, moment: float) -> tuple[str, ...]:
        """The shards that have failed to answer any request since a given ``time.monotonic()`` value."""
        failed = [name for when, name in tuple(self._failures) if when >= moment]
        return tuple(dict.fromkeys([*self.absent, *failed]))

    def encode(self, texts: Sequence[str]) -> list[Query]:
        """Encode questions for :meth:`search`, each alone."""
        return self.shards[0].encode(texts)

    def search(self, queries: Sequence[Query], k: int) -> list[Ranking]:
        """The best passages of all shards; a batch is one request to each shard, in parallel.

        Raises:
            InputError: a query lacks its vector, or ``k`` cannot be used.
            StoreUnavailable: a shard did not answer; with ``partial``, none of them did.
        """
        k = checked_k(k, max(len(self), 1))
        answers = self._each(lambda number: self.shards[number].search(queries, k))
        merged = []
        for place in range(len(queries)):
            parts = [(number, answer[place]) for number, answer in answers.items()]
            merged.append(self._merge(parts, k))
        return merged

    def _merge(self, parts: Sequence[tuple[int, Ranking]], k: int) -> Ranking:
        ids = np.concatenate([ranking.ids for _, ranking in parts])
        scores = np.concatenate([ranking.scores for _, ranking in parts])
        homes = np.concatenate([np.full(len(ranking), number) for number, ranking in parts])
        _, first = np.unique(ids, return_index=True)  # a passage in two shards counts once
        ranking = best_of(scores[first], ids[first], k)
        with self._lock:
            if len(self._homes) > _HOMES:
                self._homes.clear()
            self._homes.update(zip(ids[first].tolist(), homes[first].tolist(), strict=True))
        return ranking

    def score(self, queries: Sequence[Query], passage_ids: Longs) -> Floats:
        """The scores by which :meth:`search` ranks, float32 [queries, ids given].

        Raises:
            InputError: there is no passage with one of these ids.
            StoreUnavailable: a shard that holds one of them does not answer.
        """
        ids = np.asarray(passage_ids, dtype=np.int64)
        scores = np.empty((len(queries), len(ids)), dtype=np.float32)
        homes = self._located(ids.tolist())
        for number in set(homes):
            places = np.flatnonzero(np.array(homes) == number)
            scores[:, places] = self.shards[number].score(queries, ids[places])
        return scores

    def passages(self, ids: Sequence[int]) -> list[Passage]:
        """These passages, in the order given.

        Raises:
            InputError: there is no passage with one of these ids.
            StoreUnavailable: a shard that holds one of them does not answer.
        """
        homes = self._located(ids)
        found: dict[int, Passage] = {}
        for number in set(homes):
            wanted = [id for id, home in zip(ids, homes, strict=True) if home == number]
            found |= zip(wanted, self.shards[number].passages(wanted), strict=True)
        return [found[id] for id in ids]

    def _located(self, ids: Sequence[int]) -> list[int]:
        """The shard of each passage."""
        with self._lock:
            known = {id: self._homes.get(id) for id in ids}
        for id, home in known.items():
            if home is None:
                known[id] = self._look_for(id)
        return [known[id] or 0 for id in ids]

    def _look_for(self, id: int) -> int:
        for number, shard in enumerate(self.shards):
            try:
                shard.passages([id])
            except InputError:
                continue
            return number
        raise InputError("passage id", id, "no shard has such a passage")

    def _each(self, ask: Callable[[int], T]) -> dict[int, T]:
        """Ask all active shards in parallel; returns the answers by shard.

        Raises:
            StoreUnavailable: a shard does not answer; with ``partial``, none of them does.
        """
        asked: dict[int, Future[T]] = {number: self._pool.submit(ask, number) for number in self._active}
        found: dict[int, T] = {}
        failure: StoreUnavailable | None = None
        for number, answer in asked.items():
            try:
                found[number] = answer.result()
            except StoreUnavailable as error:
                self._note(self.names[number])
                failure = StoreUnavailable(f"shard {number + 1} of {len(self.shards)}: {error}")
                failure.__cause__ = error
        if failure is not None and (not self.partial or not found):
            raise failure
        return found

    def _note(self, name: str) -> None:
        self._failures.append((self._clock(), name))


class MergedBases(Closing):
    """Knowledge bases on this machine, searched by words as if they were one. Safe to use from several threads.

    The rarity of a word and the average length of a passage are computed over all of them: when this object is made,
    the words of all passages are indexed together in memory.

    Args:
        bases: open knowledge bases; closed along with this object. A passage that is in two of them is found once.
        name: ``bm25`` or ``hybrid``.
        where: find only passages that satisfy these conditions.

    Raises:
        InputError: no passage satisfies the conditions.
        KnowledgeBaseError: their vectors come from different encoders.
    """

    remote = False

    def __init__(self, bases: Sequence[KnowledgeBase], name: str, where: Where | None = None) -> None:
        _check_encoders([base.manifest.encoder for base in bases], [str(base.folder) for base in bases])
        self.name = name
        self._bases = tuple(bases)
        held = [base.ids for base in bases]
        ids, first = np.unique(np.concatenate(held), return_index=True)
        self._ids: Longs = ids
        self._homes = np.repeat(np.arange(len(bases)), [len(own) for own in held])[first]
        rows = Rows(len(ids), ids)
        self._words = BM25Index.build(
            [passage_text(one.title, one.text) for one in self._everything()], rows=rows
        )
        self._index: Index = self._words
        if name == "hybrid":
            vectors = self._gathered([base.vectors for base in bases])
            self._index = HybridIndex(FlatIndex.build(vectors, rows), self._words)
        self._allowed: Bools | None = None
        if where is not None:
            self._allowed = self._gathered([partial(_allows, base, where) for base in bases])
            if not self._allowed.any():
                raise InputError("where", where, "no passage satisfies it; widen the conditions")

    def _everything(self) -> Iterator[Passage]:
        for first in range(0, len(self._ids), _AT_ONCE):
            yield from self.passages(self._ids[first : first + _AT_ONCE].tolist())

    def _gathered(self, ask: Sequence[Callable[[Longs], np.ndarray]]) -> np.ndarray:
        """What each knowledge base returns for its own passages, combined in the order of all ids."""
        parts = [tell(self._ids[self._homes == number]) for number, tell in enumerate(ask)]
        joined = np.concatenate(parts)
        order = np.concatenate([np.flatnonzero(self._homes == number) for number in range(len(parts))])
        gathered = np.empty_like(joined)
        gathered[order] = joined
        return gathered

    def __len__(self) -> int:
        """Number of passages that can be found."""
        return len(self._ids) if self._allowed is None else int(np.count_nonzero(self._allowed))

    def close(self) -> None:
        """Close the knowledge bases."""
        for base in self._bases:
            base.close()

    def encode(self, texts: Sequence[str]) -> list[Query]:
        """Encode texts for :meth:`search`."""
        from specrag.retrieval.knowledge_base import check_queries

        check_queries(texts)
        queries = (
            self._bases[0].encode(texts, "flat") if self.name == "hybrid" else [Query(text) for text in texts]
        )
        return [Query(query.text, query.vector, self._words.terms(query.text)) for query in queries]

    def search(self, queries: Sequence[Query], k: int) -> list[Ranking]:
        """The best passages of all knowledge bases."""
        return self._index.search(queries, k, self._allowed)

    def score(self, queries: Sequence[Query], passage_ids: Longs) -> Floats:
        """The scores by which :meth:`search` ranks, float32 [queries, ids given]."""
        return self._index.score(queries, passage_ids)

    def passages(self, ids: Sequence[int]) -> list[Passage]:
        """These passages, in the order given.

        Raises:
            InputError: there is no passage with one of these ids.
        """
        wanted = np.asarray(ids, dtype=np.int64)
        places = np.minimum(np.searchsorted(self._ids, wanted), len(self._ids) - 1)
        for id in wanted[self._ids[places] != wanted].tolist():
            raise InputError("passage id", id, "there is no passage of this id")
        found: dict[int, Passage] = {}
        for number, base in enumerate(self._bases):
            own = wanted[self._homes[places] == number].tolist()
            found |= zip(own, base.passages(own), strict=True)
        return [found[id] for id in wanted.tolist()]


def _allows(base: KnowledgeBase, where: Where, ids: Longs) -> Bools:
    """Whether passages satisfy conditions, bool [ids given]."""
    allowed = base.allowed(where)
    assert allowed is not None
    allows: Bools = allowed[base.rows(ids)]
    return allows


def _narrowed(shard: StoreRetriever | SingleIndex, where: Where) -> StoreRetriever | SingleIndex:
    if isinstance(shard, StoreRetriever):
        return shard.narrowed(where)
    from specrag.retrieval.knowledge_base import SingleIndex

    return SingleIndex(shard.knowledge_base, shard.name, all_of([shard.where, where]))


def _encoder_record(shard: StoreRetriever | SingleIndex) -> EncoderRecord:
    return (
        shard.record.encoder if isinstance(shard, StoreRetriever) else shard.knowledge_base.manifest.encoder
    )


def _check_encoders(records: Sequence[EncoderRecord], names: Sequence[str]) -> None:
    for record, name in zip(records, names, strict=True):
        first = records[0]
        if (record.fingerprint, record.dimension) != (first.fingerprint, first.dimension):
            raise KnowledgeBaseError(
                f"shards: {name} was made with {record.name!r} ({record.fingerprint}) and {names[0]} with "
                f"{first.name!r} ({first.fingerprint}): index all of them with one encoder"
            )
