"""The Python interface: load a model, generate text."""

from __future__ import annotations

import difflib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeAlias, TypedDict, TypeVar, Unpack, cast

from specrag.engine.executor import Executor, Task
from specrag.engine.passes import Coroutine, Emit
from specrag.engine.prefix_cache import PrefixCache
from specrag.engine.processors import LogitsProcessor
from specrag.engine.sampling import SamplingParams
from specrag.engine.stopping import FinishReason, StopConditions
from specrag.errors import ContextLengthError, InputError
from specrag.methods.registry import DecodingMethod, find_method
from specrag.models.loading import LoadedModel, load_model
from specrag.models.tokenizer import TextStream
from specrag.speculation.decode import DecodedToken, Settings, Step

T = TypeVar("T")

#: Most alternatives that ``log_probs`` may ask for.
MAX_ALTERNATIVES = 20

#: A text, a conversation of ``{"role": ..., "content": ...}``, or token ids.
Prompt: TypeAlias = str | Sequence[Mapping[str, str]] | Sequence[int]


@dataclass(frozen=True, slots=True)
class Timing:
    """Wall-clock seconds of a request.

    Attributes:
        prefill: from the start to the first token, exclusive of its pass where nothing else ran.
        decode: from there to the end.
    """

    prefill: float
    decode: float

    @property
    def total(self) -> float:
        """Seconds of the whole request."""
        return self.prefill + self.decode


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of a request.

    Attributes:
        prompt_tokens: tokens of the prompt.
        cached_tokens: those of them found in the prefix cache.
        completion_tokens: tokens generated, a stop token included.
        passes: passes of the model after the prefill.
        drafted: tokens guessed.
        accepted: guesses kept.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    passes: int
    drafted: int
    accepted: int

    @property
    def mean_accepted_tokens(self) -> float:
        """Tokens a pass (MAT), the bonus token included."""
        return self.completion_tokens / self.passes if self.passes else 0.0


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished text.

    Attributes:
        text: the text, without stop token or stop string.
        tokens: every token with its source and, if asked for, its log-probability.
        finish_reason: ``"stop"`` or ``"length"``.
    """

    text: str
    tokens: tuple[DecodedToken, ...]
    finish_reason: FinishReason
    usage: Usage
    timing: Timing

    @property
    def tokens_per_second(self) -> float:
        """Of decoding alone."""
        return self.usage.completion_tokens / self.timing.decode if self.timing.decode else 0.0


@dataclass(frozen=True, slots=True)
class _Request:
    """A checked call of :meth:`LLM.generate`."""

    prompt: list[int]
    settings: Settings
    method: DecodingMethod
    tenant: str
    timeout: float | None


class Options(TypedDict, total=False):
    """Keyword arguments of every generating call.

    Args:
        max_tokens: at most this many tokens (default 256).
        temperature: 0, the default, takes the most probable token every time.
        top_k: draw among this many tokens; 0, the default, among all.
        top_p: draw among the most probable tokens that together have this probability (default 1).
        min_p: leave out tokens less probable than this share of the most probable one (default 0).
        repetition_penalty: above 1 makes tokens of prompt and output less probable.
        presence_penalty: subtracted from the logits of tokens that the output holds.
        frequency_penalty: subtracted once for each time that the output holds a token.
        logit_bias: added to the logits of these tokens; ``-inf`` forbids one.
        seed: the same seed gives the same text (default 0).
        stop: a string or several; the text ends before the first of them.
        log_probs: report log-probabilities, with this many alternatives (0 for none).
        processors: logits processors of your own, after the built-in ones.
        raw: take a text as it is; by default it is put into the model's chat template if there is one.
        ignore_eos: do not end at the model's end tokens (for measuring).
        method: how to decode (default ``plain``).
        tenant: whose prefix cache to use.
        timeout: seconds after which the request ends with an error.
    """

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    stop: str | Sequence[str]
    log_probs: int
    processors: Sequence[LogitsProcessor]
    raw: bool
    ignore_eos: bool
    method: str
    tenant: str
    timeout: float


_SAMPLING = tuple(field.name for field in fields(SamplingParams))
_DEFAULT_MAX_TOKENS = 256


class LLM:
    """A model that generates text. Made by :func:`load`.

    Calls from several threads, and asynchronous calls, share passes.

    Args:
        loaded: the model.
        prefix_cache_bytes: memory for keys and values of earlier prompts; 0 for none.
        clock: seconds, for deadlines and timings.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        prefix_cache_bytes: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.loaded = loaded
        self.model = loaded.model
        self.tokenizer = loaded.tokenizer
        self.executor = Executor(clock=clock)
        self._prefixes = PrefixCache(prefix_cache_bytes)
        self._clock = clock

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
        tasks = [self._submit(request) for request in requests]
        try:
            return [self.executor.run(task) for task in tasks]
        finally:
            for task in tasks:
                task.cancel()

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Iterator[Step]:
        """Generate a text and yield it as it comes: one :class:`~specrag.speculation.decode.Step` a round.

        A step's text never ends inside a character. Leaving the loop early ends the request.
        """
        return self._stream(self._request(prompt, options))

    async def agenerate(self, prompt: Prompt, **options: Unpack[Options]) -> Generation:
        """:meth:`generate` without blocking the event loop."""
        request = self._request(prompt, options)
        steps = [
            step
            async for step in self.executor.astream(
                self._finish(request), deadline=self._deadline(request)
            )
        ]
        generation = steps[-1]
        assert isinstance(generation, Generation)
        return generation

    async def astream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncIterator[Step]:
        """:meth:`stream` without blocking the event loop."""
        request = self._request(prompt, options)
        async for step in self.executor.astream(self._decode(request), deadline=self._deadline(request)):
            yield step

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
        raise InputError("prompt", prompt, "give a text, a list of messages, or a list of token ids")

    def _request(self, prompt: Prompt, options: Options) -> _Request:
        unknown = set(options) - set(Options.__annotations__)
        if unknown:
            name = min(unknown)
            near = difflib.get_close_matches(name, Options.__annotations__, n=1)
            known = f"did you mean {near[0]}?" if near else f"take one of {', '.join(Options.__annotations__)}"
            raise InputError("option", name, known)
        method = find_method(options.get("method", "plain"))
        sampling = SamplingParams(**{name: options[name] for name in _SAMPLING if name in options})  # type: ignore[literal-required]
        log_probs = options.get("log_probs")
        if log_probs is not None and not 0 <= log_probs <= MAX_ALTERNATIVES:
            raise InputError("log_probs", log_probs, f"give a number from 0 to {MAX_ALTERNATIVES}")
        timeout = options.get("timeout")
        if timeout is not None and not timeout > 0:
            raise InputError("timeout", timeout, "give seconds, more than 0")
        stop = options.get("stop", ())
        conditions = StopConditions(
            options.get("max_tokens", _DEFAULT_MAX_TOKENS),
            frozenset() if options.get("ignore_eos", False) else self.tokenizer.eos_tokens,
            (stop,) if isinstance(stop, str) else tuple(stop),
        )
        tokens = self.encode(prompt, raw=options.get("raw", False))
        if len(tokens) > self.model.context_length:
            raise ContextLengthError(
                "prompt",
                f"{len(tokens)} tokens",
                f"the model's context holds {self.model.context_length}; shorten it or take another model",
            )
        settings = Settings(conditions, sampling, log_probs, options.get("processors", ()))
        return _Request(tokens, settings, method, options.get("tenant", ""), timeout)

    def _deadline(self, request: _Request) -> float | None:
        return None if request.timeout is None else self._clock() + request.timeout

    def _submit(self, request: _Request) -> Task[Generation]:
        return self.executor.submit(self._decode(request), deadline=self._deadline(request))

    def _stream(self, request: _Request) -> Iterator[Step]:
        yield from self.executor.stream(self._submit(request))

    def _finish(self, request: _Request) -> Coroutine[None]:
        """Decode, and emit the generation itself at the end."""
        generation = yield from self._decode(request)
        yield Emit(generation)

    def _decode(self, request: _Request) -> Coroutine[Generation]:
        """Prefill, decode, and sum up."""
        started = self._clock()
        session = self._prefixes.start(self.model, request.prompt, request.tenant)
        try:
            cached = len(session)
            yield from session.extend(request.prompt[cached:])
            self._prefixes.keep(session, request.tenant)
            prefilled = self._clock()
            steps: list[Step] = []
            text = TextStream(self.tokenizer)
            # The loop's steps pass through here on their way to the caller, so that they can be summed up.
            reason = yield from _overhear(
                request.method(session, request.settings, text, self._clock), steps
            )
            return _sum_up(request, cached, steps, reason, Timing(prefilled - started, self._clock() - prefilled))
        finally:
            session.close()


