"""Interfaces of language models above the token level, local or remote: text generators and text scorers.

Both roles are coroutines (:mod:`specrag.engine.passes`), so that a method is one coroutine whatever its models are: a
local model asks for passes, which the executor packs with everybody else's; an endpoint asks for
:class:`~specrag.engine.passes.Search`, which runs in a thread meanwhile. Whoever wants a plain call runs the coroutine
with :func:`specrag.engine.executor.run`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, runtime_checkable

from specrag.engine.passes import Coroutine
from specrag.engine.stopping import FinishReason
from specrag.errors import InputError

#: A text that the model reads as it is, or a conversation of ``{"role": ..., "content": ...}``, oldest message first,
#: that goes through the model's chat template; where there is none, the messages one below the other.
TextPrompt: TypeAlias = str | Sequence[Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Cue:
    r"""A form of two lines: where the model would end the first, ``text`` is written; the second ends the text.

    A small model forgets the second line otherwise. Only a local model can be steered so; an endpoint leaves it to the
    prompt, and whoever reads the text must be ready for what comes.

    Args:
        text: begins with a line end, such as ``"\\nAnswer:"``.
        within: the first line has at most this many tokens.
        choices: what may follow in the second line, each with its leading space; anything if there are none.
    """

    text: str
    within: int = 96
    choices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.text.startswith("\n"):
            raise InputError("cue", self.text, "begin it with a line end")
        if isinstance(self.within, bool) or not isinstance(self.within, int) or self.within < 1:
            raise InputError("within", self.within, "give an integer from 1 upwards")
        if any(not choice.strip() or "\n" in choice for choice in self.choices):
            raise InputError("choices", self.choices, "give texts of one line")


@dataclass(frozen=True, slots=True)
class Reluctance:
    """What a text should begin with only where a local model is surer of it.

    Args:
        text: of which the first token counts.
        nats: taken from its logit.
    """

    text: str
    nats: float


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A text to write.

    Args:
        prompt: what the model reads.
        lead: how the answer begins; it is not part of what is returned.
        max_tokens: at most this many tokens, an end token included.
        stop: the text ends before the first of these strings.
        temperature: 0 takes the most probable token every time.
        seed: the same seed gives the same text, as far as the model keeps its word.
        references: texts that the answer may quote; a local model that copies guesses uses them, an endpoint does not.
        cue: a form to keep to, for those who can.
        reluctance: what it should begin with more rarely, for those who can.

    Raises:
        InputError: a value cannot be used.
    """

    prompt: TextPrompt
    lead: str = ""
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    temperature: float = 0.0
    seed: int = 0
    references: tuple[str, ...] = ()
    cue: Cue | None = None
    reluctance: Reluctance | None = None

    def __post_init__(self) -> None:
        check_prompt(self.prompt)
        if isinstance(self.max_tokens, bool) or not isinstance(self.max_tokens, int) or self.max_tokens < 1:
            raise InputError("max_tokens", self.max_tokens, "give an integer from 1 upwards")
        for name, value in (("stop", self.stop), ("references", self.references)):
            if isinstance(value, str) or not all(isinstance(text, str) for text in value):
                raise InputError(name, value, "give a tuple of texts")
        if not self.temperature >= 0:
            raise InputError("temperature", self.temperature, "give 0 or more")


