"""A local model as a writer of many texts at once: one packed batch, whatever the prompts begin with read once."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from specrag.engine.executor import Executor
from specrag.engine.passes import Coroutine, Emit, gather
from specrag.engine.session import Session, check_room
from specrag.methods.base import DecodingMethod
from specrag.methods.generation import Generation, Prompt
from specrag.methods.options import Options
from specrag.methods.quiet import retell
from specrag.methods.two_lines import two_lines
from specrag.models.roles import Cue, GeneratedText, TextDelta, TextDone, TextPrompt, TextRequest, TextToken
from specrag.models.texts import encode_text
from specrag.models.tokenizer import TextStream
from specrag.speculation.decode import Step

if TYPE_CHECKING:
    from specrag.engine.processors import LogitsProcessor
    from specrag.models.loading import LoadedModel

#: A common beginning is read apart if that saves so many rows: it costs a pass of its own.
FEWEST_SAVED_ROWS = 64


class SharingModel(Protocol):
    """A language model that goes on from sessions, such as :class:`specrag.LanguageModel`."""

    @property
    def executor(self) -> Executor:
        """Runs the coroutines of everybody who uses this model."""

    @property
    def loaded(self) -> LoadedModel:
        """The model with its tokenizer."""

    def generating(
        self, prompt: Prompt, options: Options, begun: Session | None = None
    ) -> Coroutine[Generation]:
        """A coroutine that generates a text behind a session that holds the prompt's first tokens."""


class LocalGenerator:
    """A local model as a :class:`~specrag.models.roles.TextGenerator`.

    Args:
        llm: such as :func:`specrag.load` makes.
        method: how tokens are decoded: a name of :data:`~specrag.methods.registry.METHODS` or a configured method.
        share: read what several prompts begin with once.
        clock: seconds.
    """

    def __init__(
        self,
        llm: SharingModel,
        *,
        method: str | DecodingMethod = "plain",
        share: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.llm = llm
        self.method = method
        self.share = share
        self._clock = clock
        self._forms: dict[Cue, LogitsProcessor] = {}

    @property
    def name(self) -> str:
        """See :class:`~specrag.models.roles.TextGenerator`."""
        return self.llm.loaded.name

    @property
    def executor(self) -> Executor:
        """Where its coroutines run best: beside whatever else uses the model."""
        return self.llm.executor

    @property
    def context_length(self) -> int:
        """See :class:`~specrag.models.roles.TextGenerator`."""
        return self.llm.loaded.model.context_length

    def count(self, prompt: TextPrompt, lead: str = "") -> int:
        """See :class:`~specrag.models.roles.TextGenerator`."""
        return len(encode_text(self.llm.loaded.tokenizer, prompt, lead))

    def generating(self, requests: Sequence[TextRequest]) -> Coroutine[list[GeneratedText]]:
        """See :class:`~specrag.models.roles.TextGenerator`."""
        tokenizer = self.llm.loaded.tokenizer
        prompts = [encode_text(tokenizer, request.prompt, request.lead) for request in requests]
        for request, prompt in zip(requests, prompts, strict=True):
            check_room(self.llm.loaded.model, len(prompt) + 1)
            self.llm.generating(prompt, self._options(request)).close()  # checks, and does nothing
        return self._generating(requests, prompts)

    def _generating(
        self, requests: Sequence[TextRequest], prompts: Sequence[list[int]]
    ) -> Coroutine[list[GeneratedText]]:
        started = self._clock()
        begun = [_Begun(None, 0)] * len(prompts)
        if self.share and prompts:
            begun = yield from _read_shared(self.llm.loaded, prompts)
        writing = [
            self._write(number, request, prompt, start, started)
            for number, (request, prompt, start) in enumerate(zip(requests, prompts, begun, strict=True))
        ]
        return (yield from gather(writing))

    def _write(
        self, number: int, request: TextRequest, prompt: list[int], begun: _Begun, started: float
    ) -> Coroutine[GeneratedText]:
        def tell(event: object) -> Iterable[object]:
            if isinstance(event, Step) and event.text:
                yield TextDelta(number, event.text)

        shared = 0 if begun.session is None else len(begun.session)
        coroutine = self.llm.generating(prompt, self._options(request), begun.session)
        generation = yield from retell(coroutine, tell)
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
        if request.cue is not None:
            if request.cue not in self._forms:
                self._forms[request.cue] = two_lines(self.llm.loaded.tokenizer, request.cue)
            options["processors"] = (self._forms[request.cue],)
        return options

    def _tokens(self, generation: Generation) -> tuple[TextToken, ...]:
        stream = TextStream(self.llm.loaded.tokenizer)
        return tuple(TextToken(stream.push(token.token), token.log_prob) for token in generation.tokens)


@dataclass(frozen=True, slots=True)
class _Begun:
    """What is known of a prompt before its own reading.

    Attributes:
        session: holds its first tokens; ``None`` if none were read.
        read: tokens that were read for it and for those who share them.
    """

    session: Session | None
    read: int


def _read_shared(loaded: LoadedModel, prompts: Sequence[Sequence[int]]) -> Coroutine[list[_Begun]]:
    """Read what prompts begin with, each common beginning once, and fork a session for each prompt."""
    found: dict[int, _Begun] = {}
    yield from _read_group(loaded, prompts, list(range(len(prompts))), None, found)
    return [found[number] for number in range(len(prompts))]


def _read_group(
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    group: Sequence[int],
    session: Session | None,
    found: dict[int, _Begun],
    read: int = 0,
) -> Coroutine[None]:
    """Read on for prompts that begin with the session's tokens.

    Args:
        group: numbers of the prompts.
        read: tokens of the session that nobody has answered for yet; the group's first prompt does.
    """
    first = prompts[group[0]]
    # The newest token of a prompt is fed with its first round.
    end = min(len(prompts[number]) for number in group) - 1
    for number in group[1:]:
        end = next((place for place in range(end) if prompts[number][place] != first[place]), end)
    known = 0 if session is None else len(session)
    if len(group) > 1 and (end - known) * (len(group) - 1) >= FEWEST_SAVED_ROWS:
        session = Session(loaded.model) if session is None else session.fork()
        yield from session.extend(first[known:end])
        read += end - known
    parts: dict[int, list[int]] = defaultdict(list)
    for number in group:
        parts[prompts[number][end]].append(number)
    if len(parts) == 1:
        for place, number in enumerate(group):
            found[number] = _Begun(None if session is None else session.fork(), 0 if place else read)
        return
    reading = [
        _read_group(loaded, prompts, part, session, found, 0 if place else read)
        for place, part in enumerate(parts.values())
    ]
    yield from gather(reading)
