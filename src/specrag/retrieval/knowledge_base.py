"""Open knowledge bases: search, passages, filters.

Opening only reads the manifest and the state record, whatever the size of the knowledge base. An index is opened on
first use, and so is the encoder: a BM25 search does not load it.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np

from specrag.artifacts import MANIFEST, Generation, checksum
from specrag.checks import check_choice, check_text, check_whole
from specrag.errors import InputError, SpecragError
from specrag.retrieval.build import check_fingerprint
from specrag.retrieval.encoder.loaded import Encoders
from specrag.retrieval.index.base import Index, Query, Ranking
from specrag.retrieval.index.bm25 import BM25Index
from specrag.retrieval.index.filters import Where, find_allowed
from specrag.retrieval.index.flat import FlatIndex
from specrag.retrieval.index.hnsw import HnswIndex
from specrag.retrieval.index.hybrid import HybridIndex
from specrag.retrieval.index.scoring import Bools, Floats, Longs
from specrag.retrieval.manifest import Manifest
from specrag.retrieval.passage import Hit, Passage, passage_text
from specrag.retrieval.passage_store import PassageStore, State, StoredFile, connect, damaged

if TYPE_CHECKING:
    from specrag.retrieval.encoder.encoder import Encoder
    from specrag.retrieval.encoder.reranker import Reranker

INDEXES = ("flat", "hnsw", "bm25", "hybrid")
"""Exact dense, approximate dense, sparse, and the fusion of the two exact ones."""

DEFAULT_INDEX = "hybrid"

RERANKED = 30
"""Passages given to a reranker, unless more are asked for."""


class KnowledgeBase:
    """Passages and their indexes. Made by :meth:`open`; safe to use from several threads.

    It keeps reading the state that it opened while another process changes the knowledge base; open it again to see
    the changes.

    Args:
        folder: as given to :meth:`open`.
        generation: the files.
        store: the passages.
        encoder: the knowledge base's encoder, if it is loaded already, or a collection to get it from.
    """

    remote = False

    def __init__(
        self,
        folder: Path,
        generation: Generation[Manifest],
        store: PassageStore,
        encoder: Encoder | Encoders | None,
    ) -> None:
        self.folder = folder
        self.manifest = generation.manifest
        self._generation = generation
        self._store = store
        self._encoders = encoder if isinstance(encoder, Encoders) else Encoders()
        self._encoder = None if isinstance(encoder, Encoders) else encoder
        self._indexes: dict[str, Index] = {}
        self._loading = threading.RLock()
        self._database = store.path.stat().st_ino
        self._seen: object = None

    def shared_words(self, text: str, passage_ids: Sequence[int]) -> list[float]:
        """Share of a text's words that occur in each passage; see :meth:`BM25Index.shared_words`."""
        return self._bm25().shared_words(text, passage_ids)

    @property
    def languages(self) -> tuple[str, ...]:
        """The languages of its passages, the most frequent first, by Snowball's names."""
        return self.state.languages

    @property
    def state(self) -> State:
        """Summary of its content: version, numbers of documents and passages, indexed paths."""
        return self._store.state

    def is_current(self) -> bool:
        """Whether it is unchanged since it was opened."""
        database = self._store.path
        marks = [_mark(path) for path in (self.folder / MANIFEST, database, Path(f"{database}-wal"))]
        if marks == self._seen:
            return True
        try:
            if Manifest.read(self.folder).generation != self.manifest.generation:
                return False
            if database.stat().st_ino != self._database:  # another one has taken its place
                return False
            with closing(connect(database)) as connection:
                ((content,),) = connection.execute("SELECT content FROM state").fetchall()
        except (SpecragError, sqlite3.Error, OSError):
            return False
        if content != self._store.content:
            return False
        self._seen = marks
        return True

    @classmethod
    def open(cls, folder: str | Path, *, encoder: Encoder | Encoders | None = None) -> KnowledgeBase:
        """Open a knowledge base.

        Args:
            folder: a folder made by ``specrag index``.
            encoder: an encoder to use instead of loading the one that the manifest names, or a collection to get that
                one from.

        Raises:
            KnowledgeBaseError: it does not exist, is damaged, has another format or was made with another encoder.
        """
        path = Path(folder).expanduser()
        generation = Manifest.open(path)
        try:
            if encoder is not None and not isinstance(encoder, Encoders):
                check_fingerprint(encoder, path, generation.manifest)
            return cls(path, generation, PassageStore(generation.folder), encoder)
        except BaseException:
            generation.close()
            raise

    def close(self) -> None:
        """Close the files. No search is possible afterwards."""
        with self._loading:
            self._indexes.clear()
            self._store.close()
            self._generation.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        held = self.state
        return f"KnowledgeBase({str(self.folder)!r}, documents={held.documents}, passages={held.passages})"

    # -- passages -------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.state.passages

    @property
    def ids(self) -> Longs:
        """The ids of all passages, ascending, int64 [passages]."""
        return self._store.rows.sorted_ids()

    def vectors(self, ids: Longs) -> Floats:
        """The vectors of these passages, float32 [ids given, dimension].

        Raises:
            InputError: there is no passage with one of these ids.
        """
        flat = self._flat()
        found: Floats = flat.vectors[flat.rows.find(ids)]
        return found

    def rows(self, ids: Longs) -> Longs:
        """The rows of these passages, int64 [ids given]; they index the mask that :meth:`allowed` returns.

        Raises:
            InputError: there is no passage with one of these ids.
        """
        return self._store.rows.find(ids)

    def documents(self) -> list[StoredFile]:
        """All documents, sorted by name."""
        return self._store.files()

    def passages_by_document(self) -> dict[int, int]:
        """How many passages each document has, by its number."""
        return self._store.counts()

    def passage(self, id: int) -> Passage:
        """One passage.

        Raises:
            InputError: there is none with this id.
        """
        return self._store.passages([id])[0]

    def passages(self, ids: Sequence[int]) -> list[Passage]:
        """Several passages, in the order given.

        Raises:
            InputError: there is none with one of these ids.
        """
        return self._store.passages(ids)

    def fields(self) -> list[str]:
        """Fields that a filter can name: source, title, place, and the fields of the documents' metadata."""
        return self._store.field_names()

    def allowed(self, where: Where | None) -> np.ndarray | None:
        """Mask of the rows whose passages satisfy all conditions, bool [rows]; None without conditions.

        Args:
            where: see :mod:`~specrag.retrieval.index.filters`; ``"year >= 2000 and src = a, b"``, or the same as a
                mapping, ``{"year": {">=": 2000}, "src": ["a", "b"]}``.

        Raises:
            InputError: a field does not exist, an operator is unknown, or a value cannot be compared.
        """
        if not where:
            return None
        found = find_allowed(self._store, where, self.state.rows)
        live = self._store.rows.live
        return found if live is None else found & live

    # -- searching ------------------------------------------------------------------------------------------

    def index(self, name: str = DEFAULT_INDEX) -> Index:
        """An index, opened on first use.

        Raises:
            InputError: there is none with this name.
            KnowledgeBaseError: one of its files is damaged.
        """
        check_index(name)
        with self._loading:
            found = self._indexes.get(name)
            if found is None:
                found = self._indexes[name] = self._load_index(name)
            return found

    def encoder(self) -> Encoder:
        """The encoder that made the vectors, loaded on first use.

        Raises:
            KnowledgeBaseError: the encoder with this name is a different one now.
        """
        with self._loading:
            if self._encoder is None:
                made = self.manifest.encoder
                encoder = self._encoders.encoder(made.name, made.dtype)
                check_fingerprint(encoder, self.folder, self.manifest)
                self._encoder = encoder
            return self._encoder

    def encode(self, texts: Sequence[str], index: str = DEFAULT_INDEX) -> list[Query]:
        """Encode questions in the forms that an index needs.

        Raises:
            InputError: a question is empty, or there is no index with this name.
        """
        check_index(index)
        check_queries(texts)
        vectors: Sequence[np.ndarray | None] = [None] * len(texts)
        terms: Sequence[np.ndarray | None] = [None] * len(texts)
        if index != "bm25" and texts:
            vectors = list(self.encoder().encode_queries(texts))
        if index in {"bm25", "hybrid"}:
            sparse = self._bm25()
            terms = [sparse.terms(text) for text in texts]
        return [Query(text, vector, own) for text, vector, own in zip(texts, vectors, terms, strict=True)]

    def search(
        self,
        queries: Sequence[str],
        k: int = 5,
        *,
        index: str = DEFAULT_INDEX,
        where: Where | None = None,
        reranker: Reranker | None = None,
    ) -> list[list[Hit]]:
        """The best passages for each question, best first; fewer than ``k`` if there are not that many.

        Args:
            queries: any number of questions.
            k: how many passages to find.
            index: one of :data:`INDEXES`.
            where: find only passages that satisfy these conditions, as for :meth:`allowed`.
            reranker: reads question and passage together and reorders the best :data:`RERANKED`; the scores are then
                the reranker's.

        Raises:
            InputError: a value cannot be used.
        """
        self.check_k(k)
        allowed = self.allowed(where)
        encoded = self.encode(queries, index)
        fetched = k if reranker is None else min(max(k, RERANKED), len(self))
        rankings = self.index(index).search(encoded, fetched, allowed)
        found = [self._hits(ranking) for ranking in rankings]
        if reranker is None:
            return found
        return [rerank(reranker, query, hits)[:k] for query, hits in zip(queries, found, strict=True)]

    def check_k(self, k: int) -> None:
        """Check the number of passages asked for.

        Raises:
            InputError: ``k`` is below 1 or above the number of passages.
        """
        check_k(k, len(self))

    def _hits(self, ranking: Ranking) -> list[Hit]:
        passages = self._store.passages(ranking.ids.tolist())
        return [Hit(passage, score) for passage, score in zip(passages, ranking.scores.tolist(), strict=True)]

    # -- indexes --------------------------------------------------------------------------------------------

    def _load_index(self, name: str) -> Index:
        if name == "flat":
            state, store = self.state, self._store
            return FlatIndex(store.vectors(self.manifest.encoder.dimension), state.longest, store.rows)
        if name == "hnsw":
            return self._load_graph()
        if name == "bm25":
            return BM25Index(self._store, self._store.lengths, self._store.settings, self._store.rows)
        return HybridIndex(self._flat(), self._bm25())

    def _load_graph(self) -> Index:
        """The approximate index; the exact one if there is none yet or a newer one has taken its place."""
        graph, flat = self.state.graph, self._flat()
        if graph is None:
            return flat
        path = self._generation.folder / graph.file
        try:
            if checksum(path) != graph.checksum:
                raise damaged(path, "has another checksum than the one recorded")
            return HnswIndex.load(path, flat)
        except FileNotFoundError:
            if self.is_current():
                raise damaged(path, "is missing") from None
            return flat

    def _flat(self) -> FlatIndex:
        index = self.index("flat")
        assert isinstance(index, FlatIndex)
        return index

    def _bm25(self) -> BM25Index:
        index = self.index("bm25")
        assert isinstance(index, BM25Index)
        return index