def load(
    name: str | Path,
    *,
    dtype: str = "bf16",
    device: str | None = None,
    adapter: str | Path | None = None,
    batch_invariant: bool = False,
    prefix_cache_bytes: int = 0,
    progress: bool = False,
) -> LLM:
    """Load a model by name; fetch it first if it is in the catalog and not here yet.

    Args:
        name: a name of the catalog (``specrag models list``), a folder, a GGUF file, or a hub id.
        dtype: ``fp32``, ``bf16``, ``fp16``, or ``int8`` for 8-bit linear layers.
        device: a torch device; by default the first GPU if there is one, else the CPU.
        adapter: a folder with a LoRA adapter, merged into the weights.
        batch_invariant: a token's distribution has the same bits whatever else is in its pass.
        prefix_cache_bytes: memory for keys and values of earlier prompts; 0 for none.
        progress: show a bar while fetching and converting.
    """
    loaded = load_model(
        name, dtype=dtype, device=device, adapter=adapter, batch_invariant=batch_invariant, progress=progress
    )
    return LLM(loaded, prefix_cache_bytes=prefix_cache_bytes)


def _overhear(coroutine: Coroutine[T], steps: list[Step]) -> Coroutine[T]:
    """Pass a coroutine's requests on, noting the steps that it emits."""
    answer = None
    try:
        while True:
            request = coroutine.send(answer)
            if isinstance(request, Emit) and isinstance(request.value, Step):
                steps.append(request.value)
            answer = yield request
    except StopIteration as stop:
        result: T = stop.value
        return result
    finally:
        coroutine.close()


def _sum_up(
    request: _Request, cached: int, steps: Sequence[Step], reason: FinishReason, timing: Timing
) -> Generation:
    tokens = tuple(token for step in steps for token in step.tokens)
    usage = Usage(
        prompt_tokens=len(request.prompt),
        cached_tokens=cached,
        completion_tokens=len(tokens),
        passes=len(steps),
        drafted=sum(step.drafted for step in steps),
        accepted=sum(step.accepted for step in steps),
    )
    return Generation("".join(step.text for step in steps), tokens, reason, usage, timing)