@dataclass(frozen=True, slots=True)
class TextToken:
    """A token of a text.

    Attributes:
        text: its characters; empty for an end token and inside a character of several tokens.
        log_prob: nats, at temperature 1; ``None`` where the model does not tell.
    """

    text: str
    log_prob: float | None


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """A written text.

    Attributes:
        text: without the lead, end token or stop string.
        tokens: in order, end token and those of a stop string included; their texts, joined, begin with :attr:`text`.
        finish_reason: ``"stop"`` or ``"length"``.
        prompt_tokens: tokens of the prompt, lead included.
        read_tokens: those of them that were read for this text alone; the others were shared with the requests of the
            same call that begin alike, or remembered, and the first of these counts them.
        passes: passes of the model, that of the prompt not counted; 0 where the model does not tell.
        seconds: from the call to the text's end.
        drafted_by, accepted_by: tokens by the drafter that guessed them; empty where the model does not tell.
    """

    text: str
    tokens: tuple[TextToken, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    read_tokens: int
    passes: int
    seconds: float
    drafted_by: Mapping[str, int] = field(default_factory=dict)
    accepted_by: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TextDelta:
    """An event: characters that one of the texts has gained.

    Attributes:
        request: index of the request.
    """

    request: int
    text: str


@dataclass(frozen=True, slots=True)
class TextDone:
    """An event: one of the texts has ended.

    Attributes:
        request: index of the request.
    """

    request: int
    generated: GeneratedText


@runtime_checkable
class TextGenerator(Protocol):
    """Writes texts."""

    @property
    def name(self) -> str:
        """The model's name, for people."""

    @property
    def context_length(self) -> int | None:
        """Largest number of tokens of prompt and text together; ``None`` where it is not known."""

    def count(self, prompt: TextPrompt, lead: str = "") -> int:
        """Tokens of a prompt as the model reads it; an estimate that is rather too high where it cannot be known."""

    def generating(self, requests: Sequence[TextRequest]) -> Coroutine[list[GeneratedText]]:
        """A coroutine that writes a text for each request, all of them side by side, and returns them in order.

        It emits a :class:`TextDelta` as characters come (or one with the whole text where the model does not stream)
        and a :class:`TextDone` when a text has ended. Every request is checked at the call, before any work.

        Raises:
            ContextLengthError: a prompt leaves no room for a token.
            SpecragError: when run: an endpoint is dead, too slow or answers nonsense.
        """


@dataclass(frozen=True, slots=True)
class TextPart:
    """A named stretch of a text to be scored.

    Args:
        name: unique in its request.
        text: may be empty. Words begin with their space: ``" Paris"`` behind ``"Answer:"``, since most vocabularies
            hold them so.
        scored: whether its log-probability is wanted; what is not wanted costs less.
    """

    name: str
    text: str
    scored: bool = True


@dataclass(frozen=True, slots=True)
class ScoringRequest:
    """A text whose parts are to be scored.

    The prompt as the model reads it (up to where the answer begins) and the parts are joined and tokenised *once, as a
    whole*; a token that lies across a border belongs to the part in which it starts, its leading space counted.

    Args:
        prompt: what stands before the parts; at least one character.
        parts: in order.

    Raises:
        InputError: a value cannot be used.
    """

    prompt: TextPrompt
    parts: tuple[TextPart, ...]

    def __post_init__(self) -> None:
        check_prompt(self.prompt)
        names = [part.name for part in self.parts]
        if not names or len(set(names)) < len(names):
            raise InputError("parts", names, "give at least one part, each with a name of its own")


@dataclass(frozen=True, slots=True)
class PartScore:
    """How probable a part is behind everything before it.

    Attributes:
        log_probs: nats, one a token; empty for a part without tokens.
    """

    log_probs: tuple[float, ...]

    @property
    def total(self) -> float:
        """Log-probability of the part; 0 for none, as an empty product is 1."""
        return sum(self.log_probs)

    @property
    def count(self) -> int:
        """Tokens of the part."""
        return len(self.log_probs)

    @property
    def mean(self) -> float:
        """Log-probability a token; 0 for a part without tokens."""
        return self.total / self.count if self.count else 0.0


@dataclass(frozen=True, slots=True)
class ScoredText:
    """The scores of a request.

    Attributes:
        parts: by name; those that were asked for.
        prompt_tokens: tokens of prompt and parts together.
        read_tokens: those of them that were read for this text alone, as in :class:`GeneratedText`.
    """

    parts: Mapping[str, PartScore]
    prompt_tokens: int
    read_tokens: int


@runtime_checkable
class TextScorer(Protocol):
    """Scores given texts."""

    @property
    def name(self) -> str:
        """The model's name, for people."""

    @property
    def context_length(self) -> int | None:
        """Largest number of tokens of a text; ``None`` where it is not known."""

    def count(self, prompt: TextPrompt, lead: str = "") -> int:
        """Tokens of a prompt as the model reads it; an estimate that is rather too high where it cannot be known."""

    def check_scoring(self) -> None:
        """Make sure that it can score; an endpoint is asked once, and its answer remembered. May block.

        Raises:
            InputError: it cannot; the message says what to give instead.
            SpecragError: the endpoint does not answer.
        """

    def scoring(self, requests: Sequence[ScoringRequest]) -> Coroutine[list[ScoredText]]:
        """A coroutine that scores every request and returns the scores in order; it emits nothing.

        What all requests begin with is read once where the model can share it.

        Raises:
            ContextLengthError: a text is longer than the model's context.
            SpecragError: when run: an endpoint is dead, too slow or answers nonsense.
        """


def check_prompt(prompt: TextPrompt) -> None:
    """Check a prompt.

    Raises:
        InputError: it is empty, or neither a text nor a conversation.
    """
    if isinstance(prompt, str) and prompt:
        return
    if isinstance(prompt, str | bytes) or not isinstance(prompt, Sequence) or not prompt:
        raise InputError("prompt", prompt, "give a text of at least one character or a list of messages")
    for message in prompt:
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise InputError("prompt", message, 'give messages of the form {"role": ..., "content": text}')


def assign(starts: Sequence[int], borders: Sequence[int]) -> list[int]:
    """Which part each token belongs to: the one in which it starts.

    Args:
        starts: where each token starts in the whole text, ascending; its leading space counts.
        borders: where each part starts, ascending, in the same unit.

    Returns:
        For each token the index of its part, -1 for one that starts before the first part. Of parts that start at the
        same place, the empty ones get no token.
    """
    places = []
    part = -1
    for start in starts:
        while part + 1 < len(borders) and borders[part + 1] <= start:
            part += 1
        places.append(part)
    return places
