"""Shared by the methods that retrieve again every few tokens: their calls and what they check of a request."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Unpack

from specrag.engine import Coroutine
from specrag.errors import InputError
from specrag.methods.base import Decoder, SessionGenerator
from specrag.methods.ralmspec.endpoint import EndpointWriter
from specrag.methods.ralmspec.prompts import PassagePrompts
from specrag.methods.ralmspec.result import IterativeAnswer, Record
from specrag.methods.ralmspec.text import ChunkWriter, EarlierPrompts, Text, Writer
from specrag.methods.remote import TokenEndpoint
from specrag.methods.retriever import PassageRetriever, passages_of
from specrag.methods.timeline import Timeline
from specrag.request import Options, check_options
from specrag.speculation import Settings

if TYPE_CHECKING:
    from specrag.methods.ralmspec import Iterative
    from specrag.retrieval import KnowledgeBase

#: Default number of new tokens of an answer, as in the paper.
DEFAULT_MAX_TOKENS = 128

#: The clock of :class:`specrag.LanguageModel`.
DEFAULT_CLOCK = time.perf_counter


@dataclass(frozen=True, slots=True)
class IterativeRequest:
    """A checked call.

    Attributes:
        prompts: of the question.
        settings: what the caller asks of the whole text.
        options: the same, unchecked.
        tenant: whose earlier prompts may be continued.
    """

    prompts: PassagePrompts
    settings: Settings
    options: Options
    tenant: str


@dataclass(frozen=True, slots=True)
class Work:
    """One request's moving parts."""

    prompts: PassagePrompts
    timeline: Timeline
    writer: ChunkWriter
    record: Record


class IterativeMethod(ABC):
    """Answers a question with a retrieval every few tokens.

    Args:
        llm: the language model, local or behind endpoints; the latter decodes and remembers in its own way.
        retriever: such as a :class:`~specrag.retrieval.knowledge_base.SingleIndex`; for a knowledge base, its ``flat``
            index is searched.
        options: of the method.
        decoder: how the tokens between two retrievals are decoded by a local model.
        prefetch: passages that a search asks for, or all if there are fewer.
        reuse: keep the keys and values of the newest passages, and continue from those that other requests have read.
        system: a system message in front of the question.
        clock: seconds, the executor's.

    Raises:
        InputError: it is no retriever, or the knowledge base is empty.
    """

    name: str
    options: Iterative.Options

    def __init__(
        self,
        llm: SessionGenerator | TokenEndpoint,
        retriever: PassageRetriever | KnowledgeBase,
        options: Iterative.Options,
        decoder: Decoder,
        *,
        prefetch: int,
        reuse: bool,
        system: str | None,
        clock: Callable[[], float],
    ) -> None:
        self.llm = llm
        self.retriever = passages_of(retriever)
        if not len(self.retriever):
            raise InputError(
                "knowledge base", "0 passages", "there is nothing to retrieve; index a document first"
            )
        self.options = options
        self.decoder = decoder
        self.prefetch = min(prefetch, len(self.retriever))
        self.reuse = reuse
        self.system = system
        self._clock = clock

    def answering(self, question: str, **options: Unpack[Options]) -> Coroutine[IterativeAnswer]:
        """A coroutine for the model's executor that answers a question; emits one step per chunk.

        Errors in the values are found by the call itself; the submitter is responsible for a timeout.

        Args:
            question: in words.
            options: of the generation; see :class:`~specrag.request.Options`. ``max_tokens`` is 128 by
                default; ``method`` is refused, since ``decoder`` takes its place.

        Raises:
            InputError: a value cannot be used.
            ContextLengthError: the question leaves no room for a passage.
            SpecragError: the knowledge base does not answer.
        """
        return self._answering(self._request(question, options))

    def check(self, question: str, **options: Unpack[Options]) -> None:
        """Check everything that can be wrong with a question; retrieves and decodes nothing.

        Raises:
            InputError: a value cannot be used.
            ContextLengthError: the question leaves no room for a passage.
        """
        self._request(question, options)

    # -- the steps ------------------------------------------------------------------------------------------

    @abstractmethod
    def _answering(self, request: IterativeRequest) -> Coroutine[IterativeAnswer]:
        """Retrieve and decode until the text ends."""

    def _start(self, request: IterativeRequest) -> Work:
        timeline = Timeline(self._clock)
        record = Record(Text.empty(self.llm.tokenizer, request.settings.stop), timeline)
        return Work(request.prompts, timeline, self._writer(request, timeline), record)

    def _writer(self, request: IterativeRequest, timeline: Timeline) -> ChunkWriter:
        if isinstance(self.llm, TokenEndpoint):
            return EndpointWriter(
                self.llm,
                request.prompts,
                request.settings,
                request.options,
                interval=self.options.interval,
                timeline=timeline,
            )
        return Writer(
            self.llm.loaded.model,
            self.decoder,
            request.prompts,
            request.settings,
            interval=self.options.interval,
            earlier=EarlierPrompts(self.llm.prefixes, request.tenant) if self.reuse else None,
            timeline=timeline,
        )

    def _request(self, question: str, options: Options) -> IterativeRequest:
        if not isinstance(question, str) or not question.strip():
            raise InputError("question", question, "give at least one word")
        try:
            question.encode()
        except UnicodeEncodeError:
            raise InputError("question", question, "it is no text in UTF-8; convert it first") from None
        if "method" in options:
            remedy = "leave it out; name the method that decodes between retrievals as decoder"
            raise InputError("method", options["method"], remedy)
        with_defaults: Options = {"max_tokens": DEFAULT_MAX_TOKENS, **options}
        checked = check_options(with_defaults)
        if isinstance(self.llm, TokenEndpoint):
            self.llm.check(with_defaults)
        else:
            self.decoder.check(self.llm.loaded)
        tokenizer = self.llm.tokenizer
        ends = frozenset() if checked.ignore_eos else tokenizer.eos_tokens
        settings = Settings(
            replace(checked.stop, stop_tokens=ends),
            checked.sampling,
            checked.log_probs,
            checked.processors,
            tuple(tuple(tokenizer.encode(text, special=False)) for text in checked.references),
        )
        prompts = PassagePrompts(
            self.llm, question, self.options, checked.stop.max_tokens, system=self.system, raw=checked.raw
        )
        return IterativeRequest(prompts, settings, with_defaults, checked.tenant)
