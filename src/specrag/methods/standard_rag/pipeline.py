"""Standard RAG: find passages, put them into the prompt, answer from them with citations."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Unpack

from specrag.engine import Coroutine, Emit, FinishReason, Search
from specrag.errors import InputError
from specrag.methods.base import Generator as LanguageModel
from specrag.methods.blocks import check_reuse, pasting
from specrag.methods.citations import Citations, find_citations, support
from specrag.methods.citing import CitedText
from specrag.methods.events import map_events, suppress_events
from specrag.methods.evidence import is_about_nothing, least_similarity
from specrag.methods.prompts import (
    Fitted,
    Message,
    check_history,
    encode_prompt,
    fit_prompt,
    is_small,
)
from specrag.methods.retriever import VectorRetriever, is_remote, similarities
from specrag.methods.standard_rag.follow_up import MAX_TOKENS, retrieval_question, rewriting_prompt
from specrag.methods.standard_rag.result import Answer, AnswerStats
from specrag.methods.wording import Wording, wording
from specrag.request import DEFAULT_MAX_TOKENS, Options, Prompt, Result, Source, Sources, check_options
from specrag.retrieval import Hit, Passage, passage_text
from specrag.speculation import Step

if TYPE_CHECKING:
    from specrag.methods.block_files import BlockFiles
    from specrag.methods.passages import Retrieval
    from specrag.methods.standard_rag import StandardRAG


@dataclass(frozen=True, slots=True)
class _Found:
    """The result of a search.

    Attributes:
        similarities: cosine of each passage and the question; empty without vectors.
        nothing: nothing relevant was found, so no answer is given.
    """

    hits: Sequence[Hit]
    similarities: Sequence[float]
    nothing: bool
    seconds: float


class StandardPipeline:
    """Answers questions from passages that are found once.

    If nothing at all is found, or nothing that is about the question (:mod:`~specrag.methods.evidence`), the answer is
    :data:`~specrag.request.ABSTENTION` in the question's language. So are the instruction and the lead by default. A
    lead that ends in an open mark makes a small model choose a passage first, and is not shown: citations follow the
    sentences (:class:`CitedText`).

    Args:
        llm: the language model, such as :func:`specrag.load` makes.
        retrieval: how the passages are found.
        options: of the method, but for the decoder, which a call names.
        room: maximum tokens of the prompt; ``None`` for what the options and the model's context leave.
        system: a system message in front of the conversation.
        clock: seconds, the executor's.

    Raises:
        InputError: the model's keys and values cannot be reused in blocks.
    """

    name = "standard-rag"

    def __init__(
        self,
        llm: LanguageModel,
        retrieval: Retrieval,
        options: StandardRAG.Options,
        *,
        room: int | None = None,
        system: str | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.llm = llm
        self.retrieval = retrieval
        self.options = options
        self.system = system
        self._room = room
        self._files: BlockFiles | None = None
        if options.reuse == "blocks":
            from specrag.methods.block_files import block_files

            check_reuse(llm)
            self._files = block_files(llm, retrieval.retriever)
        self._clock = clock

    def answering(
        self, question: str, history: Sequence[Message] = (), **options: Unpack[Options]
    ) -> Coroutine[Answer]:
        """A coroutine for the model's executor that answers a question; emits sources, then steps.

        Errors in the values are found by the call itself; the submitter is responsible for a timeout.

        Args:
            question: in words.
            history: the conversation so far, oldest message first.
            options: of the generation; see :class:`~specrag.request.Options`.

        Raises:
            InputError: a value cannot be used.
            ContextLengthError: the question leaves no room for a passage.
        """
        self.check(question, history, **options)
        return self._answering(question, tuple(history), options)

    def check(self, question: str, history: Sequence[Message] = (), **options: Unpack[Options]) -> None:
        """Check everything that can be wrong with a question; does no work.

        Raises:
            InputError: a value cannot be used.
            ContextLengthError: the question leaves no room for a passage.
        """
        if not isinstance(question, str) or not question.strip():
            raise InputError("question", question, "give at least one word")
        check_options(options)
        check_history(history)
        self._fit(question, (), history, options)

    def prompt_room(self, max_tokens: int) -> int:
        """Maximum tokens of a prompt, with an answer of at most ``max_tokens``."""
        limits = (self.llm.context_length - max_tokens, self.options.prompt_tokens, self._room)
        return min(limit for limit in limits if limit is not None)

    # -- the steps ------------------------------------------------------------------------------------------

    def _answering(self, question: str, history: Sequence[Message], options: Options) -> Coroutine[Answer]:
        started = self._clock()
        wanted, retriever = question, self.retrieval.retriever
        if history and self.retrieval.rewrite:
            wanted = yield from self._rewriting(question, history, options)
        rewritten = self._clock()
        found: _Found = yield Search(lambda: self._search(wanted), is_remote(retriever))
        words = self._wording(question, history, options)
        abstained = found.nothing
        fitted = self._fit(question, () if abstained else found.hits, history, options)
        kept = len(found.hits) if abstained else fitted.kept
        event = Sources(
            question=wanted,
            sources=_sources(found, kept),
            left_out=tuple(found.hits[kept:]),
            shortened=fitted.shortened,
            abstained=abstained,
            rewrite_seconds=rewritten - started,
            retrieval_seconds=found.seconds,
            least_similarity=least_similarity(retriever, self.retrieval.min_score),
        )
        yield Emit(event)
        if abstained:
            yield Emit(_text_step(words.abstention, "stop"))
            return _sum_up(event, None, words.abstention, ())
        formed = bool(options.get("processors"))  # by a grammar, which knows where the text ends
        label = words.question if is_small(self.llm) and not formed else ""
        prompt = encode_prompt(self.llm, fitted.messages, options, words.lead, label)
        # Answers quote their passages, including those that did not fit in the prompt.
        more: Options = {"references": [hit.passage.text for hit in found.hits]}
        passages = [hit.passage for hit in found.hits[:kept]]
        generating = self._generating(prompt.prompt, {**more, **prompt.options}, passages)
        if formed:  # citations would break it
            generation = yield from generating
            return _sum_up(event, generation, f"{words.lead}{generation.text}".strip(), ())
        read = [passage_text(hit.passage.title, hit.passage.text) for hit in found.hits[:kept]]
        cited = CitedText(question, read, words.lead)
        generation = yield from map_events(generating, lambda value: _cited(value, cited))
        if left := cited.end():  # of a text whose last step does not say so
            yield Emit(_text_step(left))
        return _sum_up(event, generation, cited.text.strip(), cited.unheld)

    def _generating(self, prompt: Prompt, options: Options, passages: Sequence[Passage]) -> Coroutine[Result]:
        if self.options.reuse == "exact":
            return self.llm.generating(prompt, options)
        return self._pasting(prompt, options, passages)

    def _pasting(self, prompt: Prompt, options: Options, passages: Sequence[Passage]) -> Coroutine[Result]:
        """Generate after passages that are pasted into the prompt."""
        started = self._clock()
        tokens: list[int] = list(prompt)  # type: ignore[arg-type]
        tenant = options.get("tenant", "")
        begun = yield from pasting(self.llm, tokens, passages, tenant, files=self._files)  # type: ignore[arg-type]
        seconds, pasted = self._clock() - started, begun.session.pasted
        result = yield from self.llm.generating(prompt, options, begun.session)  # type: ignore[call-arg]
        usage = replace(
            result.usage, cached_tokens=begun.known, pasted=pasted, exact=result.usage.exact and not pasted
        )
        timing = replace(result.timing, prefill=result.timing.prefill + seconds)
        return replace(result, usage=usage, timing=timing)

    def _rewriting(self, question: str, history: Sequence[Message], options: Options) -> Coroutine[str]:
        short: Options = {"max_tokens": MAX_TOKENS, "stop": "\n", "tenant": options.get("tenant", "")}
        if "method" in options:
            short["method"] = options["method"]
        if options.get("raw"):
            short["raw"] = True
        prompt = encode_prompt(self.llm, rewriting_prompt(question, history), short)
        generation = yield from suppress_events(self.llm.generating(prompt.prompt, prompt.options))
        return retrieval_question(question, generation.text)

    def _search(self, question: str) -> _Found:
        """Search in a thread, while other requests decode."""
        started = self._clock()
        retriever, how = self.retrieval.retriever, self.retrieval
        hits = how.search(question)
        similar: Sequence[float] = ()
        if hits and isinstance(retriever, VectorRetriever):
            similar = similarities(retriever, question, hits)
        nothing = not hits or (
            how.abstain and is_about_nothing(retriever, question, hits, similar, how.min_score)
        )
        return _Found(hits, similar, nothing, self._clock() - started)

    def _fit(
        self, question: str, hits: Sequence[Hit], history: Sequence[Message], options: Options
    ) -> Fitted:
        words = self._wording(question, history, options)
        return fit_prompt(
            question,
            [hit.passage for hit in hits],
            room=self.prompt_room(options.get("max_tokens", DEFAULT_MAX_TOKENS)),
            count=lambda messages: encode_prompt(self.llm, messages, options, words.lead).size,
            history=history,
            system=self.system,
            instruction=words.instruction,
            label=words.question,
        )

    def _wording(self, question: str, history: Sequence[Message], options: Options) -> Wording:
        found, lead = wording(question, history), self.options.lead
        if options.get("processors"):  # the text follows a form, in front of which nothing may stand
            lead = ""
        elif lead is None:
            lead = found.lead if is_small(self.llm) else ""
        return replace(found, instruction=self.options.instruction or found.instruction, lead=lead)


def _sources(found: _Found, kept: int) -> tuple[Source, ...]:
    similar: Sequence[float | None] = found.similarities or [None] * len(found.hits)
    return tuple(
        Source(number, hit.passage, hit.score, similarity)
        for number, (hit, similarity) in enumerate(zip(found.hits[:kept], similar, strict=False), 1)
    )


def _cited(value: object, text: CitedText) -> tuple[object, ...]:
    """A step with the citations that may be shown now; other values unchanged."""
    if not isinstance(value, Step):
        return (value,)
    shown = text.push(value.text)
    return (replace(value, text=shown if value.finish_reason is None else shown + text.end()),)


def _sum_up(event: Sources, generation: Result | None, text: str, unheld: tuple[str, ...]) -> Answer:
    read = [passage_text(source.passage.title, source.passage.text) for source in event.sources]
    citations = find_citations(text, read) if generation is not None else Citations()
    supports = [support(text, source) if generation is not None else None for source in read]
    stats = AnswerStats(
        rewrite_seconds=event.rewrite_seconds,
        retrieval_seconds=event.retrieval_seconds,
        prefill_seconds=0.0 if generation is None else generation.timing.prefill,
        decode_seconds=0.0 if generation is None else generation.timing.decode,
        prompt_tokens=0 if generation is None else generation.usage.prompt_tokens,
        completion_tokens=0 if generation is None else generation.usage.completion_tokens,
    )
    return Answer(
        text=text,
        sources=tuple(
            replace(source, cited=source.number in citations.numbers, support=share)
            for source, share in zip(event.sources, supports, strict=True)
        ),
        question=event.question,
        abstained=event.abstained,
        least_similarity=event.least_similarity,
        citations=citations,
        unheld=unheld,
        left_out=event.left_out,
        shortened=event.shortened,
        generation=generation,
        stats=stats,
    )


def _text_step(text: str, reason: FinishReason | None = None) -> Step:
    """A step of text that no model generated."""
    return Step(tokens=(), text=text, drafted_by={}, accepted=0, seconds=0.0, finish_reason=reason)
