"""Interfaces of language models above the token level, local or remote: text generators and text scorers.

Both roles are coroutines (:mod:`specrag.engine.passes`), so a method is one coroutine whatever its models are: a local
model asks for passes, which the executor packs with those of other requests; an endpoint asks for
:class:`~specrag.engine.passes.Search`, which runs in a thread meanwhile. For a plain call, run the coroutine with
:func:`specrag.engine.executor.run`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, runtime_checkable

from specrag.checks import check_whole
from specrag.engine import Coroutine, FinishReason
from specrag.errors import InputError

#: A text that the model reads as is, or a conversation of ``{"role": ..., "content": ...}``, oldest message first, that
#: goes through the model's chat template; without one, the messages are put one below the other.
TextPrompt: TypeAlias = str | Sequence[Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    r"""Two lines: where the model would end its first line, the cue to answer is inserted; the second ends the text.

    Without it, a small model forgets the second line. Only a local model can be steered this way; with an endpoint it
    is up to the prompt, and the reader of the text must be prepared for other forms.

    Args:
        cue: begins with a line end, such as ``"\\nAnswer:"``.
        within: the first line has at most this many tokens.
        choices: what may follow in the second line, each with its leading space; if empty, anything may.
    """

    cue: str
    within: int = 96
    choices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.cue.startswith("\n"):
            raise InputError("cue", self.cue, "begin it with a line end")
        check_whole("within", self.within, remedy="give an integer from 1 upwards")
        if any(not choice.strip() or "\n" in choice for choice in self.choices):
            raise InputError("choices", self.choices, "give texts of one line")


@dataclass(frozen=True, slots=True)
class Reluctance:
    """A beginning that a local model should choose only if it is surer than usual.

    Args:
        text: the beginning; only its first token counts.
        nats: subtracted from that token's logit.
    """

    text: str
    nats: float


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A text to write.

    Args:
        prompt: what the model reads.
        lead: the beginning of the answer; not part of the returned text.
        max_tokens: at most this many tokens, including an end token.
        stop: the text ends before the first of these strings.
        temperature: 0 takes the most probable token every time.
        seed: the same seed gives the same text, as far as the model is deterministic.
        references: texts that the answer may quote; a local model that drafts by copying uses them, an endpoint does
            not.
        answer_format: to keep to, for models that can be steered.
        reluctance: a beginning to choose more rarely, for models that can be steered.

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
    answer_format: AnswerFormat | None = None
    reluctance: Reluctance | None = None

    def __post_init__(self) -> None:
        check_prompt(self.prompt)
        check_whole("max_tokens", self.max_tokens, remedy="give an integer from 1 upwards")
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
        log_prob: in nats, at temperature 1; ``None`` if the model does not tell.
    """

    text: str
    log_prob: float | None


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """A generated text.

    Attributes:
        text: the text without lead, end token and stop string.
        tokens: all tokens in order, including an end token and those of a stop string; their texts, joined, begin with
            :attr:`text`.
        finish_reason: ``"stop"`` or ``"length"``.
        prompt_tokens: tokens of the prompt, including the lead.
        read_tokens: the prompt tokens that were read for this text alone; the others came from a cache, or are shared
            with requests of the same call that begin alike, the first of which counts them.
        passes: passes of the model, not counting that of the prompt; 0 if the model does not tell.
        seconds: from the call to the end of the text.
        drafted_by, accepted_by: drafted and accepted tokens, by drafter; empty if the model does not tell.
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
    """An event: characters added to one of the texts.

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
        """The most tokens of prompt and text together; ``None`` if not known."""

    def count(self, prompt: TextPrompt, lead: str = "") -> int:
        """Number of tokens of a prompt as the model reads it; if it cannot be known, an estimate on the high side."""

    def generating(self, requests: Sequence[TextRequest]) -> Coroutine[list[GeneratedText]]:
        """A coroutine that writes a text for each request, all concurrently, and returns them in order.

        It emits a :class:`TextDelta` as characters arrive (or one with the whole text if the model does not stream) and
        a :class:`TextDone` when a text has ended. Every request is checked at the call, before any work is done.

        Raises:
            ContextLengthError: a prompt leaves no room for a single token.
            SpecragError: (when run) an endpoint is dead, too slow or answers nonsense.
        """


@dataclass(frozen=True, slots=True)
class TextPart:
    """A named stretch of a text to be scored.

    Args:
        name: unique in its request.
        text: may be empty. Words begin with their space: ``" Paris"`` after ``"Answer:"``, since that is how most
            vocabularies contain them.
        scored: whether its log-probability is wanted; unscored parts cost less.
    """

    name: str
    text: str
    scored: bool = True


@dataclass(frozen=True, slots=True)
class ScoringRequest:
    """A text whose parts are to be scored.

    The prompt as the model reads it (up to where the answer begins) and the parts are joined and tokenised *once, as a
    whole*; a token across a border belongs to the part in which it starts, counting its leading space.

    Args:
        prompt: what precedes the parts; at least one character.
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
    """How probable a part is, given everything before it.

    Attributes:
        log_probs: in nats, one per token; empty for a part without tokens.
    """

    log_probs: tuple[float, ...]

    @property
    def total(self) -> float:
        """Log-probability of the part; 0 without tokens, since an empty product is 1."""
        return sum(self.log_probs)

    @property
    def count(self) -> int:
        """Number of tokens of the part."""
        return len(self.log_probs)

    @property
    def mean(self) -> float:
        """Mean log-probability per token; 0 for a part without tokens."""
        return self.total / self.count if self.count else 0.0


@dataclass(frozen=True, slots=True)
class ScoredText:
    """The scores of a request.

    Attributes:
        parts: the scored parts, by name.
        prompt_tokens: tokens of prompt and parts together.
        read_tokens: those that were read for this text alone, as in :class:`GeneratedText`.
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
        """The most tokens of a text; ``None`` if not known."""

    def count(self, prompt: TextPrompt, lead: str = "") -> int:
        """Number of tokens of a prompt as the model reads it; if it cannot be known, an estimate on the high side."""

    def check_scoring(self) -> None:
        """Check that it can score; an endpoint is asked once, and its answer is remembered. May block.

        Raises:
            InputError: it cannot; the message says what to give instead.
            SpecragError: the endpoint does not answer.
        """

    def scoring(self, requests: Sequence[ScoringRequest]) -> Coroutine[list[ScoredText]]:
        """A coroutine that scores every request and returns the scores in order; it emits nothing.

        A prefix common to all requests is read once if the model can share it.

        Raises:
            ContextLengthError: a text is longer than the model's context.
            SpecragError: (when run) an endpoint is dead, too slow or answers nonsense.
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
        For each token the index of its part, or -1 if it starts before the first part. Of parts that start at the same
        place, the empty ones get no tokens.
    """
    places = []
    part = -1
    for start in starts:
        while part + 1 < len(borders) and borders[part + 1] <= start:
            part += 1
        places.append(part)
    return places
