"""Relevance of context chunks to a question: dense, BM25 or hybrid; text vectors are cached in memory and on disk.

An encoder may read less than a chunk holds (all-MiniLM-L6-v2 256 tokens, a chunk 512). Such a chunk is encoded in
windows, cut at sentences where possible, each as long as the encoder reads, so that nothing of it is ignored. Its
score is that of its best window (``max``: relevant if any half of it is), or the cosine with the mean of its windows'
vectors (``mean``: close to one vector of the whole). With an encoder that reads a whole chunk, both are the plain
cosine.
"""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import xxhash

from specrag.errors import InputError
from specrag.retrieval import passage_text, write_errors
from specrag.retrieval.documents import Chunker, ContextChunk, Document, Part

if TYPE_CHECKING:
    from specrag.retrieval.encoder import Encoder
    from specrag.retrieval.index import BM25Index, Bools, Floats, Longs

Scoring = Literal["dense", "bm25", "hybrid"]
Pooling = Literal["max", "mean"]

#: The dense part of a hybrid score, as in :class:`~specrag.retrieval.index.hybrid.HybridIndex`.
DENSE_WEIGHT = 0.5

#: A window begins with the title of its document, unless the title takes more than this share of the window.
_MOST_TITLE = 0.25
# Special tokens around a text.
_MARKS = 2
_FEWEST_TOKENS = 16
_STEP = 8


@dataclass(frozen=True, slots=True, eq=False)
class ChunkScores:
    """The scores of all chunks for one question.

    Attributes:
        scores: float32 ``[chunks]``: a cosine; for ``bm25`` the share of the maximum that the question's terms could
            give; for ``hybrid`` the mean of both.
        relevant: bool ``[chunks]``: for ``dense`` a cosine of at least the threshold, for ``bm25`` at least one of the
            question's terms, for ``hybrid`` either.
    """

    scores: Floats
    relevant: Bools


class ContextIndex:
    """The chunks of one context, scored for questions; vectors and terms are computed at the first question and kept.

    Args:
        chunks: in document order.
        vectors: encodes; ``None`` if only ``bm25`` is used.
        pooling: how the windows of a chunk give one score.
        tenant: the chunks' owner; their vectors serve no other tenant.
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
        """Total tokens of all chunks."""
        return sum(chunk.tokens for chunk in self.chunks)

    def only(self, numbers: Sequence[int]) -> ContextIndex:
        """Some of the chunks as a context of their own; nothing is encoded twice."""
        chunks = [self.chunks[number] for number in numbers]
        return ContextIndex(chunks, self._vectors, self.pooling, self.tenant)

    def score(self, question: str, scoring: Scoring, threshold: float) -> ChunkScores:
        """Score every chunk.

        Args:
            threshold: the minimum cosine of a relevant chunk.

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
        from specrag.retrieval.index import hybrid_scores

        sparse, bound = self._sparse(question)
        fused = np.empty_like(dense)
        hybrid_scores(dense, sparse, bound, DENSE_WEIGHT, fused)
        return ChunkScores(fused, (dense >= threshold) | (sparse > 0))

    def _dense(self, question: str) -> Floats:
        from specrag.retrieval.index import dense_scores

        query = self._encoder.encode_queries([question])[0]
        vectors, owners = self._encoded
        scores = np.empty(len(vectors), dtype=np.float32)
        dense_scores(query, vectors, np.arange(len(vectors), dtype=np.int64), scores)
        best = np.full(len(self.chunks), -np.inf, dtype=np.float32)
        np.maximum.at(best, owners, scores)
        return best

    def _sparse(self, question: str) -> tuple[Floats, float]:
        """BM25 scores of the chunks, and the maximum that the question's terms could give."""
        from specrag.retrieval.index import Query

        terms = self._bm25.terms(question)
        ids = np.arange(len(self.chunks), dtype=np.int64)
        scores = self._bm25.score([Query(question, terms=terms)], ids)[0]
        return scores, self._bm25.bound(terms)

    @cached_property
    def _bm25(self) -> BM25Index:
        from specrag.retrieval.index import BM25Index

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
        """Windows of a chunk that the encoder reads without truncation."""
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
        """Tokens of a window, not counting special ones and the encoder's own prompt."""
        prompt = self._encoder.settings.passage_prompt
        return self._cutter.max_tokens - (self._cutter.count(prompt) if prompt else 0)

    @property
    def _encoder(self) -> Encoder:
        if self._vectors is None:
            raise InputError("scoring", "dense", "give an encoder, or score by bm25")
        return self._vectors.encoder


#: Vectors kept in memory: at 384 numbers each they take 30 MB.
MOST_KEPT = 20_000

VECTORS_FILE = "context-vectors.sqlite"

_TABLE = (
    "CREATE TABLE IF NOT EXISTS vectors "
    "(key BLOB PRIMARY KEY, vector BLOB NOT NULL, checksum BLOB NOT NULL) WITHOUT ROWID"
)
_AT_ONCE = 500  # keys per SQLite query


