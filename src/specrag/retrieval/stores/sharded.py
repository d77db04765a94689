"""Passages in several places, searched as one: a batch goes to all of them at once, the best of their best are found.

Every score comes from the one kernel, so that what comes out is, bit for bit, what one store with all passages gives.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from specrag.errors import InputError, StoreUnavailable
from specrag.retrieval.index.base import Index, Query, Ranking, best_of, checked_k
from specrag.retrieval.index.bm25 import BM25Index
from specrag.retrieval.index.filters import Where, all_of
from specrag.retrieval.index.flat import FlatIndex
from specrag.retrieval.index.hybrid import HybridIndex
from specrag.retrieval.index.scoring import Floats, Longs
from specrag.retrieval.manifest import EncoderRecord, KnowledgeBaseError
from specrag.retrieval.passage import Passage, passage_text
from specrag.retrieval.stores.base import Closing
from specrag.retrieval.stores.retriever import StoreRetriever

if TYPE_CHECKING:
    from specrag.retrieval.knowledge_base import KnowledgeBase, SingleIndex

T = TypeVar("T")

#: Failures that are remembered for :meth:`ShardedRetriever.missing_since`, and passages whose shard is.
_FAILURES, _HOMES = 4096, 65_536


class ShardedRetriever(Closing):
    """A :class:`~specrag.methods.retriever.PassageRetriever` over several. Safe to use from several threads.

    Passages of stores keep their ids: a passage that two stores hold is found once. Those of knowledge bases on this
    machine are numbered through, one knowledge base behind the other.

    Args:
        shards: over passages with vectors of one encoder; closed with this.
        names: of the shards, for errors and marks.
        partial: a shard that does not answer is left out, and :meth:`missing_since` says so; else it is an error.
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
        stable = all(getattr(shard, "stable_ids", False) for shard in shards)
        sizes = [0 if stable else _positions(shard) for shard in shards]
        self._offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)[:-1] if not stable else None

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
        """The same with conditions, over the same shards; those in which no passage satisfies them are not asked.

        Raises:
            InputError: a value cannot be used, or no passage satisfies the conditions.
            StoreUnavailable: a shard does not answer; with ``partial`` it is left out.
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
        # A field that one shard does not have, and no shard that has passages: what the first of them says.
        if not found:
            raise refused[0]
        shards = [found.get(number, shard) for number, shard in enumerate(self.shards)]
        other = ShardedRetriever(shards, self.names, partial=self.partial, absent=self.absent)
        other._active = tuple(found)
        other._failures, other._pool = self._failures, self._pool
        return other

    def missing_since(self, moment: float) -> tuple[str, ...]:
        """The shards that have failed to answer since a moment of ``time.monotonic()``, for whomever."""
        failed = [name for when, name in tuple(self._failures) if when >= moment]
        return tuple(dict.fromkeys([*self.absent, *failed]))

    def encode(self, texts: Sequence[str]) -> list[Query]:
        """Questions in the form that :meth:`search` takes, each encoded alone."""
        return self.shards[0].encode(texts)

    def search(self, queries: Sequence[Query], k: int) -> list[Ranking]:
        """The best passages of all shards; a batch is one request to each, at the same time.

        Raises:
            InputError: a query lacks its vector, or ``k`` is none.
            StoreUnavailable: a shard did not answer; with ``partial`` none of them did.
        """
        k = checked_k(k, max(len(self), 1))
        answers = self._each(lambda number: self.shards[number].search(queries, k))
        merged = []
        for place in range(len(queries)):
            parts = [(number, answer[place]) for number, answer in answers.items()]
            merged.append(self._merge(parts, k))
        return merged

    def _merge(self, parts: Sequence[tuple[int, Ranking]], k: int) -> Ranking:
        ids = np.concatenate([self._global(number, ranking.ids) for number, ranking in parts])
        scores = np.concatenate([ranking.scores for _, ranking in parts])
        homes = np.concatenate([np.full(len(ranking), number) for number, ranking in parts])
        _, first = np.unique(ids, return_index=True)  # a passage of two stores counts once
        ranking = best_of(scores[first], ids[first], k)
        with self._lock:
            if len(self._homes) > _HOMES:
                self._homes.clear()
            self._homes.update(zip(ids[first].tolist(), homes[first].tolist(), strict=True))
        return ranking

    def score(self, queries: Sequence[Query], passage_ids: Longs) -> Floats:
        """The scores by which :meth:`search` ranks, float32 [queries, ids given].

        Raises:
            InputError: there is no passage of one of these ids.
            StoreUnavailable: the shard of one does not answer.
        """
        ids = np.asarray(passage_ids, dtype=np.int64)
        scores = np.empty((len(queries), len(ids)), dtype=np.float32)
        homes = self._located(ids.tolist())
        for number in set(homes):
            places = np.flatnonzero(np.array(homes) == number)
            scores[:, places] = self.shards[number].score(queries, self._local(number, ids[places]))
        return scores

    def passages(self, ids: Sequence[int]) -> list[Passage]:
        """These passages, in the order given.

        Raises:
            InputError: there is no passage of one of these ids.
            StoreUnavailable: the shard of one does not answer.
        """
        homes = self._located(ids)
        found: dict[int, Passage] = {}
        for number in set(homes):
            wanted = [id for id, home in zip(ids, homes, strict=True) if home == number]
            local = self._local(number, np.array(wanted, dtype=np.int64)).tolist()
            for id, passage in zip(wanted, self.shards[number].passages(local), strict=True):
                found[id] = renumbered(passage, id)
        return [found[id] for id in ids]

    def _located(self, ids: Sequence[int]) -> list[int]:
        """The shard of each passage."""
        if self._offsets is not None:
            return [self._numbered(id) for id in ids]
        with self._lock:
            known = {id: self._homes.get(id) for id in ids}
        for id, home in known.items():
            if home is None:
                known[id] = self._look_for(id)
        return [known[id] or 0 for id in ids]

    def _numbered(self, id: int) -> int:
        assert self._offsets is not None
        if id < 0:
            raise InputError("passage id", id, "give one that a search has returned")
        return int(np.searchsorted(self._offsets, id, side="right")) - 1

    def _look_for(self, id: int) -> int:
        for number, shard in enumerate(self.shards):
            try:
                shard.passages([id])
            except InputError:
                continue
            return number
        raise InputError("passage id", id, "no shard has such a passage")

    def _global(self, number: int, ids: Longs) -> Longs:
        return ids if self._offsets is None else ids + self._offsets[number]

    def _local(self, number: int, ids: Longs) -> Longs:
        return ids if self._offsets is None else ids - self._offsets[number]

    def _each(self, ask: Callable[[int], T]) -> dict[int, T]:
        """What each shard answers, asked at the same time.

        Raises:
            StoreUnavailable: one does not answer; where parts are enough, none does.
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
    """Knowledge bases of this machine searched by their words, as if they were one. Safe to use from several threads.

    How rare a word is, and how long a passage is on average, are told over all of them: their passages' words are
    indexed together when this is made, and held in memory.

    Args:
        bases: open; closed with this. Their passages are numbered through.
        name: ``bm25`` or ``hybrid``.
        where: only passages that satisfy these conditions are found.

    Raises:
        InputError: no passage satisfies the conditions.
        KnowledgeBaseError: their vectors come from different encoders.
    """

    remote = False

    def __init__(self, bases: Sequence[KnowledgeBase], name: str, where: Where | None = None) -> None:
        _check_encoders([base.manifest.encoder for base in bases], [str(base.folder) for base in bases])
        self.name = name
        self._bases = tuple(bases)
        self._offsets = np.concatenate([[0], np.cumsum([len(base) for base in bases])])
        everything = chain.from_iterable(base.passages(range(len(base))) for base in bases)
        self._words = BM25Index.build([passage_text(one.title, one.text) for one in everything])
        self._index: Index = self._words
        if name == "hybrid":
            flats = [base.index("flat") for base in bases]
            vectors = [flat.vectors for flat in flats if isinstance(flat, FlatIndex)]
            self._index = HybridIndex(FlatIndex.build(np.concatenate(vectors)), self._words)
        masks = [base.allowed(where) for base in bases]
        self._allowed = (
            None if where is None else np.concatenate([mask for mask in masks if mask is not None])
        )
        if self._allowed is not None and not self._allowed.any():
            raise InputError("where", where, "no passage satisfies it; widen the conditions")

    def __len__(self) -> int:
        """Number of passages that can be found."""
        return int(self._offsets[-1]) if self._allowed is None else int(np.count_nonzero(self._allowed))

    def close(self) -> None:
        """Close the knowledge bases."""
        for base in self._bases:
            base.close()

    def encode(self, texts: Sequence[str]) -> list[Query]:
        """The texts in the form that :meth:`search` takes."""
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
            InputError: there is no passage of one of these ids.
        """
        found = []
        for id in ids:
            if not 0 <= id < self._offsets[-1]:
                raise InputError("passage id", id, f"give a number from 0 to {self._offsets[-1] - 1}")
            number = int(np.searchsorted(self._offsets, id, side="right")) - 1
            found.append(renumbered(self._bases[number].passage(id - int(self._offsets[number])), id))
        return found


def renumbered(passage: Passage, id: int) -> Passage:
    """The same passage under the number that it has here."""
    if passage.id == id:
        return passage
    return Passage(id, passage.source, passage.title, passage.place, passage.text, passage.metadata)


def _narrowed(shard: StoreRetriever | SingleIndex, where: Where) -> StoreRetriever | SingleIndex:
    if isinstance(shard, StoreRetriever):
        return shard.narrowed(where)
    from specrag.retrieval.knowledge_base import SingleIndex

    return SingleIndex(shard.knowledge_base, shard.name, all_of([shard.where, where]))


def _positions(shard: StoreRetriever | SingleIndex) -> int:
    """How many ids a shard may use."""
    return len(shard) if isinstance(shard, StoreRetriever) else len(shard.knowledge_base)


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
