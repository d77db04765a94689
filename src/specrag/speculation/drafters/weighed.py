"""A drafter that runs passes, asked where it promises more than one whose guesses are free."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specrag.engine.outputs import Outputs, Row
from specrag.engine.passes import Coroutine
from specrag.engine.session import Session
from specrag.speculation.drafters.base import Drafter
from specrag.speculation.schedule import Outlook
from specrag.speculation.tree import DraftTree, Round, merge


class Weighed:
    """Free guesses in every round, and beside them those of a drafter that runs passes, where that pays.

    Args:
        free: costs no passes; deterministic drafts.
        priced: runs passes; deterministic drafts.
        outlook: weighs the two, and hears what the priced one guessed.
        priced_budget: how much to ask of the priced one.
    """

    runs_passes = False

    def __init__(
        self, free: Drafter, priced: Drafter, outlook: Outlook, priced_budget: Callable[[], int]
    ) -> None:
        self._free = free
        self._priced = priced
        self._outlook = outlook
        self._priced_budget = priced_budget

    @property
    def outputs(self) -> Outputs:
        """What either reads."""
        return self._free.outputs.union(self._priced.outputs)

    def start(self, session: Session, rows: Sequence[Row]) -> Coroutine[None]:
        """See :class:`~specrag.speculation.drafters.base.Drafter`."""
        yield from self._free.start(session, rows)
        yield from self._priced.start(session, rows)

    def propose(self, session: Session, budget: int) -> Coroutine[DraftTree]:
        """See :class:`~specrag.speculation.drafters.base.Drafter`."""
        free = yield from self._free.propose(session, budget)
        if len(free) and self._outlook.prefers(free):
            return free
        asked = min(budget, self._priced_budget())
        if not asked:
            return free
        guessed = yield from self._priced.propose(session, asked)
        self._outlook.heard(guessed)
        return merge([guessed, free], budget)

    def observe(self, round: Round) -> None:
        """See :class:`~specrag.speculation.drafters.base.Drafter`."""
        self._free.observe(round)
        self._priced.observe(round)

    def truncate(self, length: int) -> None:
        """See :class:`~specrag.speculation.drafters.base.Drafter`."""
        self._free.truncate(length)
        self._priced.truncate(length)

    def fork(self) -> Weighed:
        """See :class:`~specrag.speculation.drafters.base.Drafter`."""
        return Weighed(self._free.fork(), self._priced.fork(), self._outlook, self._priced_budget)

    def close(self) -> None:
        """See :class:`~specrag.speculation.drafters.base.Drafter`."""
        self._free.close()
        self._priced.close()
