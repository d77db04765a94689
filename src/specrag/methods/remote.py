"""A model behind endpoints, as seen by methods above the token level: text in, text out, as it comes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from specrag.engine import Coroutine, Emit, Search
from specrag.errors import InputError, UpstreamError
from specrag.models.endpoint import (
    Call,
    CallError,
    Chunk,
    Counted,
    Piece,
    Prompts,
    Refused,
    as_finish_reason,
    read_answer,
)
from specrag.request import CheckedOptions, Event, Options, Prompt, Result, Timing, Usage, check_options
from specrag.speculation import Step

if TYPE_CHECKING:
    from specrag.engine import Executor
    from specrag.models import Tokenizer
    from specrag.models.endpoint import Pool

#: Default number of tokens of a model's context.
ASSUMED_CONTEXT = 4096

#: Options that are sent under their own names if they differ from these defaults.
_USUAL: Mapping[str, object] = {
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "ignore_eos": False,
}


@dataclass(frozen=True, slots=True)
class Relayed(Event):
    """An event: a part of an upstream's answer, or all of it.

    Attributes:
        pieces: of its choices.
        whole: whether it is the whole answer.
    """

    pieces: tuple[Piece, ...]
    whole: bool = False

    name: ClassVar[str] = "relayed"

    @property
    def text_gained(self) -> str:
        """The text gained by the first choice."""
        return "".join(piece.text for piece in self.pieces if piece.index == 0)


class RemoteModel:
    """Generates with a pool of endpoints; a :class:`~specrag.methods.base.Generator`.

    Args:
        pool: makes the calls.
        executor: runs the coroutines.
        tokenizer: the endpoints', if it is known here; without it tokens are estimated.
        context_length: tokens of prompt and output together, if the endpoints do not report it.
        clock: the executor's, in seconds.
    """

    def __init__(
        self,
        pool: Pool,
        executor: Executor,
        *,
        tokenizer: Tokenizer | None = None,
        context_length: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = pool
        self.executor = executor
        self.tokenizer = tokenizer
        self._prompts = Prompts(pool.name, tokenizer)
        self._given_length = context_length
        self._clock = clock

    @property
    def context_length(self) -> int:
        """The given one, else what the endpoints report, else :data:`ASSUMED_CONTEXT`."""
        return self._given_length or self.pool.context_length or ASSUMED_CONTEXT

    def count(self, prompt: Prompt, *, raw: bool = False) -> int:
        """Tokens of a prompt; rather too high an estimate if no tokenizer is known."""
        del raw
        if _is_tokens(prompt):
            return len(prompt)
        return self._prompts.count(prompt, "")  # type: ignore[arg-type]

    def generating(self, prompt: Prompt, options: Options) -> Coroutine[Result]:
        """See :class:`~specrag.methods.base.Generator`.

        Raises:
            InputError: an option cannot be used, or only by a local model.
        """
        return self._generating(self._call(prompt, options))

    def by_tokens(self, method: str) -> TokenEndpoint:
        """The same model for a method that continues from tokens.

        Args:
            method: its name, for the error.

        Raises:
            InputError: the endpoints' tokenizer is not known here.
        """
        if self.tokenizer is None:
            remedy = (
                "it goes on from tokens; name a local model with the endpoints' tokenizer as tokenizer of their "
                f"[[upstreams]] ({self.pool.name})"
            )
            raise InputError("method", method, remedy)
        return TokenEndpoint(self, self.tokenizer)

    def relaying(self, call: Call, choices: int, *, stream: bool) -> Coroutine[Result]:
        """A coroutine that forwards a request unchanged, and returns its answer through :class:`Relayed` events.

        Args:
            choices: number of choices that it asks for.
            stream: let the answer come in pieces.
        """
        return self._relaying_stream(call) if stream else self._relaying_whole(call, choices)

    # -- the calls ------------------------------------------------------------------------------------------

    def _call(self, prompt: Prompt, options: Options) -> Call:
        checked, body = self._body(options)
        if checked.raw or _is_tokens(prompt):
            return Call("/completions", {**body, "prompt": prompt})
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        return Call("/chat/completions", {**body, "messages": messages})

    def _body(self, options: Options) -> tuple[CheckedOptions, dict[str, object]]:
        checked = check_options(options)
        if checked.processors:
            raise InputError(
                "response_format", "a form", "leave it out; an upstream's text is kept to no form"
            )
        if checked.log_probs is not None:
            raise InputError("logprobs", checked.log_probs, "leave it out; only plain chat passes them on")
        body: dict[str, object] = {
            "max_tokens": checked.stop.max_tokens,
            "temperature": checked.sampling.temperature,
            "seed": checked.sampling.seed,
        }
        body |= {name: options[name] for name in _USUAL if options.get(name, _USUAL[name]) != _USUAL[name]}  # type: ignore[literal-required]
        if checked.stop.stop_strings:
            body["stop"] = list(checked.stop.stop_strings)
        if options.get("logit_bias"):
            body["logit_bias"] = {str(token): value for token, value in options["logit_bias"].items()}
        return checked, body

    def _generating(self, call: Call) -> Coroutine[Result]:
        text = ""
        progress = _Progress(self._clock)

        def step(gained: str, reason: str | None = None) -> Step:
            ended = None if reason is None else as_finish_reason(reason)
            return Step((), gained, {}, 0, seconds=progress.lap(), finish_reason=ended)

        stream = self.pool.stream(_streamed(call))
        try:
            while chunks := (yield Search(stream.next, remote=True)):
                gained = "".join(progress.take(chunk) for chunk in chunks)
                if gained:
                    text += gained
                    yield Emit(step(gained))
        finally:
            stream.cancel()
        yield Emit(step("", progress.reason))
        return progress.result(text)

    def _relaying_stream(self, call: Call) -> Coroutine[Result]:
        text = ""
        progress = _Progress(self._clock)
        stream = self.pool.stream(_streamed(call))
        try:
            while chunks := (yield Search(stream.next, remote=True)):
                for chunk in chunks:
                    text += progress.take(chunk)
                    if chunk.pieces:
                        yield Emit(Relayed(chunk.pieces))
        finally:
            stream.cancel()
        return progress.result(text)

    def _relaying_whole(self, call: Call, choices: int) -> Coroutine[Result]:
        progress = _Progress(self._clock)
        calls = self.pool.begin([call])
        try:
            answered = yield Search(calls.next, remote=True)
            chunk = self._whole(answered.answer(), choices)
        finally:
            calls.cancel()
        text = progress.take(chunk)
        yield Emit(Relayed(chunk.pieces, whole=True))
        return progress.result(text, streamed=False)

    def _whole(self, answer: Any, choices: int) -> Chunk:
        try:
            return read_answer(answer, choices)
        except CallError as error:
            raise UpstreamError(self.pool.name, error.reason, status=error.status) from None


@dataclass(frozen=True, slots=True)
class Written:
    """Tokens that an endpoint has written.

    Attributes:
        tokens: ids, as reported by the endpoint, or else those of its text.
        ended: whether the model has ended the text.
    """

    tokens: tuple[int, ...]
    ended: bool


class TokenEndpoint:
    """A model behind endpoints for methods that continue from tokens, a few per call.

    The endpoint remembers what it has read of a prompt, if it supports that. Made by :meth:`RemoteModel.by_tokens`.

    Args:
        model: makes the calls.
        tokenizer: the endpoints'.
    """

    def __init__(self, model: RemoteModel, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._model = model

    @property
    def executor(self) -> Executor:
        """The model's executor."""
        return self._model.executor

    @property
    def context_length(self) -> int:
        """The model's context length."""
        return self._model.context_length

    def check(self, options: Options) -> None:
        """Check what every call would ask for.

        Raises:
            InputError: an option cannot be used, or only for a text that is written in one call.
        """
        self._model._body(options)
        for name in ("presence_penalty", "frequency_penalty"):
            if options.get(name):
                remedy = "leave it out; endpoints count only what they write in one call"
                raise InputError(name, options[name], remedy)

    def writing(self, tokens: Sequence[int], most: int, options: Options) -> Coroutine[Written]:
        """A coroutine that writes a limited number of tokens after others; emits nothing.

        Args:
            tokens: ids, starting with the prompt's first.
            most: maximum number of new tokens.
            options: of the text; the caller handles stop strings.
        """
        asked: Options = {**options, "max_tokens": most, "stop": ()}
        body = {**self._model._body(asked)[1], "prompt": list(tokens)}
        pool = self._model.pool
        if pool.tells_tokens:
            try:
                return self._read((yield from _answering(pool, {**body, "return_token_ids": True})))
            except Refused:  # OpenAI's own servers refuse fields that they do not know
                found = self._read((yield from _answering(pool, body)))
                pool.tells_tokens = False
                return found
        return self._read((yield from _answering(pool, body)))

    def _read(self, answer: Any) -> Written:
        (piece,) = self._model._whole(answer, 1).pieces
        told = answer["choices"][0].get("token_ids")
        if not isinstance(told, list) or not all(
            isinstance(token, int) and 0 <= token < 2**31 for token in told
        ):
            # The beginning of a character is not text yet; it is written again with its end.
            told = self.tokenizer.encode_inside(piece.text.rstrip("\ufffd"))
        return Written(tuple(told), piece.finish_reason != "length")


