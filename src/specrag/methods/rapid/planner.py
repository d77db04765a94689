"""What is read for a question about a long context: the prompts, the part, what is dropped. Runs no model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from specrag.errors import ContextLengthError
from specrag.methods.base import Decoder
from specrag.methods.prompts import Message
from specrag.methods.rapid.context.retriever import ContextPart, ContextRetriever
from specrag.methods.rapid.context.scores import ContextIndex
from specrag.methods.rapid.prompt import (
    ContextQuestion,
    common_length,
    encode,
    text_of,
    text_without_middle,
    whole_text,
)
from specrag.methods.rapid.readers import FALLBACK, ContextMethod
from specrag.methods.rapid.result import ContextReading
from specrag.retrieval.documents import ContextChunk, Document

if TYPE_CHECKING:
    from specrag.engine import MemoryNeed
    from specrag.models import LoadedModel

#: Why a drafter with the target's own weights does not draft when it would read everything that the target reads.
NOTHING_LEFT_OUT = (
    "the relevant part is the whole context, so that the drafter would repeat the target's own work: "
    f"decoded by {FALLBACK}"
)

# Tokens that joining chunks may add.
_MARGIN = 16


@dataclass(frozen=True, slots=True)
class LongQuestion:
    """A checked call.

    Args:
        asked: the question and the texts around it.
        documents: the context; empty if it is a conversation.
        messages: the conversation that is the context; empty if the context is documents.
        max_tokens: of the answer.
        raw: leave the chat template out.
        tenant: the tenant that asks.
    """

    asked: ContextQuestion
    documents: tuple[Document, ...]
    messages: tuple[Message, ...]
    max_tokens: int
    raw: bool
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class ReadingPlan:
    """What is to be done: the target's prompt, and the method that decodes after it."""

    reading: ContextReading
    tokens: tuple[int, ...]
    method: str | Decoder


class Ends(NamedTuple):
    """Numbers of chunks to keep."""

    head: int
    tail: int


@dataclass(frozen=True, slots=True)
class _Target:
    """The target's prompt.

    Attributes:
        kept: the chunks that it holds; ``None`` for all.
        left_out: tokens of the others.
    """

    tokens: list[int]
    kept: tuple[int, ...] | None = None
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class _Fitted:
    """A part that fits its reader's window, and the prompt that holds it."""

    part: ContextPart
    tokens: list[int]


