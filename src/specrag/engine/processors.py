"""Logits processors whose state follows a path of a draft tree.

A processor's state is a value: ``advance`` returns a new one and leaves the old one valid, so that the nodes of a
tree share the state of their common ancestors. Order: bias, repetition penalty, presence and frequency penalty, then
the user's own processors (a grammar has the last word).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from specrag.engine.sampling_params import SamplingParams, TokenBias
from specrag.errors import InputError

Logits: TypeAlias = NDArray[np.float32]

# Opaque: each processor chooses its own type and only ever gets its own values back.
State: TypeAlias = Any

# Tokens kept aside before they are folded into a history's counts.
_RECENT = 32


class LogitsProcessor(Protocol):
    """Changes the logits of the next token, given the tokens before it. Implement it for a grammar.

    A processor must be a function of the prompt and the path: however the same tokens were reached, their states
    must have the same effect.
    """

    def start(self, prompt: Sequence[int]) -> State:
        """The state after the prompt, before any output."""

    def advance(self, state: State, token: int) -> State:
        """The state after one more output token. Must not change ``state``; should take constant time."""

    def apply(self, logits: Logits, state: State) -> Logits:
        """The processed logits, float32 ``[V]``. Must not write to ``logits``."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Processors applied one after the other; itself a processor. An empty chain returns its argument."""

    processors: tuple[LogitsProcessor, ...]

    def start(self, prompt: Sequence[int]) -> State:
        return tuple(processor.start(prompt) for processor in self.processors)

    def advance(self, state: State, token: int) -> State:
        return tuple(
            processor.advance(own, token) for processor, own in zip(self.processors, state, strict=True)
        )

    def apply(self, logits: Logits, state: State) -> Logits:
        for processor, own in zip(self.processors, state, strict=True):
            logits = processor.apply(logits, own)
        return logits


def build_processors(params: SamplingParams, extra: Sequence[LogitsProcessor] = ()) -> Chain:
    """The processors that the parameters ask for, followed by ``extra``."""
    built: list[LogitsProcessor] = []
    if params.logit_bias:
        built.append(LogitBias(TokenBias(params.logit_bias)))
    if params.repetition_penalty != 1:
        built.append(RepetitionPenalty(params.repetition_penalty))
    if params.presence_penalty or params.frequency_penalty:
        built.append(OutputPenalties(params.presence_penalty, params.frequency_penalty))
    return Chain((*built, *extra))


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """How often each token has occurred; immutable. ``push`` takes constant time, amortised.

    Args:
        tokens: int64 ``[n]``, ascending ids that occurred, without the recent ones.
        counts: int64 ``[n]``, how often each occurred.
        recent: the newest tokens, fewer than 32.
    """

    tokens: NDArray[np.int64]
    counts: NDArray[np.int64]
    recent: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokens: Iterable[int]) -> History:
        values, counts = np.unique(np.fromiter(tokens, dtype=np.int64), return_counts=True)
        return cls(values, counts.astype(np.int64))

    def push(self, token: int) -> History:
        longer = History(self.tokens, self.counts, (*self.recent, token))
        return longer.folded() if len(longer.recent) >= _RECENT else longer

    def folded(self) -> History:
        """The same history with the recent tokens counted in."""
        if not self.recent:
            return self
        newer = History.of(self.recent)
        values, slots = np.unique(np.concatenate([self.tokens, newer.tokens]), return_inverse=True)
        counts = np.zeros(len(values), dtype=np.int64)
        np.add.at(counts, slots, np.concatenate([self.counts, newer.counts]))
        return History(values, counts)


@dataclass(frozen=True, slots=True)
class RepetitionPenalty:
    """Divides positive and multiplies negative logits of every token in prompt or output.

    Reference: Keskar et al., "CTRL", 2019, section 4.1, with the sign rule of transformers'
    ``RepetitionPenaltyLogitsProcessor``.
    """

    penalty: float

    def start(self, prompt: Sequence[int]) -> History:
        return History.of(prompt)

    def advance(self, state: History, token: int) -> History:
        return state.push(token)

    def apply(self, logits: Logits, state: History) -> Logits:
        processed = logits.copy()
        for seen in (state.tokens, np.array(state.recent, dtype=np.int64)):
            # Read from the argument, so that a token in both parts is penalised only once.
            values = logits[seen]
            processed[seen] = np.where(values < 0, values * self.penalty, values / self.penalty)
        return processed


