"""A local model as a writer of texts, constrained to the rationale format on request."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from specrag.engine import Coroutine, Emit, Executor, Logits, Session, check_room, gather
from specrag.methods.base import Decoder
from specrag.methods.events import map_events
from specrag.models import (
    AnswerFormat,
    GeneratedText,
    LocalScorer,
    TextDelta,
    TextDone,
    TextGenerator,
    TextPrompt,
    TextRequest,
    TextScorer,
    TextStream,
    TextToken,
    encode_text,
)
from specrag.request import Options, Prompt, Result
from specrag.speculation import Step

if TYPE_CHECKING:
    from specrag.engine import LogitsProcessor
    from specrag.models import LoadedModel, Tokenizer


@dataclass(frozen=True, slots=True)
class FormatState:
    """Position in the rationale format.

    Attributes:
        line: 0 in the first line, 1 in the cue, 2 in the second line.
        tokens: number of tokens in it so far.
        second: tokens of the second line.
    """

    line: int = 0
    tokens: int = 0
    second: tuple[int, ...] = ()


class RationaleFormat:
    """A :class:`~specrag.engine.processors.LogitsProcessor` for :class:`~specrag.models.roles.AnswerFormat`.

    Anything that would end the first line, a line end or the end of the text, becomes the cue with their joint
    probability; anything that would end the second becomes the end of the text. No line is empty. A model that knows
    the form writes what it would have written anyway.

    Args:
        cue: tokens, the first of which contains a line end.
        within: the first line has at most this many tokens.
        line_ends: tokens that contain a line end.
        ends: tokens that end a text.
        choices: tokens of what the second line may be; anything if there are none.
    """

    def __init__(
        self,
        cue: Sequence[int],
        within: int,
        line_ends: NDArray[np.int64],
        ends: Sequence[int],
        choices: Sequence[Sequence[int]] = (),
    ) -> None:
        self._cue = tuple(cue)
        self._choices = [tuple(choice) for choice in choices]
        self._within = within
        self._ends = tuple(ends)
        self._all_ends = np.union1d(line_ends, np.array(ends, dtype=np.int64)).astype(np.int64)

    def start(self, prompt: Sequence[int]) -> FormatState:  # noqa: ARG002
        return FormatState()

    def advance(self, state: FormatState, token: int) -> FormatState:
        begins_cue = state.line == 0 and token == self._cue[0]
        second = (*state.second, token) if state.line == 2 else ()
        after = FormatState(1, 1) if begins_cue else FormatState(state.line, state.tokens + 1, second)
        return FormatState(2, 0) if after.line == 1 and after.tokens == len(self._cue) else after

    def apply(self, logits: Logits, state: FormatState) -> Logits:
        if state.line == 1:
            return _only(logits, self._cue[state.tokens])
        if state.line == 0 and state.tokens >= self._within:
            return _only(logits, self._cue[0])
        if state.line == 2 and self._choices:
            return self._choose(logits, state.second)
        into = self._cue[0] if state.line == 0 else self._ends[0] if self._ends else None
        ends = self._all_ends[self._all_ends < len(logits)]
        processed = logits.copy()
        processed[ends] = -np.inf
        if state.tokens and into is not None:
            processed[into] = np.logaddexp.reduce(logits[ends])
        return processed

    def _choose(self, logits: Logits, second: tuple[int, ...]) -> Logits:
        """Allow only what continues towards one of the choices, or the end after a complete one."""
        ends = self._all_ends[self._all_ends < len(logits)]
        processed = np.full_like(logits, -np.inf)
        for choice in self._choices:
            if choice[: len(second)] == second and len(choice) > len(second):
                processed[choice[len(second)]] = logits[choice[len(second)]]
        if second in self._choices:
            processed[self._ends[0] if self._ends else ends[0]] = np.logaddexp.reduce(logits[ends])
        return processed


class RareBeginning:
    """A :class:`~specrag.engine.processors.LogitsProcessor` for :class:`~specrag.models.roles.Reluctance`.

    Its state is the number of tokens so far.
    """

    def __init__(self, token: int, nats: float) -> None:
        self._token = token
        self._nats = nats

    def start(self, prompt: Sequence[int]) -> int:  # noqa: ARG002
        return 0

    def advance(self, state: int, token: int) -> int:  # noqa: ARG002
        return state + 1

    def apply(self, logits: Logits, state: int) -> Logits:
        if state:
            return logits
        processed = logits.copy()
        processed[self._token] -= self._nats
        return processed


def rationale_format(tokenizer: Tokenizer, answer_format: AnswerFormat) -> RationaleFormat:
    """The processor for a tokenizer."""
    cue = answer_format.cue
    choices = [_behind(tokenizer, "0" + cue, choice) for choice in answer_format.choices]
    ends = sorted(tokenizer.eos_tokens)
    within = answer_format.within
    return RationaleFormat(_behind(tokenizer, "0", cue), within, tokenizer.line_ends, ends, choices)


def _behind(tokenizer: Tokenizer, before: str, text: str) -> list[int]:
    """The tokens of a text that follows another."""
    placed = tokenizer.encode_with_starts(before + text, special=False)
    both = zip(placed.tokens, placed.starts, strict=True)
    return [token for token, start in both if start >= len(before)]


def _only(logits: Logits, token: int) -> Logits:
    forced = np.full_like(logits, -np.inf)
    forced[token] = 0
    return forced


#: A common beginning is read separately if that saves this many rows, since it costs a pass of its own.
FEWEST_SAVED_ROWS = 64


class SharingModel(Protocol):
    """A language model that continues from sessions, such as :class:`specrag.LanguageModel`."""

    @property
    def executor(self) -> Executor:
        """Runs the coroutines of all users of this model."""

    @property
    def loaded(self) -> LoadedModel:
        """The model with its tokenizer."""

    def generating(self, prompt: Prompt, options: Options, begun: Session | None = None) -> Coroutine[Result]:
        """A coroutine that generates a text after a session that holds the prompt's first tokens."""


