"""Two drafters that follow one session: the first non-empty draft, or both weighed by their cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specrag.engine import Coroutine, Outputs, Row, Session
from specrag.speculation.drafters.base import ANY_DEPTH, Drafter
from specrag.speculation.schedule.base import Estimates
from specrag.speculation.tree import EMPTY, DraftTree, Round, merge


class Pair:
    """Keeps two drafters in step; subclasses decide which one proposes when.

    Args:
        first: runs no passes.
        second: may run passes.
    """

    runs_passes = False

    def __init__(self, first: Drafter, second: Drafter) -> None:
        self._first = first
        self._second = second

    @property
    def outputs(self) -> Outputs:
        """What either reads."""
        return self._first.outputs.union(self._second.outputs)

    def start(self, session: Session, rows: Sequence[Row]) -> Coroutine[None]:
        yield from self._first.start(session, rows)
        yield from self._second.start(session, rows)

    def observe(self, round: Round) -> None:
        self._first.observe(round)
        self._second.observe(round)

    def truncate(self, length: int) -> None:
        self._first.truncate(length)
        self._second.truncate(length)

    def close(self) -> None:
        self._first.close()
        self._second.close()


class FirstNonEmpty(Pair):
    """First non-empty draft wins: the second drafter is asked only if the first proposes nothing (as in SAM-Decoding).

    Args:
        first: runs no passes.
        second: may run passes.
        second_budget: how much to ask of the second if it runs passes.
    """

    def __init__(self, first: Drafter, second: Drafter, second_budget: Callable[[], int]) -> None:
        super().__init__(first, second)
        self._second_budget = second_budget

    def propose(self, session: Session, budget: int, depth: int = ANY_DEPTH) -> Coroutine[DraftTree]:
        tree = yield from self._first.propose(session, budget, depth)
        if len(tree):
            return tree
        asked = min(budget, self._second_budget()) if self._second.runs_passes else budget
        return (yield from self._second.propose(session, asked, depth)) if asked else EMPTY

    def fork(self) -> FirstNonEmpty:
        return FirstNonEmpty(self._first.fork(), self._second.fork(), self._second_budget)


class Weighed(Pair):
    """Free guesses in every round, plus those of a drafter that runs passes, where that pays.

    A token that both guess gets the source and grade that promise more, and stays a copy if one of them copied it.

    Args:
        free: runs no passes; deterministic drafts.
        priced: runs passes; deterministic drafts.
        estimates: weigh the two, and learn what the priced one guessed.
        priced_budget: how much to ask of the priced one.
    """

    def __init__(
        self, free: Drafter, priced: Drafter, estimates: Estimates, priced_budget: Callable[[], int]
    ) -> None:
        super().__init__(free, priced)
        self._estimates = estimates
        self._priced_budget = priced_budget

    def propose(self, session: Session, budget: int, depth: int = ANY_DEPTH) -> Coroutine[DraftTree]:
        free = yield from self._first.propose(session, budget, depth)
        if len(free) and self._estimates.prefers(free):
            return free
        asked = min(budget, self._priced_budget())
        if not asked:
            return free
        guessed = yield from self._second.propose(session, asked, depth)
        self._estimates.note_drafted(guessed)
        return merge([guessed, free], budget, self._estimates.rate)

    def fork(self) -> Weighed:
        return Weighed(self._first.fork(), self._second.fork(), self._estimates, self._priced_budget)
