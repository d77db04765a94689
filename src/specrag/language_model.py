"""The Python interface: load a model, generate text."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack, cast

from specrag.engine.executor import MAX_ROWS, Executor
from specrag.engine.passes import Coroutine, Emit, gather
from specrag.engine.prefix_cache import PrefixCache
from specrag.engine.session import PREFILL_ROWS, Session, check_room
from specrag.engine.stopping import FinishReason
from specrag.engine.task import Task
from specrag.errors import InputError
from specrag.methods.base import DecodingMethod, read_prompt
from specrag.methods.generation import Generation, Prompt, Timing, Usage
from specrag.methods.options import Options, check_options
from specrag.methods.quiet import overhear
from specrag.methods.registry import make_method
from specrag.models.loading import LoadedModel, load_model
from specrag.models.tokenizer import TextStream
from specrag.speculation.decode import TARGET, Settings, Step

_PROMPT_KINDS = "give a text, a list of messages, or a list of token ids"


@dataclass(frozen=True, slots=True)
class _Request:
    """A checked call of :meth:`LanguageModel.generate`."""

    prompt: list[int]
    settings: Settings
    method: DecodingMethod
    tenant: str
    timeout: float | None


class LanguageModel:
    """A model that generates text. Made by :func:`load`.

    Calls from several threads, and asynchronous calls, share passes.

    Args:
        loaded: the model.
        prefix_cache_bytes: memory for keys and values of earlier texts; 0 for none.
        max_rows: of a pass that several requests share.
        prefill_rows: of one prompt in a pass: fewer let others wait less.
        clock: seconds, for deadlines and timings.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        prefix_cache_bytes: int = 0,
        max_rows: int = MAX_ROWS,
        prefill_rows: int = PREFILL_ROWS,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.loaded = loaded
        self.model = loaded.model
        self.tokenizer = loaded.tokenizer
        self.executor = Executor(clock=clock, max_rows=max_rows)
        self._prefixes = PrefixCache(prefix_cache_bytes)
        self._clock = clock
        self._prefill_rows = prefill_rows
        self._methods: dict[str, DecodingMethod] = {}

    @property
    def context_length(self) -> int:
        """Largest number of tokens of prompt and output together."""
        return self.model.context_length

    @property
    def prefixes(self) -> PrefixCache:
        """Keys and values of earlier texts, for coroutines of :attr:`executor`."""
        return self._prefixes

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Generation:
        """Generate a text; the arguments are :class:`Options`.

        Raises:
            InputError: a value cannot be used.
            ContextLengthError: the prompt does not fit the model's context.
            DeadlineExceeded: the timeout passed.
        """
        return self.executor.run(self._submit(self._request(prompt, options)))

    def generate_batch(self, prompts: Sequence[Prompt], **options: Unpack[Options]) -> list[Generation]:
        """Generate a text for each prompt, in the same passes. Every prompt is checked before any work."""
        requests = [self._request(prompt, options) for prompt in prompts]
        if not requests:
            return []
        together = gather([self._decode(request) for request in requests])
        return self.executor.run(self.executor.submit(together, deadline=self._deadline(requests[0])))

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Generator[Step, None, Generation]:
        """Generate a text and yield it as it comes: one :class:`~specrag.speculation.decode.Step` a round.

        A step's text never ends inside a character. Leaving the loop early ends the request. The generator
        returns the whole generation, for those who ask with ``yield from``.
        """
        return self._stream(self._request(prompt, options))

    async def agenerate(self, prompt: Prompt, **options: Unpack[Options]) -> Generation:
        """:meth:`generate` without blocking the event loop."""
        request = self._request(prompt, options)
        generation: object = None
        emissions = self.executor.astream(self._finish(request), deadline=self._deadline(request))
        async with aclosing(emissions):
            async for generation in emissions:  # noqa: B007 - the last one is the generation
                pass
        assert isinstance(generation, Generation)
        return generation

    async def astream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncIterator[Step]:
        """:meth:`stream` without blocking the event loop."""
        request = self._request(prompt, options)
        steps = self.executor.astream(self._decode(request), deadline=self._deadline(request))
        async with aclosing(steps):
            async for step in steps:
                yield step

    def generating(
        self, prompt: Prompt, options: Options, begun: Session | None = None
    ) -> Coroutine[Generation]:
        """A coroutine for `executor` that does what :meth:`generate` does and emits what :meth:`stream` yields.

        The prompt and the options are checked at the call; a timeout is the business of who submits it.

        Args:
            begun: holds the first tokens of the prompt, at most all but one; closed at the end. By default they are
                looked for in the prefix cache.
        """
        return self._decode(self._request(prompt, options), begun)

    def close(self) -> None:
        """End what is running and release the prefix cache."""
        self.executor.close()
        self._prefixes.clear()

    # -- requests -------------------------------------------------------------------------------------------

    def encode(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """The tokens that the model reads for a prompt.

        Raises:
            InputError: the prompt is empty or of a wrong kind.
        """
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
            raise InputError("prompt", prompt, _PROMPT_KINDS)
        if not prompt:
            raise InputError("prompt", prompt, "give at least one character")
        if isinstance(prompt, str):
            if not raw and self.tokenizer.has_chat_template:
                return self.tokenizer.chat([{"role": "user", "content": prompt}])
            return self.tokenizer.encode(prompt, special=True)
        if all(isinstance(part, int) for part in prompt):
            return list(cast("Sequence[int]", prompt))
        if all(isinstance(part, Mapping) for part in prompt):
            return self.tokenizer.chat(cast("Sequence[Mapping[str, str]]", prompt))
        raise InputError("prompt", prompt, _PROMPT_KINDS)

    def _request(self, prompt: Prompt, options: Options) -> _Request:
        checked = check_options(options)
        tokens = self.encode(prompt, raw=checked.raw)
        check_room(self.model, len(tokens))
        ends = frozenset() if checked.ignore_eos else self.tokenizer.eos_tokens
        conditions = replace(checked.stop, stop_tokens=ends)
        references = tuple(tuple(self.tokenizer.encode(text, special=False)) for text in checked.references)
        settings = Settings(conditions, checked.sampling, checked.log_probs, checked.processors, references)
        return _Request(tokens, settings, self._method(checked.method), checked.tenant, checked.timeout)

    def _method(self, method: str | DecodingMethod) -> DecodingMethod:
        """The methods asked for by name are kept: they learn what a pass costs here."""
        if isinstance(method, str):
            if method not in self._methods:
                self._methods[method] = make_method(method)
            method = self._methods[method]
        method.check(self.loaded)
        return method

    def _deadline(self, request: _Request) -> float | None:
        return None if request.timeout is None else self._clock() + request.timeout

    def _submit(self, request: _Request) -> Task[Generation]:
        return self.executor.submit(self._decode(request), deadline=self._deadline(request))

    def _stream(self, request: _Request) -> Generator[Step, None, Generation]:
        task = self._submit(request)
        yield from self.executor.stream(task)
        return task.result()

    def _finish(self, request: _Request) -> Coroutine[None]:
        """Decode, and emit the generation itself at the end."""
        generation = yield from self._decode(request)
        yield Emit(generation)

    def _decode(self, request: _Request, begun: Session | None = None) -> Coroutine[Generation]:
        """Prefill, decode, and sum up. Loops that are compiled on the way, at a first run, count for no time."""
        from specrag.engine.compiling import without_compiling  # imports the compiler

        with without_compiling(self._clock) as clock:
            return (yield from self._timed(request, begun, clock))

    def _timed(
        self, request: _Request, begun: Session | None, clock: Callable[[], float]
    ) -> Coroutine[Generation]:
        started = clock()
        session = self._prefixes.start(self.model, request.prompt, request.tenant) if begun is None else begun
        try:
            cached = len(session)
            prompt_rows = yield from read_prompt(
                session, request.prompt[cached:], request.method.prompt_needs, self._prefill_rows
            )
            self._prefixes.keep(session, request.tenant)
            prefilled = clock()
            steps: list[Step] = []
            text = TextStream(self.tokenizer)
            # The loop's steps pass through here on their way to the caller, so that they can be summed up.
            reason = yield from overhear(
                request.method.decode(session, request.settings, text, clock, prompt_rows), steps
            )
            decoded = clock()
            # The next turn of a conversation begins with the answer too.
            self._prefixes.keep(session, request.tenant)
            timing = Timing(
                prefilled - started,
                decoded - prefilled,
                sum(step.drafting for step in steps),
                sum(step.verifying for step in steps),
            )
            return _sum_up(request, cached, steps, reason, timing)
        finally:
            session.close()


def load(
    name: str | Path,
    *,
    dtype: str = "bf16",
    device: str | None = None,
    adapter: str | Path | None = None,
    batch_invariant: bool = False,
    kv_dtype: str = "auto",
    prefix_cache_bytes: int = 0,
    progress: bool = False,
) -> LanguageModel:
    """Load a model by name; fetch it first if it is in the catalog and not here yet.

    Args:
        name: a name of the catalog (``specrag models list``), a folder, a GGUF file, or a hub id.
        dtype: ``fp32``, ``bf16``, ``fp16``, or ``int8`` for 8-bit linear layers.
        device: a torch device; by default the first GPU if there is one, else the CPU.
        adapter: a folder with a LoRA adapter, or the name of one that comes with specrag; merged into the weights.
        batch_invariant: a token's distribution has the same bits whatever else is in its pass.
        kv_dtype: ``auto``, or ``int8`` for keys and values in 8 bits, which take about half the memory; the text may
            differ a little.
        prefix_cache_bytes: memory for keys and values of earlier texts; 0 for none. Without
            ``batch_invariant`` a prompt found there may round differently from one that is read anew.
        progress: show a bar while fetching and converting.
    """
    loaded = load_model(
        name,
        dtype=dtype,
        device=device,
        adapter=adapter,
        batch_invariant=batch_invariant,
        kv_dtype=kv_dtype,
        progress=progress,
    )
    return LanguageModel(loaded, prefix_cache_bytes=prefix_cache_bytes)


def _sum_up(
    request: _Request, cached: int, steps: Sequence[Step], reason: FinishReason, timing: Timing
) -> Generation:
    tokens = tuple(token for step in steps for token in step.tokens)
    drafted_by: Counter[str] = Counter()
    for step in steps:
        drafted_by.update(step.drafted_by)
    usage = Usage(
        prompt_tokens=len(request.prompt),
        cached_tokens=cached,
        completion_tokens=len(tokens),
        passes=len(steps),
        drafted_by=dict(drafted_by),
        accepted_by=dict(Counter(token.source for token in tokens if token.source != TARGET)),
        relaxed=sum(token.relaxed for token in tokens),
    )
    return Generation("".join(step.text for step in steps), tokens, reason, usage, timing)
