"""Citations of passages that are there: a logits processor that bans the number of any other.

Small models cite passage [11] of ten. What they may say else is left to them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specrag.engine.processors import Logits
from specrag.models.tokenizer import Tokenizer

# A mark as far as it has been written: an opening bracket, then numbers and what may stand between them.
_MARK = re.compile(r"[\[\u3010][\d\s,;\u2013-]*")
_OPEN = re.compile(rf"({_MARK.pattern})$")
_LAST_NUMBER = re.compile(r"\d*$")


class CitationLimit:
    """Bans tokens that would write a number in brackets which no source has.

    A :class:`~specrag.engine.processors.LogitsProcessor` whose state is the open mark, a bracket and the digits behind
    it, or nothing. A text's own numbers in brackets ("[1984]") are banned too: a reader would take them for citations.

    Args:
        tokenizer: of the model.
        sources: how many there are, numbered from 1.
        lead: what the answer begins with, in the prompt; it may end within a mark.
    """

    def __init__(self, tokenizer: Tokenizer, sources: int, lead: str = "") -> None:
        self._tokenizer = tokenizer
        self._sources = sources
        self._lead = lead
        self._banned: dict[str, NDArray[np.int64]] = {}

    def start(self, prompt: Sequence[int]) -> str:  # noqa: ARG002 - marks in the prompt are closed
        """See :class:`~specrag.engine.processors.LogitsProcessor`."""
        return _open_mark(self._lead)

    def advance(self, state: str, token: int) -> str:
        """See :class:`~specrag.engine.processors.LogitsProcessor`."""
        return _open_mark(state + self._tokenizer.token_bytes(token).decode(errors="replace"))

    def apply(self, logits: Logits, state: str) -> Logits:
        """See :class:`~specrag.engine.processors.LogitsProcessor`."""
        if state not in self._banned:
            numerals = self._tokenizer.numerals.items()
            banned = [token for token, text in numerals if self._is_wrong(state + text)]
            self._banned[state] = np.array(banned, dtype=np.int64)
        if not len(self._banned[state]):
            return logits
        processed = logits.copy()
        processed[self._banned[state]] = -np.inf
        return processed

    def _is_wrong(self, text: str) -> bool:
        """Whether a number in a mark is no source's; more digits would only make it larger."""
        return any(
            not 1 <= int(number) <= self._sources
            for mark in _MARK.findall(text)
            for number in re.findall(r"\d+", mark)
        )


def _open_mark(text: str) -> str:
    """The bracket and the last number of a mark that the text has not closed; empty if there is none."""
    found = _OPEN.search(text)
    if found is None:
        return ""
    digits = _LAST_NUMBER.search(found[1])
    return found[1][0] + (digits[0] if digits else "")