def _mark(path: Path) -> object:
    """A value that changes when the file is written."""
    with suppress(OSError):
        status = os.stat(path)
        return status.st_ino, status.st_mtime_ns, status.st_size
    return None


def check_index(name: str) -> None:
    """Check the name of an index.

    Raises:
        InputError: there is no such index; the message suggests the nearest name.
    """
    check_choice("index", name, INDEXES, cutoff=0.4)


def check_k(k: int, passages: int) -> None:
    """Check the number of passages asked for.

    Raises:
        InputError: ``k`` is below 1 or above ``passages``.
    """
    check_whole("k", k, 1, passages, f"the knowledge base has {passages} passages; give 1 to {passages}")


def check_queries(texts: Sequence[str]) -> None:
    """Check a list of questions.

    Raises:
        InputError: one is empty or not a text.
    """
    if isinstance(texts, str):
        raise InputError("queries", texts, "give a list of questions")
    for text in texts:
        check_text("query", text, "it holds no text; give at least one character")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InputError("query", text, "it is no text in UTF-8; convert it first") from None


def rerank(reranker: Reranker, query: str, hits: list[Hit]) -> list[Hit]:
    """Reorder hits by a reranker's scores, which replace the original ones."""
    if not hits:
        return hits
    texts = [passage_text(hit.passage.title, hit.passage.text) for hit in hits]
    scores = reranker.score(query, texts)
    scored = [Hit(hit.passage, float(score)) for hit, score in zip(hits, scores, strict=True)]
    return sorted(scored, key=lambda hit: (-hit.score, hit.passage.id))


