"""Stop conditions: when a text ends, and which part of it may already be streamed.

A stop string is cut out together with all that follows it. Only text that may still turn out to be the start of a
stop string is held back, so that a stream shows every character as early as possible.
The text depends on the characters alone, not on how they were split into tokens: the stop string whose last
character comes first ends the text; among those that end at the same character, the longest.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Literal, TypeAlias

from specrag.errors import InputError, SpecragError

FinishReason: TypeAlias = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class StopConditions:
    """Conditions that end a text.

    Args:
        max_tokens: at most this many tokens, a stop token included; at least 1.
        stop_tokens: ids that end the text and are not shown. Any iterable of integers; kept as a frozenset.
        stop_strings: strings that end the text and are not shown. Any iterable of strings; kept as a tuple.

    Raises:
        InputError: a value is of the wrong type or out of range, or a stop string is empty.
    """

    max_tokens: int
    stop_tokens: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not _is_integer(self.max_tokens) or self.max_tokens < 1:
            raise InputError("max_tokens", self.max_tokens, "give an integer from 1 upwards")
        try:
            stop_tokens = tuple(self.stop_tokens)
        except TypeError:
            raise InputError("stop_tokens", self.stop_tokens, "give a set of token ids") from None
        for token in stop_tokens:
            if not _is_integer(token) or token < 0:
                raise InputError("stop_tokens", token, "give integers from 0 upwards")
        # A lone string is iterable too, and would silently stop at each of its characters.
        if isinstance(self.stop_strings, (str, bytes)):
            raise InputError("stop_strings", self.stop_strings, "give a tuple of strings")
        try:
            stop_strings = tuple(self.stop_strings)
        except TypeError:
            raise InputError("stop_strings", self.stop_strings, "give a tuple of strings") from None
        for string in stop_strings:
            if not isinstance(string, str) or not string:
                raise InputError("stop_strings", string, "give strings of at least one character")
        object.__setattr__(self, "max_tokens", int(self.max_tokens))
        object.__setattr__(self, "stop_tokens", frozenset(int(token) for token in stop_tokens))
        object.__setattr__(self, "stop_strings", stop_strings)


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Piece:
    """Characters that may be shown now, and why the text has ended, if it has."""

    text: str
    finish_reason: FinishReason | None = None


class StopChecker:
    """Applies stop conditions to one request's text, token by token.

    ``push`` every token in order until a piece has a finish reason, then call ``finish`` once for the text
    still held back. A request that ends early (cancelled) calls ``finish`` too.
    """

    def __init__(self, conditions: StopConditions) -> None:
        self._conditions = conditions
        self._longest = max(map(len, conditions.stop_strings), default=0)
        self._tokens = 0
        self._held = ""
        self._reason: FinishReason | None = None
        self._cut = False
        self._flushed = False

    def fork(self) -> StopChecker:
        """A checker in the same state, to follow tokens that may be taken back."""
        return copy.copy(self)  # all of its state is immutable values

    def push(self, token: int, text: str) -> Piece:
        """Take one token.

        Args:
            token: its id.
            text: the characters that it completes, possibly none; ignored for a stop token.

        Returns:
            The characters to show, and ``"stop"`` after a stop token or stop string, ``"length"`` after
            ``max_tokens`` tokens. After a stop token or ``max_tokens``, text may still be held back: ``finish``
            returns it.

        Raises:
            SpecragError: the text has already ended.
        """
        if self._reason is not None or self._flushed:
            raise SpecragError(f"token: {token} came after the end of the text: start a new StopChecker")
        self._tokens += 1
        if token in self._conditions.stop_tokens:
            self._reason = "stop"
            return Piece("", "stop")
        piece = self._release(text)
        if piece.finish_reason is None and self._tokens >= self._conditions.max_tokens:
            piece = replace(piece, finish_reason="length")
        self._reason = piece.finish_reason
        return piece

    def finish(self, text: str = "") -> Piece:
        """Return the text held back, once nothing more will come.

        Args:
            text: characters that the text decoder had not yet completed (ignored after a stop string).

        Returns:
            The rest of the text with the finish reason: ``"stop"`` if ``text`` completes a stop string,
            None if the request ended early.

        Raises:
            SpecragError: called twice.
        """
        if self._flushed:
            raise SpecragError("finish: the text has been flushed already: start a new StopChecker")
        self._flushed = True
        if self._cut:
            return Piece("", "stop")
        piece = self._release(text)
        if piece.finish_reason is None:
            piece = Piece(piece.text + self._held, self._reason)
        self._held = ""
        return piece

    def _release(self, text: str) -> Piece:
        """Add characters; return those that no stop string can claim, or those before a stop string."""
        pending = self._held + text
        strings = self._conditions.stop_strings
        found = [(start + len(string), start) for string in strings if (start := pending.find(string)) >= 0]
        if found:
            self._held = ""
            self._cut = True
            return Piece(pending[: min(found)[1]], "stop")
        held = self._held_length(pending)
        self._held = pending[len(pending) - held :]
        return Piece(pending[: len(pending) - held])

    def _held_length(self, pending: str) -> int:
        """Length of the longest end of ``pending`` that begins a stop string."""
        for length in range(min(len(pending), self._longest - 1), 0, -1):
            end = pending[-length:]
            if any(string.startswith(end) for string in self._conditions.stop_strings):
                return length
        return 0