def _answering(pool: Pool, body: Mapping[str, object]) -> Coroutine[Any]:
    calls = pool.begin([Call("/completions", body)])
    try:
        answered = yield Search(calls.next, remote=True)
        return answered.answer()
    finally:
        calls.cancel()


class _Progress:
    """What is known about a text while it comes.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = self._last = clock()
        self._first: float | None = None
        self._pieces = 0
        self._counted = Counted()
        self.reason = "stop"

    def take(self, chunk: Chunk) -> str:
        """Add a chunk; returns what the first choice gains from it."""
        self._counted = chunk.counted or self._counted
        gained = ""
        for piece in chunk.pieces:
            self._pieces += piece.is_content and not piece.finish_reason
            if piece.index == 0:
                gained += piece.text
                self.reason = piece.finish_reason or self.reason
        if chunk.is_content and self._first is None:
            self._first = self._clock()
        return gained

    def lap(self) -> float:
        """Seconds since the previous call."""
        last, self._last = self._last, self._clock()
        return self._last - last

    def result(self, text: str, *, streamed: bool = True) -> Result:
        """The text with the endpoint's token counts; without them each piece counts as a token.

        Args:
            streamed: the first token was seen when it came; otherwise only the total time is known.
        """
        now, counted = self._clock(), self._counted
        first = now if self._first is None or not streamed else self._first
        completion = self._pieces if counted.completion is None else counted.completion
        usage = Usage(counted.prompt or 0, counted.cached or 0, completion, 0, {}, {})
        reason = as_finish_reason(self.reason)
        return Result(text, (), reason, usage, Timing(first - self._began, now - first))


def _streamed(call: Call) -> Call:
    return Call(call.path, {**(call.body or {}), "stream": True, "stream_options": {"include_usage": True}})


def _is_tokens(prompt: Prompt) -> bool:
    return bool(prompt) and isinstance(prompt[0], int)
