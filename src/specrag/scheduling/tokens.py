"""How many tokens to guess in the next round: always the same number."""

from __future__ import annotations

from specrag.errors import InputError
from specrag.speculation.schedule import Timed
from specrag.speculation.tree import DraftTree, Round


class FixedBudget:
    """The same budget in every round, and all of a proposal is verified.

    Args:
        tokens: the budget, 0 for plain decoding.
    """

    def __init__(self, tokens: int) -> None:
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
            raise InputError("budget", tokens, "give the number of tokens to guess, 0 for none")
        self._tokens = tokens

    def budget(self, *, runs_passes: bool) -> int:
        del runs_passes
        return self._tokens

    def choose(self, tree: DraftTree, context: int) -> DraftTree:
        del context
        return tree

    def observe(self, round: Round, timed: Timed) -> None:
        del round, timed
