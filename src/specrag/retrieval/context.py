"""Context retrieval: the part of a long context that answers a question (RAPID, section 3.1).

The context is cut into chunks, the chunks are ranked against the question, and the best ones are taken until the
budget and put back into document order.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from specrag.errors import InputError
from specrag.retrieval.chunking import Chunker
from specrag.retrieval.context_chunks import ContextChunk, Message, cut_documents, cut_messages
from specrag.retrieval.context_scores import ContextIndex
from specrag.retrieval.context_settings import ContextPart, ContextSettings, ScoredChunk, choose
from specrag.retrieval.documents import Document

if TYPE_CHECKING:
    from specrag.retrieval.context_vectors import TextVectors
    from specrag.retrieval.encoder import Encoder

#: Contexts that stay cut and encoded for a second question.
MOST_CONTEXTS = 8


class ContextRetriever:
    """Cuts contexts and finds the parts that matter. Safe to use from several threads.

    Whoever calls for several tenants names the tenant with every context: what is kept of one tenant's texts, chunks or
    vectors, never serves another, whose answer would come sooner and so tell that the text was there.

    Args:
        settings: chunks, threshold and budget.
        encoder: a sentence encoder or the name of one, loaded at the first question that needs it.
        vectors: a folder that keeps vectors beyond this process; ``None`` keeps them in memory only.
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
        """Load now what the first question would otherwise wait for: the encoder, and compiled loops.

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
        """Documents as one context; cut once, however often it is asked for.

        Args:
            tokenizer_file: the ``tokenizer.json`` that counts the tokens of a chunk, the target's.
            tenant: whose documents they are.

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
            context: as of :meth:`documents` or :meth:`messages`.
            most: tokens that the drafter has room for; ``None`` where the settings alone decide.
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
        """:meth:`documents` and :meth:`select` in one call, the time of both told together."""
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
        from specrag.retrieval.context_vectors import TextVectors
        from specrag.retrieval.encoder import DEFAULT_ENCODER, load_encoder

        with self._lock:
            if self._vectors is None:
                given = self._encoder or DEFAULT_ENCODER
                encoder = load_encoder(str(given)) if isinstance(given, str | Path) else given
                self._vectors = TextVectors(encoder, self._folder)
            return self._vectors
