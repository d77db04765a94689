"""Keeps a text to the form of two lines: the first ends with a cue, the second ends the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from specrag.engine.processors import Logits
from specrag.models.roles import Cue

if TYPE_CHECKING:
    from specrag.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Place:
    """Where a text is.

    Attributes:
        line: 0 in the first line, 1 in the cue, 2 in the second line.
        tokens: how many of it there are.
        second: those of the second line.
    """

    line: int = 0
    tokens: int = 0
    second: tuple[int, ...] = ()


class TwoLines:
    """A :class:`~specrag.engine.processors.LogitsProcessor` for :class:`~specrag.models.roles.Cue`.

    Whatever would end the first line, a line end or the end of the text, becomes the cue with their joint probability;
    whatever would end the second becomes the end of the text. No line is empty. A model that knows the form writes
    what it would have written.

    Args:
        cue: tokens, of which the first holds a line end.
        within: the first line has at most this many tokens.
        line_ends: tokens that hold a line end.
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

    def start(self, prompt: Sequence[int]) -> Place:  # noqa: ARG002
        return Place()

    def advance(self, state: Place, token: int) -> Place:
        begins_cue = state.line == 0 and token == self._cue[0]
        second = (*state.second, token) if state.line == 2 else ()
        after = Place(1, 1) if begins_cue else Place(state.line, state.tokens + 1, second)
        return Place(2, 0) if after.line == 1 and after.tokens == len(self._cue) else after

    def apply(self, logits: Logits, state: Place) -> Logits:
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
        """Only what goes on to one of the choices, or the end behind a whole one."""
        ends = self._all_ends[self._all_ends < len(logits)]
        processed = np.full_like(logits, -np.inf)
        for choice in self._choices:
            if choice[: len(second)] == second and len(choice) > len(second):
                processed[choice[len(second)]] = logits[choice[len(second)]]
        if second in self._choices:
            processed[self._ends[0] if self._ends else ends[0]] = np.logaddexp.reduce(logits[ends])
        return processed


def two_lines(tokenizer: Tokenizer, cue: Cue) -> TwoLines:
    """The processor for a tokenizer."""
    choices = [_behind(tokenizer, "0" + cue.text, choice) for choice in cue.choices]
    ends = sorted(tokenizer.eos_tokens)
    return TwoLines(_behind(tokenizer, "0", cue.text), cue.within, tokenizer.line_ends, ends, choices)


def _behind(tokenizer: Tokenizer, before: str, text: str) -> list[int]:
    """The tokens of a text that stands behind another."""
    placed = tokenizer.encode_with_starts(before + text, special=False)
    both = zip(placed.tokens, placed.starts, strict=True)
    return [token for token, start in both if start >= len(before)]


def _only(logits: Logits, token: int) -> Logits:
    forced = np.full_like(logits, -np.inf)
    forced[token] = 0
    return forced