class LocalGenerator:
    """A local model as a :class:`~specrag.models.roles.TextGenerator`.

    Args:
        llm: such as :func:`specrag.load` makes.
        method: how tokens are decoded: a name (:func:`~specrag.methods.registry.method_names`) or a configured method.
        share: read a beginning common to several prompts only once.
        clock: seconds.
    """

    def __init__(
        self,
        llm: SharingModel,
        *,
        method: str | Decoder = "plain",
        share: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.llm = llm
        self.method = method
        self.share = share
        self._clock = clock
        self._forms: dict[AnswerFormat, LogitsProcessor] = {}

    @property
    def name(self) -> str:
        return self.llm.loaded.name

    @property
    def executor(self) -> Executor:
        """Where its coroutines run best: together with other users of the model."""
        return self.llm.executor

    @property
    def context_length(self) -> int:
        return self.llm.loaded.model.context_length

    def count(self, prompt: TextPrompt, lead: str = "") -> int:
        return len(encode_text(self.llm.loaded.tokenizer, prompt, lead))

    def generating(self, requests: Sequence[TextRequest]) -> Coroutine[list[GeneratedText]]:
        tokenizer = self.llm.loaded.tokenizer
        prompts = [encode_text(tokenizer, request.prompt, request.lead) for request in requests]
        for request, prompt in zip(requests, prompts, strict=True):
            check_room(self.llm.loaded.model, len(prompt) + 1)
            self.llm.generating(prompt, self._options(request)).close()  # only checks
        return self._generating(requests, prompts)

    def _generating(
        self, requests: Sequence[TextRequest], prompts: Sequence[list[int]]
    ) -> Coroutine[list[GeneratedText]]:
        started = self._clock()
        begun = [_SharedStart(None, 0)] * len(prompts)
        if self.share and prompts:
            begun = yield from _read_shared(self.llm.loaded, prompts)
        writing = [
            self._write(number, request, prompt, start, started)
            for number, (request, prompt, start) in enumerate(zip(requests, prompts, begun, strict=True))
        ]
        try:
            return (yield from gather(writing))
        finally:  # including those that were never started
            for start in begun:
                start.close()

    def _write(
        self, number: int, request: TextRequest, prompt: list[int], begun: _SharedStart, started: float
    ) -> Coroutine[GeneratedText]:
        def tell(event: object) -> Iterable[object]:
            if isinstance(event, Step) and event.text:
                yield TextDelta(number, event.text)

        shared = 0 if begun.session is None else len(begun.session)
        coroutine = self.llm.generating(prompt, self._options(request), begun.session)
        generation = yield from map_events(coroutine, tell)
        written = GeneratedText(
            text=generation.text,
            tokens=self._tokens(generation),
            finish_reason=generation.finish_reason,
            prompt_tokens=len(prompt),
            # What the model's own prefix cache held was not read either.
            read_tokens=len(prompt) - max(shared, generation.usage.cached_tokens) + begun.read,
            passes=generation.usage.passes,
            seconds=self._clock() - started,
            drafted_by=generation.usage.drafted_by,
            accepted_by=generation.usage.accepted_by,
        )
        yield Emit(TextDone(number, written))
        return written

    def _options(self, request: TextRequest) -> Options:
        options: Options = {
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
            "stop": request.stop,
            "references": request.references,
            "log_probs": 0,
            "method": self.method,
        }
        if request.answer_format is not None:
            if request.answer_format not in self._forms:
                self._forms[request.answer_format] = rationale_format(
                    self.llm.loaded.tokenizer, request.answer_format
                )
            options["processors"] = (self._forms[request.answer_format],)
        if request.reluctance is not None:
            token = _behind(self.llm.loaded.tokenizer, request.lead, request.reluctance.text)[0]
            rare = RareBeginning(token, request.reluctance.nats)
            options["processors"] = (*options.get("processors", ()), rare)
        return options

    def _tokens(self, generation: Result) -> tuple[TextToken, ...]:
        stream = TextStream(self.llm.loaded.tokenizer)
        return tuple(TextToken(stream.push(token.token), token.log_prob) for token in generation.tokens)


@dataclass(frozen=True, slots=True)
class _SharedStart:
    """What is known of a prompt before it is read itself.

    Attributes:
        session: holds its first tokens; ``None`` if none were read.
        read: tokens that were read for it and for the prompts that share them.
    """

    session: Session | None
    read: int

    def close(self) -> None:
        """Close the session."""
        if self.session is not None:
            self.session.close()


def _read_shared(loaded: LoadedModel, prompts: Sequence[Sequence[int]]) -> Coroutine[list[_SharedStart]]:
    """Read the beginnings of prompts, each common beginning once, and fork a session for each prompt."""
    found: dict[int, _SharedStart] = {}
    try:
        yield from _read_group(loaded, prompts, list(range(len(prompts))), None, found)
    except BaseException:
        for begun in found.values():
            begun.close()
        raise
    return [found[number] for number in range(len(prompts))]


def _read_group(
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    group: Sequence[int],
    session: Session | None,
    found: dict[int, _SharedStart],
    read: int = 0,
) -> Coroutine[None]:
    """Continue reading for prompts that begin with the session's tokens.

    Args:
        group: numbers of the prompts.
        read: tokens of the session not counted for any prompt yet; the group's first prompt counts them.
    """
    first = prompts[group[0]]
    # The newest token of a prompt is fed with its first round.
    end = min(len(prompts[number]) for number in group) - 1
    for number in group[1:]:
        end = next((place for place in range(end) if prompts[number][place] != first[place]), end)
    known = 0 if session is None else len(session)
    own: Session | None = None
    if len(group) > 1 and (end - known) * (len(group) - 1) >= FEWEST_SAVED_ROWS:
        own = session = Session(loaded.model) if session is None else session.fork()
    try:
        if own is not None:
            yield from own.extend(first[known:end])
            read += end - known
        parts: dict[int, list[int]] = defaultdict(list)
        for number in group:
            parts[prompts[number][end]].append(number)
        if len(parts) == 1:
            for place, number in enumerate(group):
                found[number] = _SharedStart(
                    None if session is None else session.fork(), 0 if place else read
                )
            return
        reading = [
            _read_group(loaded, prompts, part, session, found, 0 if place else read)
            for place, part in enumerate(parts.values())
        ]
        yield from gather(reading)
    finally:
        if own is not None:
            own.close()


def as_generator(model: TextGenerator | SharingModel) -> TextGenerator:
    """The model itself if it writes texts, otherwise a writer around a loaded language model that decodes plainly."""
    return model if isinstance(model, TextGenerator) else LocalGenerator(model)


def as_scorer(model: TextScorer | SharingModel) -> TextScorer:
    """The model itself if it scores texts, otherwise a scorer around a loaded language model."""
    return model if isinstance(model, TextScorer) else LocalScorer(model.loaded)