class ReadingPlanner:
    """Plans questions for one model; runs in threads.

    Args:
        loaded: the target.
        method: how to answer.
        retriever: finds the part.
        truncate_middle: leave out the middle of a context that is too long.
        free: returns the bytes of free memory; ``None`` if unknown.
        clock: seconds.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        method: ContextMethod,
        retriever: ContextRetriever,
        *,
        truncate_middle: bool,
        free: Callable[[], int | None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.loaded = loaded
        self.method = method
        self.retriever = retriever
        self.truncate_middle = truncate_middle
        self._free = free
        self._clock = clock

    def plan(self, question: LongQuestion) -> ReadingPlan:
        """Retrieve, make the prompts, and check that everything fits.

        Raises:
            ContextLengthError: the context does not fit the model's window, or the question leaves no room for it.
            InputError: the keys and values do not fit in memory, or the context holds no text.
        """
        started = self._clock()
        drafts, fallback = self.method.part, ""
        decoding: str | Decoder = self.method.decoding
        fitted: _Fitted | None = None
        read_by_drafter: list[int] = []
        if self.method.reads_part_only:
            fitted = self._part(question, None, self.loaded)
            target = _Target(fitted.tokens)
        else:
            target = self._target(question)
        if drafts is not None:
            model = drafts.drafter_model(self.loaded)
            fitted = self._part(question, target.kept, model)
            if fitted.part.whole and model.model is self.loaded.model:
                fallback = NOTHING_LEFT_OUT
            else:
                read_by_drafter = fitted.tokens
                decoding = drafts.reading(read_by_drafter)
        retrieval = 0.0 if fitted is None else fitted.part.seconds
        reading = ContextReading(
            question=question.asked.question,
            method=FALLBACK if fallback else self.method.name,
            fallback=fallback,
            part=None if fitted is None else fitted.part,
            prompt_tokens=len(target.tokens),
            drafter_tokens=len(read_by_drafter),
            left_out_tokens=target.left_out,
            memory=self._memory(question, len(target.tokens), len(read_by_drafter)),
            retrieval_seconds=retrieval,
            tokenizing_seconds=self._clock() - started - retrieval,
        )
        return ReadingPlan(reading, tuple(target.tokens), decoding)

    def shared_length(self, question: LongQuestion, tokens: Sequence[int]) -> int:
        """How many tokens of a prompt another question about the same context would share at its beginning."""
        if self.method.reads_part_only:
            return 0
        other = "0" if not question.asked.question.startswith("0") else "1"
        asked = replace(question, asked=replace(question.asked, question=other))
        return common_length(tokens, self._target(asked).tokens)

    # -- the target -----------------------------------------------------------------------------------------

    def _target(self, question: LongQuestion) -> _Target:
        """The target's prompt: everything, or what is left of it."""
        if question.documents:
            messages = question.asked.about_text(whole_text(question.documents))
        else:
            messages = question.asked.after(question.messages)
        tokens = self._encode(self.loaded, question, messages)
        room = self._room(self.loaded, question)
        if len(tokens) <= room:
            return _Target(tokens)
        if not self.truncate_middle:
            remedy = (
                f"the model's window leaves room for {max(room, 0):,} behind {question.max_tokens} new ones; shorten "
                "the context, let its middle be left out (truncate_middle=True), read only the relevant part "
                "(method='long-context', read='part'), or take a model with a longer window"
            )
            raise ContextLengthError("context", f"{len(tokens):,} tokens", remedy)
        return self._without_middle(question, len(tokens), room)

    def _without_middle(self, question: LongQuestion, length: int, room: int) -> _Target:
        """The beginning and the end of the context, as many whole chunks of both as fit."""
        chunks = self._context(question).chunks
        sizes = [chunk.tokens for chunk in chunks]
        fitting = room - (length - sum(sizes)) - _MARGIN
        while True:
            head, tail = both_ends(sizes, fitting)
            if head + tail == 0:
                raise self._no_room(question, room)
            first, last = chunks[:head], chunks[len(chunks) - tail :]
            if question.documents:
                text = text_without_middle(first, last, several=len(question.documents) > 1)
                messages = question.asked.about_text(text)
            else:
                messages = question.asked.after_part([*first, *last])
            tokens = self._encode(self.loaded, question, messages)
            if len(tokens) <= room:
                kept = (*range(head), *range(len(chunks) - tail, len(chunks)))
                return _Target(tokens, kept, sum(sizes) - sum(sizes[number] for number in kept))
            fitting -= len(tokens) - room

    # -- the part -------------------------------------------------------------------------------------------

    def _part(self, question: LongQuestion, kept: Sequence[int] | None, reader: LoadedModel) -> _Fitted:
        """The part, smaller than its budget if its reader's window requires that.

        Args:
            kept: the chunks to choose from; ``None`` for all.
            reader: the model that reads it.
        """
        started = self._clock()
        context = self._context(question)
        if kept is not None:
            context = context.only(kept)
        cutting = self._clock() - started
        room = self._room(reader, question)
        most: int | None = None
        while True:
            part = self.retriever.select(question.asked.question, context, most)
            cutting += part.seconds
            chunks = [scored.chunk for scored in part.chunks]
            tokens = self._encode(reader, question, self._messages(question, chunks))
            if len(tokens) <= room:
                return _Fitted(replace(part, seconds=cutting), tokens)
            if len(chunks) == 1:
                raise self._no_room(question, room)
            # The reader may count in another vocabulary, so this is an estimate, but always a smaller one.
            most = min(part.tokens - 1, part.tokens * room // len(tokens))

    def _messages(self, question: LongQuestion, chunks: Sequence[ContextChunk]) -> tuple[Message, ...]:
        if question.documents:
            return question.asked.about_text(text_of(chunks, several=len(question.documents) > 1))
        return question.asked.after_part(chunks)

    def _context(self, question: LongQuestion) -> ContextIndex:
        tokenizer_file = self.loaded.files.folder / "tokenizer.json"
        if question.documents:
            return self.retriever.documents(question.documents, tokenizer_file, question.tenant)
        return self.retriever.messages(question.messages, tokenizer_file, question.tenant)

    # -- what fits ------------------------------------------------------------------------------------------

    def _encode(self, reader: LoadedModel, question: LongQuestion, messages: Sequence[Message]) -> list[int]:
        return encode(reader.tokenizer, messages, raw=question.raw)

    def _room(self, reader: LoadedModel, question: LongQuestion) -> int:
        return reader.model.context_length - question.max_tokens

    def _no_room(self, question: LongQuestion, room: int) -> ContextLengthError:
        remedy = (
            f"the window has room for {max(room, 0):,} tokens, and not one chunk of the context fits beside it; "
            "shorten it, ask for fewer tokens, or cut the context into smaller chunks"
        )
        return ContextLengthError("question", question.asked.question, remedy)

    def _memory(self, question: LongQuestion, target: int, drafter: int) -> MemoryNeed:
        """The memory estimate, if it fits.

        Raises:
            InputError: it does not fit.
        """
        from specrag.engine import SessionNeed, check_memory, estimate_memory

        model, new = self.loaded.model, question.max_tokens
        sessions = [SessionNeed(model, target + new)]
        if drafter:
            assert self.method.part is not None
            sessions.append(SessionNeed(self.method.part.drafter_model(self.loaded).model, drafter + new))
        window = getattr(self.method.decoding, "window", 0)  # of a drafter with the target's weights
        if window:
            sessions.append(SessionNeed(model, min(window, target + new)))
        need = estimate_memory(sessions)
        check_memory(need, self._free(), f"{target:,} tokens")
        return need


def both_ends(sizes: Sequence[int], room: int) -> Ends:
    """How many of the first and of the last chunks fit together, with about as many tokens from each end."""
    head = tail = used = 0
    first, last = 0, 0
    while head + tail < len(sizes):
        front = first <= last
        size = sizes[head] if front else sizes[len(sizes) - 1 - tail]
        if used + size > room:
            break
        used += size
        if front:
            head, first = head + 1, first + size
        else:
            tail, last = tail + 1, last + size
    return Ends(head, tail)
