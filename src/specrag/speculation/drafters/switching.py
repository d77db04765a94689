"""The first drafter that has something to say."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specrag.engine.outputs import Outputs, Row
from specrag.engine.passes import Coroutine
from specrag.engine.session import Session
from specrag.speculation.drafters.base import Drafter
from specrag.speculation.tree import EMPTY, DraftTree, Round


class Switching:
    """Asks a first drafter and, where it proposes nothing, a second one (SAM-Decoding's fallback).

    Args:
        first: costs no passes.
        second: may.
        second_budget: how much to ask of the second if it runs passes.
    """

    runs_passes = False

    def __init__(self, first: Drafter, second: Drafter, second_budget: Callable[[], int]) -> None:
        self._first = first
        self._second = second
        self._second_budget = second_budget

    @property
    def outputs(self) -> Outputs:
        """What either reads."""
        return self._first.outputs.union(self._second.outputs)

    def start(self, session: Session, rows: Sequence[Row]) -> Coroutine[None]:
        """See :class:`~specrag.speculation.drafters.base.Drafter`."""
        yield from self._first.start(session, rows)
        yield from self._second.start(session, rows)

    def propose(self, session: Session, budget: int) -> Coroutine[DraftTree]:
        """See :class:`~specrag.speculation.drafters.base.Drafter`."""
        tree = yield from self._first.propose(session, budget)
        if len(tree):
            return tree
        asked = min(budget, self._second_budget()) if self._second.runs_passes else budget
        return (yield from self._second.propose(session, asked)) if asked else EMPTY

    def observe(self, round: Round) -> None:
        """See :class:`~specrag.speculation.drafters.base.Drafter`."""
        self._first.observe(round)
        self._second.observe(round)

    def truncate(self, length: int) -> None:
        """See :class:`~specrag.speculation.drafters.base.Drafter`."""
        self._first.truncate(length)
        self._second.truncate(length)

    def fork(self) -> Switching:
        """See :class:`~specrag.speculation.drafters.base.Drafter`."""
        return Switching(self._first.fork(), self._second.fork(), self._second_budget)

    def close(self) -> None:
        """See :class:`~specrag.speculation.drafters.base.Drafter`."""
        self._first.close()
        self._second.close()
