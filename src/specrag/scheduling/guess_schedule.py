"""Guess by guess: whether to decode behind one, and whether to do that while a search verifies it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specrag.scheduling.stride import StrideRound, StrideSchedule


class GuessSchedule(Protocol):
    """Decides for one request. It changes an output's time, never the output.

    Both questions are about the newest guess of a round. ``fresh`` has an entry for each guess so far: whether its
    passage is not in front of the text yet, so that a prompt has to be read before anything is decoded behind it.
    """

    def goes_on(self, fresh: Sequence[bool]) -> bool:
        """Whether to decode behind the newest guess and to guess again; else the round's search begins."""

    def beside(self, fresh: Sequence[bool]) -> bool:
        """Whether to decode behind the newest guess while the search runs."""

    def observe(self, round: StrideRound) -> None:
        """Learn what the last round gave and took."""


class CountedGuesses:
    """A stride schedule: so many guesses a round, whatever they are.

    Args:
        strides: how many.
        asynchronous: decode behind the last one while the search runs.
    """

    def __init__(self, strides: StrideSchedule, asynchronous: bool) -> None:
        self._strides = strides
        self._asynchronous = asynchronous
        self._stride = 1

    def goes_on(self, fresh: Sequence[bool]) -> bool:
        if len(fresh) == 1:
            self._stride = self._strides.next()
        return len(fresh) < self._stride

    def beside(self, fresh: Sequence[bool]) -> bool:
        del fresh
        return self._asynchronous

    def observe(self, round: StrideRound) -> None:
        self._strides.observe(round)
