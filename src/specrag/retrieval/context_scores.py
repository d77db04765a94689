"""How well each chunk of a long context answers a question: dense, sparse, or both.

An encoder may read less than a chunk holds (all-MiniLM-L6-v2 256 tokens, a chunk 512). A chunk is then encoded in
windows, cut at sentences where possible, each as long as the encoder reads, so that nothing of it is ignored. Its
score is that of its best window (``max``: relevant if any half of it is), or the cosine with the mean of its windows'
vectors (``mean``: near to one vector of the whole). With an encoder that reads a whole chunk both are the plain cosine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np

from specrag.errors import InputError
from specrag.retrieval.chunking import Chunker
from specrag.retrieval.context_chunks import ContextChunk
from specrag.retrieval.documents import Document, Part
from specrag.retrieval.passage import passage_text

if TYPE_CHECKING:
    from specrag.retrieval.bm25 import BM25Index
    from specrag.retrieval.context_vectors import TextVectors
    from specrag.retrieval.encoder import Encoder
    from specrag.retrieval.scoring import Bools, Floats, Longs

Scoring = Literal["dense", "bm25", "hybrid"]
Pooling = Literal["max", "mean"]

#: The dense part of a hybrid score, as in :class:`~specrag.retrieval.hybrid.HybridIndex`.
DENSE_WEIGHT = 0.5

#: A window begins with the title of its document unless that takes more than this share of it.
_MOST_TITLE = 0.25
# Special tokens around a text.
_MARKS = 2
_FEWEST_TOKENS = 16
_STEP = 8


@dataclass(frozen=True, slots=True, eq=False)
class ChunkScores:
    """The scores of all chunks for one question.

    Attributes:
        scores: float32 ``[chunks]``: a cosine; for ``bm25`` the share of the most that the question's terms could
            give; for ``hybrid`` the mean of both.
        relevant: bool ``[chunks]``: ``dense`` a cosine of at least the threshold, ``bm25`` one of the question's terms,
            ``hybrid`` either.
    """

    scores: Floats
    relevant: Bools


class ContextIndex:
    """The chunks of one context, ready to be asked; what it needs is computed at the first question and kept.

    Args:
        chunks: in document order.
        vectors: encodes; ``None`` where only ``bm25`` is asked for.
        pooling: how the windows of a chunk make one score.
        tenant: whose the chunks are; their vectors serve nobody else.
    """

    def __init__(
        self,
        chunks: Sequence[ContextChunk],
        vectors: TextVectors | None,
        pooling: Pooling = "max",
        tenant: str = "",
    ) -> None:
        self.chunks = tuple(chunks)
        self.pooling = pooling
        self.tenant = tenant
        self._vectors = vectors
        self._cutters: dict[int, Chunker] = {}

    @property
    def tokens(self) -> int:
        """Of all chunks together."""
        return sum(chunk.tokens for chunk in self.chunks)

    def only(self, numbers: Sequence[int]) -> ContextIndex:
        """Some of the chunks as a context of their own; nothing is encoded twice."""
        chunks = [self.chunks[number] for number in numbers]
        return ContextIndex(chunks, self._vectors, self.pooling, self.tenant)

    def score(self, question: str, scoring: Scoring, threshold: float) -> ChunkScores:
        """Score every chunk.

        Args:
            threshold: the least cosine of a relevant chunk.

        Raises:
            InputError: the index has no encoder and the scoring needs one.
        """
        if scoring == "bm25":
            sparse, bound = self._sparse(question)
            share = sparse / np.float32(bound) if bound > 0 else sparse
            return ChunkScores(share, sparse > 0)
        dense = self._dense(question)
        if scoring == "dense":
            return ChunkScores(dense, dense >= threshold)
        from specrag.retrieval.scoring import hybrid_scores

        sparse, bound = self._sparse(question)
        fused = np.empty_like(dense)
        hybrid_scores(dense, sparse, bound, DENSE_WEIGHT, fused)
        return ChunkScores(fused, (dense >= threshold) | (sparse > 0))

    def _dense(self, question: str) -> Floats:
        from specrag.retrieval.scoring import dense_scores

        query = self._encoder.encode_queries([question])[0]
        vectors, owners = self._encoded
        scores = np.empty(len(vectors), dtype=np.float32)
        dense_scores(query, vectors, np.arange(len(vectors), dtype=np.int64), scores)
        best = np.full(len(self.chunks), -np.inf, dtype=np.float32)
        np.maximum.at(best, owners, scores)
        return best

    def _sparse(self, question: str) -> tuple[Floats, float]:
        """BM25 scores of the chunks, and the most that the question's terms could give."""
        from specrag.retrieval.index import Query
        from specrag.retrieval.scoring import sparse_bound

        terms = self._bm25.terms(question)
        ids = np.arange(len(self.chunks), dtype=np.int64)
        scores = self._bm25.score([Query(question, terms=terms)], ids)[0]
        return scores, sparse_bound(terms, self._bm25.postings.largest)

    @cached_property
    def _bm25(self) -> BM25Index:
        from specrag.retrieval.bm25 import BM25Index

        return BM25Index.build([passage_text(chunk.title, chunk.text) for chunk in self.chunks])

    @cached_property
    def _encoded(self) -> tuple[Floats, Longs]:
        """Unit vectors ``[windows, dimension]``, and the chunk that each belongs to."""
        assert self._vectors is not None
        windows = [self._windows_of(chunk) for chunk in self.chunks]
        vectors = self._vectors.encode([window for some in windows for window in some], self.tenant)
        owners = np.repeat(np.arange(len(windows)), [len(some) for some in windows])
        if self.pooling == "max":
            return vectors, owners
        sums = np.zeros((len(windows), vectors.shape[1]), dtype=np.float32)
        np.add.at(sums, owners, vectors)
        means: Floats = sums / np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), 1e-12)
        return means.astype(np.float32), np.arange(len(windows))

    def _windows_of(self, chunk: ContextChunk) -> list[str]:
        """The chunk in texts that the encoder reads whole."""
        # The title of the only document says nothing about which of its chunks to take.
        titled = chunk.title if self._several and self._fitting_title(chunk.title) else ""
        head = passage_text(titled, "") if titled else ""
        room = self._room - (self._cutter.count(head) if head else 0)
        if self._cutter.count(chunk.text) <= room:
            return [head + chunk.text]
        # In steps, so that the titles of many documents need few cutters.
        room = max(room // _STEP * _STEP, _FEWEST_TOKENS)
        if room not in self._cutters:
            self._cutters[room] = Chunker(self._encoder.tokenizer_file, room, 0)
        pieces = self._cutters[room].chunk(Document("", "", (Part(chunk.text),)))
        return [head + piece.text for piece in pieces]

    def _fitting_title(self, title: str) -> bool:
        return bool(title) and self._cutter.count(title) <= _MOST_TITLE * self._room

    @cached_property
    def _several(self) -> bool:
        return len({chunk.document for chunk in self.chunks}) > 1

    @cached_property
    def _cutter(self) -> Chunker:
        return Chunker(
            self._encoder.tokenizer_file, max(self._encoder.max_tokens - _MARKS, _FEWEST_TOKENS), 0
        )

    @cached_property
    def _room(self) -> int:
        """Tokens of a window, special ones and the encoder's own prompt not counted."""
        prompt = self._encoder.settings.passage_prompt
        return self._cutter.max_tokens - (self._cutter.count(prompt) if prompt else 0)

    @property
    def _encoder(self) -> Encoder:
        if self._vectors is None:
            raise InputError("scoring", "dense", "give an encoder, or score by bm25")
        return self._vectors.encoder
