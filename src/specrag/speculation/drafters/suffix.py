"""Copies what followed earlier occurrences of the newest tokens.

Two uses: :class:`SuffixDrafter` copies behind the longest match (SAM-Decoding), :class:`RetrievalDrafter`
chooses when, by which key and from which occurrences (ReSpec).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specrag.engine.outputs import NOTHING, Outputs, Row
from specrag.engine.passes import Coroutine
from specrag.engine.session import Session
from specrag.errors import InputError
from specrag.speculation.drafters.base import ANY_DEPTH
from specrag.speculation.drafters.copied import copy_grade
from specrag.speculation.suffix.automaton import SuffixAutomaton
from specrag.speculation.suffix.copy_loops import copy_behind
from specrag.speculation.tree import EMPTY, DraftTree, Round

#: Source of tokens copied from the prompt and the output.
SUFFIX = "suffix"
#: Source of tokens copied from the request's references.
REFERENCE = "reference"
#: Source of tokens copied from a static corpus.
CORPUS = "corpus"


class OwnText:
    """The texts of one request in a suffix automaton: its references, its prompt, its output so far.

    Args:
        references: token sequences that the output may quote.
    """

    def __init__(self, references: Sequence[Sequence[int]] = ()) -> None:
        self.automaton = SuffixAutomaton()
        for text in references:
            self.automaton.extend(text)
            self.automaton.end_text()
        self.offset = len(self.automaton)
        """Positions of the references; the session's token ``i`` is at ``offset + i``."""

    def follow(self, session: Session) -> None:
        """Index what the session holds beyond what is indexed."""
        known = len(self.automaton) - self.offset
        if known < len(session):
            self.automaton.extend(session.tokens[known:])

    def truncate(self, length: int) -> None:
        """Forget everything behind the first ``length`` tokens of the session."""
        if length < len(self.automaton) - self.offset:
            self.automaton.truncate(self.offset + length)

    def source(self, end: int) -> str:
        """Whose text stands at a position."""
        return REFERENCE if end < self.offset else SUFFIX

    def copies(
        self, ends: NDArray[np.int64], count: int, most: int
    ) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
        """What stands around positions: what follows ``[ends, count]``, -1 behind the end of a text; how many tokens in
        front agree with the newest ones, at most ``most``; and which of the positions is the first with that copy.
        """
        copied = np.empty((len(ends), count), dtype=np.int32)
        matched, firsts = np.empty(len(ends), dtype=np.int64), np.empty(len(ends), dtype=np.int64)
        copy_behind(self.automaton.tokens, ends, most, copied, matched, firsts)
        return copied, matched, firsts

    def fork(self) -> OwnText:
        """An independent copy."""
        other = OwnText()
        other.automaton = self.automaton.fork()
        other.offset = self.offset
        return other


class SuffixDrafter:
    """Copies one chain behind the earliest occurrence of the longest match (SAM-Decoding, Hu et al. 2024).

    Args:
        min_match: shorter matches propose nothing.
        max_tokens: longest chain.
    """

    outputs: Outputs = NOTHING
    runs_passes = False

    def __init__(self, min_match: int = 5, max_tokens: int = 40) -> None:
        if min_match < 1:
            raise InputError("min_match", min_match, "give at least 1 token")
        if max_tokens < 1:
            raise InputError("max_tokens", max_tokens, "give at least 1 token")
        self._min_match = min_match
        self._max_tokens = max_tokens
        self._text = OwnText()

    def start(self, session: Session, rows: Sequence[Row]) -> Coroutine[None]:
        """See :class:`~specrag.speculation.drafters.base.Drafter`."""
        del rows
        self._text.follow(session)
        yield from ()

    def propose(self, session: Session, budget: int, depth: int = ANY_DEPTH) -> Coroutine[DraftTree]:
        """See :class:`~specrag.speculation.drafters.base.Drafter`."""
        yield from ()
        self._text.follow(session)
        automaton = self._text.automaton
        match = automaton.longest_match()
        if match.length < self._min_match:
            return EMPTY
        end = automaton.first_occurrence(match)
        copied = automaton.continuation(end, min(budget, depth, self._max_tokens))
        grades = [copy_grade(match.length + depth, 0, None) for depth in range(len(copied))]
        return DraftTree.chain(copied.tolist(), self._text.source(end), grades)

    def observe(self, round: Round) -> None:
        """See :class:`~specrag.speculation.drafters.base.Drafter`."""
        del round

    def truncate(self, length: int) -> None:
        """See :class:`~specrag.speculation.drafters.base.Drafter`."""
        self._text.truncate(length)

    def fork(self) -> SuffixDrafter:
        """See :class:`~specrag.speculation.drafters.base.Drafter`."""
        other = SuffixDrafter(self._min_match, self._max_tokens)
        other._text = self._text.fork()
        return other

    def close(self) -> None:
        """See :class:`~specrag.speculation.drafters.base.Drafter`."""
        self._text = OwnText()
