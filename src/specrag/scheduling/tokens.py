"""How many tokens to guess in the next round."""

from __future__ import annotations

from typing import Protocol

from specrag.errors import InputError


class TokenSchedule(Protocol):
    """Chooses the token budget of each round. It changes an output's time, never the output."""

    def next(self) -> int:
        """The budget of the next round; 0 for plain decoding."""

    def observe(self, drafted: int, accepted: int, seconds: float) -> None:
        """Learn what the last round gave and took."""


class FixedBudget:
    """The same budget in every round.

    Args:
        tokens: the budget, 0 for plain decoding.
    """

    def __init__(self, tokens: int) -> None:
        if tokens < 0:
            raise InputError("budget", tokens, "give the number of tokens to guess, 0 for none")
        self._tokens = tokens

    def next(self) -> int:
        return self._tokens

    def observe(self, drafted: int, accepted: int, seconds: float) -> None:
        del drafted, accepted, seconds