@dataclass(frozen=True, slots=True)
class OutputPenalties:
    """``logit - presence · [count > 0] - frequency · count``; the prompt's tokens are not counted.

    The convention of OpenAI's API and of vLLM.
    """

    presence: float
    frequency: float

    def start(self, prompt: Sequence[int]) -> History:  # noqa: ARG002
        return History.of(())

    def advance(self, state: History, token: int) -> History:
        return state.push(token)

    def apply(self, logits: Logits, state: History) -> Logits:
        seen = state.folded()
        processed = logits.copy()
        processed[seen.tokens] -= (self.presence + self.frequency * seen.counts).astype(logits.dtype)
        return processed


@dataclass(frozen=True, slots=True)
class LogitBias:
    """Adds a number to the logits of given tokens, the same at every position."""

    bias: TokenBias

    def start(self, prompt: Sequence[int]) -> None:
        """No state is needed."""

    def advance(self, state: None, token: int) -> None:
        """No state is needed."""

    def apply(self, logits: Logits, state: None) -> Logits:  # noqa: ARG002
        tokens = np.array(list(self.bias), dtype=np.int64)
        if len(tokens) and tokens.max() >= len(logits):
            raise InputError("logit_bias", int(tokens.max()), f"give token ids below {len(logits)}")
        processed = logits.copy()
        processed[tokens] += np.array(list(self.bias.values()), dtype=logits.dtype)
        return processed


@dataclass(frozen=True, slots=True, eq=False)
class OutputPath:
    """The output's tokens as a list that branches share: each node holds one token and its parent."""

    parent: OutputPath | None = None
    token: int = -1

    def tokens(self) -> tuple[int, ...]:
        """The tokens from the first to this node's; the root's is left out."""
        path = []
        node = self
        while node.parent is not None:
            path.append(node.token)
            node = node.parent
        return tuple(reversed(path))


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """Bans every token that a callback does not allow: the plainest way to plug in a grammar.

    Args:
        allowed: called with the output's tokens so far (without the prompt); returns the token ids that may
            follow, or a boolean mask ``[V]``. It must depend on its argument only. A grammar that can be advanced
            token by token is faster as its own ``LogitsProcessor``.

    Example:
        ``AllowedTokens(lambda output: {yes, no} if not output else {end_of_text})``
    """

    allowed: Callable[[tuple[int, ...]], Collection[int] | NDArray[np.bool_]]

    def start(self, prompt: Sequence[int]) -> OutputPath:  # noqa: ARG002
        return OutputPath()

    def advance(self, state: OutputPath, token: int) -> OutputPath:
        return OutputPath(state, token)

    def apply(self, logits: Logits, state: OutputPath) -> Logits:
        """Raises InputError: the callback allows no token, or one outside the vocabulary."""
        mask = self._mask(self.allowed(state.tokens()), len(logits))
        if not mask.any():
            raise InputError("allowed", "no token", "let the callback allow one, such as the end of text")
        return np.where(mask, logits, logits.dtype.type(-np.inf))

    def _mask(self, allowed: Collection[int] | NDArray[np.bool_], vocab_size: int) -> NDArray[np.bool_]:
        if isinstance(allowed, np.ndarray) and allowed.dtype == np.bool_:
            if allowed.shape != (vocab_size,):
                raise InputError("allowed", allowed.shape, f"give a mask of shape ({vocab_size},)")
            return allowed
        tokens = np.fromiter(allowed, dtype=np.int64)
        outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
        if len(outside):
            raise InputError("allowed", int(outside[0]), f"give token ids from 0 to {vocab_size - 1}")
        mask = np.zeros(vocab_size, dtype=np.bool_)
        mask[tokens] = True
        return mask
