"""What a generation gives back, and what a method that answers questions needs of a language model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

from specrag.engine.executor import Executor
from specrag.engine.passes import Coroutine
from specrag.engine.stopping import FinishReason
from specrag.methods.options import Options
from specrag.speculation.decode import DecodedToken

if TYPE_CHECKING:
    from specrag.models.tokenizer import Tokenizer

#: A text, a conversation of ``{"role": ..., "content": ...}``, or token ids.
Prompt: TypeAlias = str | Sequence[Mapping[str, str]] | Sequence[int]


@dataclass(frozen=True, slots=True)
class Timing:
    """Wall-clock seconds of a request, without those of compiling at a first run.

    Attributes:
        prefill: from the start to the first token, exclusive of its pass where nothing else ran.
        decode: from there to the end.
        drafting: seconds of decoding in which drafts were made.
        verifying: seconds of decoding in the target's passes, waiting for others included.
    """

    prefill: float
    decode: float
    drafting: float = 0.0
    verifying: float = 0.0

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
        drafted_by: tokens guessed, by source.
        accepted_by: guesses kept, by source.
        relaxed: guesses kept although the target would have chosen another token.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    passes: int
    drafted_by: Mapping[str, int]
    accepted_by: Mapping[str, int]
    relaxed: int = 0

    @property
    def drafted(self) -> int:
        """Tokens guessed."""
        return sum(self.drafted_by.values())

    @property
    def accepted(self) -> int:
        """Guesses kept."""
        return sum(self.accepted_by.values())

    @property
    def acceptance(self) -> float | None:
        """Share of the guesses that were kept; ``None`` where nothing was guessed."""
        return self.accepted / self.drafted if self.drafted else None

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


@runtime_checkable
class HasTokenizer(Protocol):
    """A model whose tokens are known here, so that its logits can be processed by what they spell."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer."""


class Generator(Protocol):
    """A language model as methods above the token level see it: text for text, in the executor they share."""

    @property
    def executor(self) -> Executor:
        """Runs the coroutines of everybody who uses this model."""

    @property
    def context_length(self) -> int:
        """Largest number of tokens of prompt and output together."""

    def encode(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """The tokens that the model reads for a prompt."""

    def generating(self, prompt: Prompt, options: Options) -> Coroutine[Generation]:
        """A coroutine that generates a text; it emits a :class:`~specrag.speculation.decode.Step` a round.

        The prompt and the options are checked at the call, before any work.
        """
