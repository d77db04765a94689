"""The first drafter that has something to say."""

from __future__ import annotations

from collections.abc import Callable

from specrag.engine.passes import Coroutine
from specrag.engine.session import Session
from specrag.speculation.drafters.base import ANY_DEPTH, Drafter
from specrag.speculation.drafters.pair import Pair
from specrag.speculation.tree import EMPTY, DraftTree


class Switching(Pair):
    """Asks a first drafter and, where it proposes nothing, a second one (SAM-Decoding's fallback).

    Args:
        first: costs no passes.
        second: may.
        second_budget: how much to ask of the second if it runs passes.
    """

    def __init__(self, first: Drafter, second: Drafter, second_budget: Callable[[], int]) -> None:
        super().__init__(first, second)
        self._second_budget = second_budget

    def propose(self, session: Session, budget: int, depth: int = ANY_DEPTH) -> Coroutine[DraftTree]:
        """See :class:`~specrag.speculation.drafters.base.Drafter`."""
        tree = yield from self._first.propose(session, budget, depth)
        if len(tree):
            return tree
        asked = min(budget, self._second_budget()) if self._second.runs_passes else budget
        return (yield from self._second.propose(session, asked, depth)) if asked else EMPTY

    def fork(self) -> Switching:
        """See :class:`~specrag.speculation.drafters.base.Drafter`."""
        return Switching(self._first.fork(), self._second.fork(), self._second_budget)
