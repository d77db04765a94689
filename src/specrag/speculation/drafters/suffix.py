"""Copies what followed earlier occurrences of the newest tokens.

Two drafters use this: :class:`SuffixDrafter` copies after the longest match (SAM-Decoding), and
:class:`~specrag.speculation.drafters.retrieval.RetrievalDrafter` chooses when to copy, by which key and from which
occurrences (ReSpec).

Three things tell how certain a copied token is (:func:`copy_grade`): how many tokens in front of it agree, whether its
copy is the most promising one, and how likely the target found it when it last stood after the preceding token.
"""

from __future__ import annotations

import math
from bisect import bisect, bisect_left
from collections.abc import Sequence
from itertools import product
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from specrag.engine import NOTHING, Coroutine, Outputs, Row, Session, compiled
from specrag.errors import InputError
from specrag.speculation.drafters.base import ANY_DEPTH
from specrag.speculation.suffix.automaton import SuffixAutomaton
from specrag.speculation.tree import EMPTY, DraftTree, Round

#: Source of tokens copied from the prompt and the output.
SUFFIX = "suffix"
#: Source of tokens copied from the request's references.
REFERENCE = "reference"
#: Source of tokens copied from a static corpus.
CORPUS = "corpus"
#: Upper bounds of the classes of agreeing tokens; the last class is open.
_LENGTHS = (1, 2, 3, 5, 8, 16)
#: Lower bounds, in nats, of the classes of opinions; below them the token was not among the likeliest.
_LOG_PROBS = (-1e9, math.log(0.2), math.log(0.6))
_UNKNOWN = len(_LOG_PROBS) + 1
# Log-odds of acceptance, given that the preceding token was accepted, by logistic regression over the copies of 36
# Spec-Bench prompts with odd ids (SmolLM2; docs/log/2026-11-21-what-the-target-said-before-grades-copies.md). A
# request's own experience soon outweighs them.
_LENGTH_ODDS = (-1.25, 0.1, 0.4, 1.0, 1.4, 2.15, 2.9)
_RANK_ODDS = (0.0, -0.45)
_OPINION_ODDS = (-1.15, -0.7, 0.0, 1.45, 0.0)
#: Initial acceptance rate by grade.
COPY_RATES = tuple(
    1 / (1 + math.exp(-sum(odds))) for odds in product(_LENGTH_ODDS, _RANK_ODDS, _OPINION_ODDS)
)


@runtime_checkable
class TargetMemory(Protocol):
    """Remembers what the target found likely after a token."""

    def opinion(self, before: int, token: int) -> float | None:
        """The log-probability of ``token``, in nats, when the target last stood after ``before``.

        Minus infinity if it was not among the likeliest, ``None`` if nothing is known.
        """


def copy_grade(matched: int, rank: int, opinion: float | None) -> int:
    """The grade of a copied token, an index into :data:`COPY_RATES`.

    Args:
        matched: tokens in front of it that agree, including those copied before it; at least 1.
        rank: of its copy among those of the round, 0 for the most promising.
        opinion: see :meth:`TargetMemory.opinion`.
    """
    length = bisect_left(_LENGTHS, matched)
    held = _UNKNOWN if opinion is None else bisect(_LOG_PROBS, opinion)
    return (length * len(_RANK_ODDS) + min(rank, 1)) * len(_OPINION_ODDS) + held


Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


@compiled
def copy_behind(tokens: Ints, ends: Longs, most: int, copies: Ints, matched: Longs, firsts: Longs) -> None:
    """Read what surrounds some positions of a growing text (compiled).

    Args:
        tokens: the text so far, with a negative number at the end of each part.
        ends: positions inside it.
        most: how many tokens in front of a position to compare with the newest ones.
        copies: filled, ``[ends, length]``: what follows each position, -1 beyond the end of its part. At the newest
            token a copy continues with what it has copied itself, as in a repetition.
        matched: filled: how many tokens in front of each position agree with the newest ones.
        firsts: filled: the first of the ends with the same copy.
    """
    newest = len(tokens)
    length = copies.shape[1]
    for row in range(len(ends)):
        end = ends[row]
        ended = False
        for step in range(length):
            # The distance from a position to the newest token is the period of the repetition.
            token = tokens[end + step % (newest - end)]
            ended = ended or token < 0
            copies[row, step] = -1 if ended else token
        agree = 0
        while agree < min(most, end):
            token = tokens[end - 1 - agree]
            if token < 0 or token != tokens[newest - 1 - agree]:
                break
            agree += 1
        matched[row] = agree
        firsts[row] = row
        for other in range(row):
            if firsts[other] == other and np.array_equal(copies[other], copies[row]):
                firsts[row] = other
                break


class RequestText:
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
        """Number of positions of the references; the session's token ``i`` is at ``offset + i``."""

    def follow(self, session: Session) -> None:
        """Index the session's tokens that are not indexed yet."""
        known = len(self.automaton) - self.offset
        if known < len(session):
            self.automaton.extend(session.tokens[known:])

    def truncate(self, length: int) -> None:
        """Forget everything after the first ``length`` tokens of the session."""
        if length < len(self.automaton) - self.offset:
            self.automaton.truncate(self.offset + length)

    def source(self, end: int) -> str:
        """The source of the text at a position."""
        return REFERENCE if end < self.offset else SUFFIX

    def copies(
        self, ends: NDArray[np.int64], count: int, most: int
    ) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
        """What surrounds the positions ``ends``.

        Returns:
            What follows, ``[ends, count]``, -1 beyond the end of a text; how many tokens in front agree with the newest
            ones, at most ``most``; and which of the positions is the first with that copy.
        """
        copied = np.empty((len(ends), count), dtype=np.int32)
        matched, firsts = np.empty(len(ends), dtype=np.int64), np.empty(len(ends), dtype=np.int64)
        copy_behind(self.automaton.tokens, ends, most, copied, matched, firsts)
        return copied, matched, firsts

    def fork(self) -> RequestText:
        """An independent copy."""
        other = RequestText()
        other.automaton = self.automaton.fork()
        other.offset = self.offset
        return other


class SuffixDrafter:
    """Copies one chain after the earliest occurrence of the longest match (SAM-Decoding, Hu et al. 2024).

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
        self._text = RequestText()

    def start(self, session: Session, rows: Sequence[Row]) -> Coroutine[None]:
        del rows
        self._text.follow(session)
        yield from ()

    def propose(self, session: Session, budget: int, depth: int = ANY_DEPTH) -> Coroutine[DraftTree]:
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
        del round

    def truncate(self, length: int) -> None:
        self._text.truncate(length)

    def fork(self) -> SuffixDrafter:
        other = SuffixDrafter(self._min_match, self._max_tokens)
        other._text = self._text.fork()
        return other

    def close(self) -> None:
        self._text = RequestText()
