"""Questions about long contexts: documents or a conversation that fit the model's window, answered sooner.

The target reads everything while a drafter that reads only the relevant part guesses (RAPID); or one of the baselines
answers: plain, the part alone, ReSpec, naive speculation, a drafter with a window.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Unpack

from specrag.engine import Coroutine, Emit, Search
from specrag.errors import InputError
from specrag.methods.base import Decoder, LocalModel
from specrag.methods.events import tap_steps
from specrag.methods.prefixes import KeptPrefixes, PrefixRead
from specrag.methods.prompts import Message, check_history
from specrag.methods.rapid.context.retriever import ContextRetriever
from specrag.methods.rapid.planner import LongQuestion, ReadingPlan, ReadingPlanner
from specrag.methods.rapid.prompt import ContextQuestion
from specrag.methods.rapid.readers import ContextMethod, ReadsPart, context_method
from specrag.methods.rapid.result import ContextAnswer, ContextStats
from specrag.request import DEFAULT_MAX_TOKENS, Options, Result, check_options
from specrag.retrieval.documents import ContextItem, documents_of
from specrag.speculation import Step

if TYPE_CHECKING:
    from specrag.methods.rapid import ContextOptions
    from specrag.retrieval.documents import Document


class LongContextPipeline:
    """Answers questions about long contexts.

    Args:
        llm: the target, such as :func:`specrag.load` makes.
        retriever: finds the part that the drafter reads.
        options: of the method.
        method: a :class:`~specrag.methods.rapid.readers.ContextMethod`, a decoder, or one whose drafter reads the part,
            such as ``RapidDecoder(drafter="smollm2-135m")``.
        prefixes: holds the keys and values of the newest document, so that a second question about it does not read it
            again; ``None`` for none. Without ``batch_invariant`` a later question's text may then round differently.
        system: a system message in front of everything.
        clock: seconds, the executor's.
    """

    name = "long-context"

    def __init__(
        self,
        llm: LocalModel,
        retriever: ContextRetriever,
        options: ContextOptions,
        method: ContextMethod | Decoder | ReadsPart,
        *,
        prefixes: KeptPrefixes | None = None,
        system: str | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.llm = llm
        self.method = context_method(method)
        self.system = system
        self._prefixes = prefixes
        self._planner = ReadingPlanner(
            llm.loaded,
            self.method,
            retriever,
            truncate_middle=options.truncate_middle,
            free=self._free_bytes,
            clock=clock,
        )

    def answering(
        self,
        question: str,
        documents: ContextItem | Sequence[ContextItem] = (),
        *,
        history: Sequence[Message] = (),
        **options: Unpack[Options],
    ) -> Coroutine[ContextAnswer]:
        """A coroutine for the model's executor that answers a question; emits what will be read, then steps.

        Errors in the values are found by the call itself, those that depend on the context's length before the
        first pass; the submitter is responsible for a timeout.

        Args:
            question: in words; also used to search for the relevant part.
            documents: the long context: texts, paths, or documents that have been read.
            history: earlier messages, oldest first. Without documents they are the long context themselves.
            options: of the generation; see :class:`~specrag.request.Options`. ``method`` is refused.

        Raises:
            InputError: a value cannot be used, the context holds no text, or it does not fit in memory.
            ContextLengthError: the context does not fit the model's window.
        """
        return self._answering(self._request(question, documents, history, options), options)

    # -- the steps ------------------------------------------------------------------------------------------

    def _answering(self, question: LongQuestion, options: Options) -> Coroutine[ContextAnswer]:
        plan: ReadingPlan = yield Search(lambda: self._planner.plan(question))
        yield Emit(plan.reading)
        known = PrefixRead(0, 0.0, 0.0, "")
        if self._prefixes is not None:
            shared = yield Search(lambda: self._planner.shared_length(question, plan.tokens))
            known = yield from self._prefixes.read(plan.tokens[:shared], options.get("tenant", ""))
        steps: list[Step] = []
        decoding: Options = {**options, "method": plan.method}
        if not self.llm.loaded.tokenizer.has_chat_template or question.raw:
            # Without end-of-turn tokens such a model would continue with another question of its own.
            decoding = {"stop": "\n", **decoding}
        generation = yield from tap_steps(self.llm.generating(plan.tokens, decoding), steps)
        return _sum_up(plan, known, generation, steps)

    def _request(
        self,
        question: str,
        documents: ContextItem | Sequence[ContextItem],
        history: Sequence[Message],
        options: Options,
    ) -> LongQuestion:
        if not isinstance(question, str) or not question.strip():
            raise InputError("question", question, "give at least one word")
        if "method" in options:
            raise InputError("method", options["method"], "leave it out; LongContext itself is given one")
        checked = check_options(options)
        earlier = check_history(history)
        found: tuple[Document, ...] = documents_of(documents)
        if not found and not any(message["content"].strip() for message in earlier):
            raise InputError("context", "", "it is empty; give documents, or a conversation as history")
        self.method.check(self.llm.loaded)
        asked = ContextQuestion(question, earlier if found else (), self.system)
        return LongQuestion(
            asked,
            found,
            () if found else earlier,
            options.get("max_tokens", DEFAULT_MAX_TOKENS),
            checked.raw,
            checked.tenant,
        )

    def _free_bytes(self) -> int | None:
        from specrag.engine import free_bytes

        free = free_bytes(self.llm.loaded.device)
        # What is held already serves this question too, or is dropped for it.
        return None if free is None else free + (0 if self._prefixes is None else self._prefixes.nbytes)


def _sum_up(plan: ReadingPlan, known: PrefixRead, generation: Result, steps: Sequence[Step]) -> ContextAnswer:
    reading, timing, usage = plan.reading, generation.timing, generation.usage
    # A drafter that was never asked for a guess has read nothing.
    drafter_prefill = sum(step.reading for step in steps)
    stats = ContextStats(
        retrieval_seconds=reading.retrieval_seconds,
        tokenizing_seconds=reading.tokenizing_seconds,
        prefix_seconds=known.disk_seconds,
        prefill_seconds=timing.prefill + known.prefill_seconds,
        drafter_prefill_seconds=drafter_prefill,
        decode_seconds=timing.decode - drafter_prefill,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=known.known if known.prefill_seconds else usage.cached_tokens,
        drafter_tokens=reading.drafter_tokens if drafter_prefill else 0,
        completion_tokens=usage.completion_tokens,
    )
    return ContextAnswer(generation.text.strip(), reading, generation, stats, known.note)