class TextVectors:
    """Cache of text vectors of one encoder. Thread-safe.

    A key is the hash of the encoder's fingerprint, the tenant and the text, so that another encoder's or another
    tenant's vector is never used. A vector that was damaged on disk is computed again.

    Args:
        encoder: computes the vectors of new texts.
        folder: stores them beyond this process in a file there; ``None`` keeps them in memory only.
        most_kept: vectors in memory; those unused for longest are dropped.

    Raises:
        InputError: ``most_kept`` is not a number of vectors.
    """

    def __init__(self, encoder: Encoder, folder: Path | None = None, most_kept: int = MOST_KEPT) -> None:
        if most_kept < 0:
            raise InputError("most_kept", most_kept, "give a number of vectors, 0 for none")
        self.encoder = encoder
        self.folder = folder
        self._most_kept = most_kept
        self._kept: OrderedDict[bytes, Floats] = OrderedDict()
        self._lock = threading.Lock()

    def encode(self, texts: Sequence[str], tenant: str = "") -> Floats:
        """Vectors of unit length, float32 ``[texts, dimension]``.

        Args:
            texts: what to encode.
            tenant: the texts' owner.

        Raises:
            KnowledgeBaseError: the folder cannot be written.
        """
        keys = [self._key(text, tenant) for text in texts]
        found = self._remembered(keys)
        if self.folder is not None:
            found |= self._read(sorted({key for key in keys if key not in found}))
        # Each text once, even if a context holds it twice.
        missing = {key: text for key, text in zip(keys, texts, strict=True) if key not in found}
        if missing:
            vectors = self.encoder.encode_passages(list(missing.values()))
            new = dict(zip(missing, vectors, strict=True))
            found |= new
            self._write(new)
        self._remember(found)
        if not keys:
            return np.empty((0, self.encoder.dimension), dtype=np.float32)
        return np.stack([found[key] for key in keys])

    def _key(self, text: str, tenant: str) -> bytes:
        key = hashlib.sha256(f"{self.encoder.fingerprint}\n{text}".encode("utf-8", "surrogatepass")).digest()
        # Without a tenant the key is as it always was, so that vectors stored on disk are found again.
        return hashlib.sha256(hashlib.sha256(tenant.encode()).digest() + key).digest() if tenant else key

    def _remembered(self, keys: Sequence[bytes]) -> dict[bytes, Floats]:
        with self._lock:
            return {key: self._kept[key] for key in keys if key in self._kept}

    def _remember(self, vectors: dict[bytes, Floats]) -> None:
        with self._lock:
            for key, vector in vectors.items():
                self._kept[key] = vector
                self._kept.move_to_end(key)
            while len(self._kept) > self._most_kept:
                self._kept.popitem(last=False)

    # -- on disk --------------------------------------------------------------------------------------------

    def _read(self, keys: Sequence[bytes]) -> dict[bytes, Floats]:
        assert self.folder is not None
        found: dict[bytes, Floats] = {}
        if not (self.folder / VECTORS_FILE).is_file():
            return found
        # A file that cannot be read costs only the time of computing again.
        with contextlib.suppress(sqlite3.DatabaseError), self._database() as database:
            for start in range(0, len(keys), _AT_ONCE):
                some = keys[start : start + _AT_ONCE]
                marks = ",".join("?" * len(some))
                rows = database.execute(
                    f"SELECT key, vector, checksum FROM vectors WHERE key IN ({marks})",  # noqa: S608
                    some,
                )
                for key, data, checksum in rows:
                    vector = np.frombuffer(data, dtype="<f4")
                    if len(vector) == self.encoder.dimension and _checksum(key, data) == checksum:
                        found[key] = vector
        return found

    def _write(self, vectors: dict[bytes, Floats]) -> None:
        if self.folder is None:
            return
        with write_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            rows = [(key, vector.astype("<f4").tobytes()) for key, vector in vectors.items()]
            try:
                self._insert(rows)
            except sqlite3.OperationalError:
                raise
            except (
                sqlite3.DatabaseError
            ):  # the file is not a database: everything in it can be computed again
                (self.folder / VECTORS_FILE).unlink()
                self._insert(rows)

    def _insert(self, rows: Sequence[tuple[bytes, bytes]]) -> None:
        with self._database() as database:
            database.execute(_TABLE)
            database.executemany(
                "INSERT OR REPLACE INTO vectors VALUES (?, ?, ?)",
                [(key, data, _checksum(key, data)) for key, data in rows],
            )

    @contextlib.contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        assert self.folder is not None
        connection = sqlite3.connect(self.folder / VECTORS_FILE, timeout=30)
        try:
            with connection:  # commits, or rolls everything back
                yield connection
        finally:
            connection.close()


def _checksum(key: bytes, data: bytes) -> bytes:
    return xxhash.xxh3_128_digest(key + data)
