"""A drafter that runs passes, asked where it promises more than one whose guesses are free."""

from __future__ import annotations

from collections.abc import Callable

from specrag.engine.passes import Coroutine
from specrag.engine.session import Session
from specrag.speculation.drafters.base import ANY_DEPTH, Drafter
from specrag.speculation.drafters.pair import Pair
from specrag.speculation.schedule import Outlook
from specrag.speculation.tree import DraftTree, merge


class Weighed(Pair):
    """Free guesses in every round, and beside them those of a drafter that runs passes, where that pays.

    A token that both guess has the source and grade that promise more, and stays a copy where one of them copied it.

    Args:
        free: costs no passes; deterministic drafts.
        priced: runs passes; deterministic drafts.
        outlook: weighs the two, and hears what the priced one guessed.
        priced_budget: how much to ask of the priced one.
    """

    def __init__(
        self, free: Drafter, priced: Drafter, outlook: Outlook, priced_budget: Callable[[], int]
    ) -> None:
        super().__init__(free, priced)
        self._outlook = outlook
        self._priced_budget = priced_budget

    def propose(self, session: Session, budget: int, depth: int = ANY_DEPTH) -> Coroutine[DraftTree]:
        """See :class:`~specrag.speculation.drafters.base.Drafter`."""
        free = yield from self._first.propose(session, budget, depth)
        if len(free) and self._outlook.prefers(free):
            return free
        asked = min(budget, self._priced_budget())
        if not asked:
            return free
        guessed = yield from self._second.propose(session, asked, depth)
        self._outlook.heard(guessed)
        return merge([guessed, free], budget, self._outlook.rate)

    def fork(self) -> Weighed:
        """See :class:`~specrag.speculation.drafters.base.Drafter`."""
        return Weighed(self._first.fork(), self._second.fork(), self._outlook, self._priced_budget)