class SingleIndex:
    """A :class:`~specrag.methods.retriever.PassageRetriever` over a knowledge base on this machine.

    Args:
        knowledge_base: an open knowledge base; the caller keeps ownership and closes it.
        name: one of :data:`~specrag.retrieval.knowledge_base.INDEXES`.
        where: find only passages that satisfy these conditions.

    Raises:
        InputError: there is no index with this name, or no passage satisfies the conditions.
    """

    remote = False

    def __init__(self, knowledge_base: KnowledgeBase, name: str = "flat", where: Where | None = None) -> None:
        self.knowledge_base = knowledge_base
        self.name = name
        self.where = where
        check_index(name)
        self._allowed = knowledge_base.allowed(where)
        if self._allowed is not None and not self._allowed.any():
            raise InputError("where", where, "no passage satisfies it; widen the conditions")

    def __len__(self) -> int:
        """Number of passages that can be found."""
        return len(self.knowledge_base) if self._allowed is None else int(np.count_nonzero(self._allowed))

    def encode(self, texts: Sequence[str]) -> list[Query]:
        """Encode texts in the form that this index needs."""
        return self.knowledge_base.encode(texts, self.name)

    def search(self, queries: Sequence[Query], k: int, allowed: Bools | None = None) -> list[Ranking]:
        """The best passages that satisfy both the conditions and ``allowed``, bool [rows].

        The first passage is the same for every ``k``: anything better that an approximate search finds only by walking
        farther for a larger ``k`` is left out.

        Raises:
            KnowledgeBaseError: one of the index's files is damaged.
        """
        both = self._allowed
        if allowed is not None and both is not None:
            both = both & allowed
        index, mask = self.knowledge_base.index(self.name), allowed if both is None else both
        rankings = index.search(queries, k, mask)
        if not isinstance(index, HnswIndex) or k <= index.settings.ef_search:
            return rankings
        first = index.search(queries, 1, mask)
        return [_led_by(one, several) for one, several in zip(first, rankings, strict=True)]

    def score(self, queries: Sequence[Query], passage_ids: Longs) -> Floats:
        """The scores by which :meth:`search` ranks, float32 [queries, ids given]."""
        return self.knowledge_base.index(self.name).score(queries, passage_ids)

    def passages(self, ids: Sequence[int]) -> list[Passage]:
        """These passages, in the order given."""
        return self.knowledge_base.passages(ids)


def _led_by(first: Ranking, ranking: Ranking) -> Ranking:
    """The tail of ``ranking`` that starts at the passage ranked in ``first``, or ``first`` itself without it."""
    place = np.flatnonzero(np.isin(ranking.ids, first.ids))
    if not len(place):
        return first
    return Ranking(ids=ranking.ids[place[0] :], scores=ranking.scores[place[0] :])
