"""Context retrieval: the part of a long context that answers a question (RAPID, section 3.1).

The context is cut into chunks, the chunks are ranked against the question, and the best ones are taken up to the
budget and put back into document order.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import numpy as np

from specrag.checks import check_choice, check_number, check_whole
from specrag.errors import InputError
from specrag.methods.rapid.context.scores import ChunkScores, ContextIndex, Pooling, Scoring, TextVectors
from specrag.retrieval.documents import Chunker, ContextChunk, Document, Message, cut_documents, cut_messages

if TYPE_CHECKING:
    from specrag.retrieval.encoder import Encoder

#: Number of contexts that stay cut and encoded for later questions.
MOST_CONTEXTS = 8


class ContextRetriever:
    """Cuts contexts into chunks and selects the relevant ones. Thread-safe.

    A caller that serves several tenants names the tenant with every context: what is kept of one tenant's texts, chunks
    or vectors never serves another, whose answer would otherwise come sooner and so reveal that the text was there.

    Args:
        settings: chunks, threshold and budget.
        encoder: a sentence encoder or the name of one, loaded at the first question that needs it.
        vectors: a folder that stores vectors beyond this process; ``None`` keeps them in memory only.
        clock: seconds.
    """

    def __init__(
        self,
        settings: ContextSettings | None = None,
        *,
        encoder: Encoder | str | Path | None = None,
        vectors: Path | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.settings = settings or ContextSettings()
        self._encoder = encoder
        self._folder = vectors
        self._clock = clock
        self._vectors: TextVectors | None = None
        self._cutters: dict[Path, Chunker] = {}
        self._contexts: OrderedDict[bytes, ContextIndex] = OrderedDict()
        self._lock = threading.Lock()

    def load(self) -> None:
        """Load the encoder and the compiled loops before the first question.

        Raises:
            InputError, ModelFilesError: there is no such encoder, or its files are damaged.
        """
        vectors = None if self.settings.scoring == "bm25" else self._text_vectors()
        chunk = ContextChunk("warm-up", "", "", "", 1)
        context = ContextIndex([chunk], vectors, self.settings.pooling)
        context.score("warm-up", self.settings.scoring, self.settings.threshold)

    def documents(
        self, documents: Sequence[Document], tokenizer_file: Path, tenant: str = ""
    ) -> ContextIndex:
        """Documents as one context; cut only once, however often it is requested.

        Args:
            tokenizer_file: the target's ``tokenizer.json``, which counts the tokens of a chunk.
            tenant: the documents' owner.

        Raises:
            InputError: there is no text in them.
        """
        parts = [
            text for document in documents for text in (document.title, *(p.text for p in document.parts))
        ]
        names = [f"{document.source}\n{len(document.parts)}" for document in documents]
        key = self._key(tokenizer_file, tenant, [*names, *parts])
        return self._context(key, lambda: cut_documents(documents, self._cutter(tokenizer_file)), tenant)

    def messages(self, messages: Sequence[Message], tokenizer_file: Path, tenant: str = "") -> ContextIndex:
        """A conversation as one context.

        Args:
            messages: ``{"role": ..., "content": ...}``, oldest first, without the question.
            tokenizer_file, tenant: as for :meth:`documents`.

        Raises:
            InputError: there is no text in them.
        """
        texts = [text for m in messages for text in (m["role"], m["content"])]
        key = self._key(tokenizer_file, tenant, texts)
        return self._context(key, lambda: cut_messages(messages, self._cutter(tokenizer_file)), tenant)

    def select(self, question: str, context: ContextIndex, most: int | None = None) -> ContextPart:
        """The part of a context that a drafter reads for a question.

        Args:
            question: what to look for; an encoder may read only its beginning.
            context: from :meth:`documents` or :meth:`messages`.
            most: tokens that the drafter has room for; ``None`` if only the settings decide.
        """
        started = self._clock()
        settings = self.settings
        scores = context.score(question, settings.scoring, settings.threshold)
        budget = settings.budget(context.tokens)
        if most is not None:
            budget = min(budget, most)
        chosen = choose(scores, [chunk.tokens for chunk in context.chunks], budget)
        return ContextPart(
            chunks=tuple(
                ScoredChunk(context.chunks[number], number, float(scores.scores[number])) for number in chosen
            ),
            budget=budget,
            context_tokens=context.tokens,
            context_chunks=len(context.chunks),
            below_threshold=not scores.relevant.any(),
            seconds=self._clock() - started,
        )

    def retrieve(self, question: str, documents: Sequence[Document], tokenizer_file: Path) -> ContextPart:
        """:meth:`documents` and :meth:`select` in one call, reporting the time of both together."""
        started = self._clock()
        part = self.select(question, self.documents(documents, tokenizer_file))
        return replace(part, seconds=self._clock() - started)

    # -- what is kept ---------------------------------------------------------------------------------------

    def _context(self, key: bytes, cut: Callable[[], tuple[ContextChunk, ...]], tenant: str) -> ContextIndex:
        with self._lock:
            if key in self._contexts:
                self._contexts.move_to_end(key)
                return self._contexts[key]
        chunks = cut()
        if not chunks:
            raise InputError("context", "", "it holds no text; give at least one word")
        vectors = None if self.settings.scoring == "bm25" else self._text_vectors()
        context = ContextIndex(chunks, vectors, self.settings.pooling, tenant)
        with self._lock:
            self._contexts[key] = context
            while len(self._contexts) > MOST_CONTEXTS:
                self._contexts.popitem(last=False)
        return context

    def _key(self, tokenizer_file: Path, tenant: str, texts: Sequence[str]) -> bytes:
        digest = hashlib.sha256(str(tokenizer_file).encode())
        for text in (tenant, *texts):
            data = text.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "little") + data)
        return digest.digest()

    def _cutter(self, tokenizer_file: Path) -> Chunker:
        with self._lock:
            if tokenizer_file not in self._cutters:
                self._cutters[tokenizer_file] = Chunker(tokenizer_file, self.settings.chunk_tokens, 0)
            return self._cutters[tokenizer_file]

    def _text_vectors(self) -> TextVectors:
        from specrag.retrieval.encoder import DEFAULT_ENCODER, load_encoder

        with self._lock:
            if self._vectors is None:
                given = self._encoder or DEFAULT_ENCODER
                encoder = load_encoder(str(given)) if isinstance(given, str | Path) else given
                self._vectors = TextVectors(encoder, self._folder)
            return self._vectors


#: The minimum that a chunk size may be set to, as for :class:`~specrag.retrieval.documents.chunking.Chunker`.
FEWEST_CHUNK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class ContextSettings:
    """Settings of context retrieval; the defaults are the paper's, as interpreted in PAPERS.md.

    Args:
        chunk_tokens: maximum tokens of a chunk.
        threshold: chunks with a smaller cosine are left out; not used by ``bm25``.
        min_tokens: the part may always have this many tokens.
        share: the part of a longer context may have one ``share``-th of its tokens.
        max_tokens: the part never has more tokens, except for a single best chunk that is longer; ``None`` for no
            limit.
        scoring: ``dense``, ``bm25`` or ``hybrid``.
        pooling: how a chunk that the encoder reads in several windows gets one score.

    Raises:
        InputError: a value is out of range.
    """

    chunk_tokens: int = 512
    threshold: float = 0.3
    min_tokens: int = 4096
    share: int = 24
    max_tokens: int | None = None
    scoring: Scoring = "dense"
    pooling: Pooling = "max"

    def __post_init__(self) -> None:
        check_whole("chunk_tokens", self.chunk_tokens, FEWEST_CHUNK_TOKENS)
        check_whole("min_tokens", self.min_tokens, 1)
        check_whole("share", self.share, 1)
        if self.max_tokens is not None:
            check_whole("max_tokens", self.max_tokens, self.min_tokens)
        remedy = "give a cosine similarity from -1 to 1"
        check_number("threshold", self.threshold, -1, 1, remedy=remedy)
        check_choice("scoring", self.scoring, get_args(Scoring))
        check_choice("pooling", self.pooling, get_args(Pooling))

    def budget(self, tokens: int) -> int:
        """Maximum tokens of the part for a context of ``tokens``: ``max(min_tokens, tokens / share)``, limited."""
        wanted = max(self.min_tokens, tokens // self.share)
        return wanted if self.max_tokens is None else min(wanted, self.max_tokens)


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    """A chunk in the part.

    Attributes:
        number: its place among the context's chunks, from 0.
        score: see :class:`~specrag.methods.rapid.context.scores.ChunkScores`.
    """

    chunk: ContextChunk
    number: int
    score: float


@dataclass(frozen=True, slots=True)
class ContextPart:
    """The chunks that a drafter reads.

    Attributes:
        chunks: in document order.
        budget: maximum tokens that it was allowed.
        context_tokens, context_chunks: of the whole context.
        below_threshold: no chunk is relevant; the single best one is included all the same.
        seconds: wall-clock time of cutting, encoding and ranking.
    """

    chunks: tuple[ScoredChunk, ...]
    budget: int
    context_tokens: int
    context_chunks: int
    below_threshold: bool
    seconds: float = field(default=0.0, compare=False)

    @property
    def tokens(self) -> int:
        """Total tokens of its chunks."""
        return sum(scored.chunk.tokens for scored in self.chunks)

    @property
    def whole(self) -> bool:
        """Whether nothing was left out: a drafter that reads this reads everything."""
        return len(self.chunks) == self.context_chunks


def choose(scores: ChunkScores, tokens: Sequence[int], budget: int) -> list[int]:
    """The chunks to read, ascending: the best relevant ones, until the next would exceed the budget.

    Ties go to the earlier chunk. The best chunk is always included, even if it is irrelevant or longer than the budget.

    Args:
        tokens: of each chunk.
        budget: maximum tokens in total.
    """
    order = np.lexsort((np.arange(len(tokens)), -scores.scores))
    relevant = [int(number) for number in order if scores.relevant[number]]
    chosen: list[int] = []
    used = 0
    for number in relevant or [int(order[0])]:
        if chosen and used + tokens[number] > budget:
            break
        chosen.append(number)
        used += tokens[number]
    return sorted(chosen)
