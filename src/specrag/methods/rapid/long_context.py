"""Questions about long contexts: documents or a conversation that fit the model's window, answered sooner.

The target reads everything while a drafter that reads only the relevant part guesses (RAPID); or one of the baselines
answers: plain, the part alone, ReSpec, naive speculation, a drafter with a window.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from specrag.engine.passes import Coroutine, Emit, Search
from specrag.errors import InputError
from specrag.methods.base import Decoder, LocalModel
from specrag.methods.events import tap_steps
from specrag.methods.prefixes import KeptPrefixes, PrefixRead
from specrag.methods.prompts import Message, check_history
from specrag.methods.rapid.context.retriever import ContextRetriever
from specrag.methods.rapid.planner import LongQuestion, Plan, Planner
from specrag.methods.rapid.prompt import INSTRUCTION, ContextQuestion
from specrag.methods.rapid.readers import ContextMethod, ReadsPart, context_method
from specrag.methods.rapid.result import ContextAnswer, ContextStats
from specrag.request import DEFAULT_MAX_TOKENS, Options, Result, check_options
from specrag.retrieval.documents.contexts import ContextItem, documents_of
from specrag.speculation.decode import Step

if TYPE_CHECKING:
    from specrag.retrieval.documents.reader import Document


class LongContextPipeline:
    """Answers questions about long contexts.

    Args:
        llm: the target, such as :func:`specrag.load` makes.
        method: a :class:`~specrag.methods.rapid.readers.ContextMethod`, a decoder, or one whose drafter reads the part,
            such as ``RapidDecoder(drafter="smollm2-135m")``.
        retriever: finds the part that the drafter reads; by default one with the paper's settings.
        truncate_middle: leave out the middle of a context that does not fit the model's window, in whole chunks;
            otherwise the context is refused.
        memory_bytes: refuse requests that need more memory; by default the machine's free memory.
        reuse: hold the keys and values of the newest document, so that a second question about it does not read it
            again. Without ``batch_invariant`` a later question's text may then round differently.
        keep_prefix: also store them in files of this folder, for other processes; ``None`` for none.
        prefixes: holds and stores them instead of these two.
        system: a system message in front of everything.
        instruction: between the documents and the question.
        clock: seconds, the executor's.

    Raises:
        InputError: a value cannot be used.
    """

    name = "long-context"

    def __init__(  # noqa: PLR0913 - settings, each with a name of its own; methods give them as options
        self,
        llm: LocalModel,
        *,
        method: ContextMethod | Decoder | ReadsPart,
        retriever: ContextRetriever | None = None,
        truncate_middle: bool = False,
        memory_bytes: int | None = None,
        reuse: bool = True,
        keep_prefix: Path | None = None,
        prefixes: KeptPrefixes | None = None,
        system: str | None = None,
        instruction: str = INSTRUCTION,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if memory_bytes is not None and memory_bytes < 1:
            raise InputError("memory_bytes", memory_bytes, "give a number of bytes, or None")
        self.llm = llm
        self.method = context_method(method)
        self.retriever = retriever or ContextRetriever(clock=clock)
        self.memory_bytes = memory_bytes
        self.system = system
        self.instruction = instruction
        self._clock = clock
        self._planner = Planner(
            llm.loaded,
            self.method,
            self.retriever,
            truncate_middle=truncate_middle,
            free=self._free_bytes,
            clock=clock,
        )
        self._prefixes = prefixes
        if prefixes is None and (reuse or keep_prefix is not None):
            self._prefixes = KeptPrefixes(llm.loaded, llm.prefixes, folder=keep_prefix, clock=clock)

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

    def check(
        self,
        question: str,
        documents: ContextItem | Sequence[ContextItem] = (),
        *,
        history: Sequence[Message] = (),
        **options: Unpack[Options],
    ) -> None:
        """Check everything that can be wrong with a question; runs no model, but may load a drafter.

        Raises:
            InputError, ContextLengthError: as :meth:`answering` does.
        """
        self._planner.plan(self._request(question, documents, history, options))

    def release(self) -> None:
        """Forget the document whose keys and values are held in memory."""
        if self._prefixes is not None:
            self._prefixes.release()

    # -- the steps ------------------------------------------------------------------------------------------

    def _answering(self, question: LongQuestion, options: Options) -> Coroutine[ContextAnswer]:
        plan: Plan = yield Search(lambda: self._planner.plan(question))
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
        asked = ContextQuestion(question, earlier if found else (), self.system, self.instruction)
        return LongQuestion(
            asked,
            found,
            () if found else earlier,
            options.get("max_tokens", DEFAULT_MAX_TOKENS),
            checked.raw,
            checked.tenant,
        )

    def _free_bytes(self) -> int | None:
        if self.memory_bytes is not None:
            return self.memory_bytes
        from specrag.engine.memory import free_bytes

        free = free_bytes(self.llm.loaded.device)
        # What is held already serves this question too, or is dropped for it.
        return None if free is None else free + (0 if self._prefixes is None else self._prefixes.nbytes)


def _sum_up(plan: Plan, known: PrefixRead, generation: Result, steps: Sequence[Step]) -> ContextAnswer:
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
