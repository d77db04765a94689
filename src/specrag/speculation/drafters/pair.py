"""Two drafters that follow one session."""

from __future__ import annotations

from collections.abc import Sequence

from specrag.engine.outputs import Outputs, Row
from specrag.engine.passes import Coroutine
from specrag.engine.session import Session
from specrag.speculation.drafters.base import Drafter
from specrag.speculation.tree import Round


class Pair:
    """What both are told; who proposes when is said by those that derive from it.

    Args:
        first: costs no passes.
        second: may.
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
        """See :class:`~specrag.speculation.drafters.base.Drafter`."""
        yield from self._first.start(session, rows)
        yield from self._second.start(session, rows)

    def observe(self, round: Round) -> None:
        """See :class:`~specrag.speculation.drafters.base.Drafter`."""
        self._first.observe(round)
        self._second.observe(round)

    def truncate(self, length: int) -> None:
        """See :class:`~specrag.speculation.drafters.base.Drafter`."""
        self._first.truncate(length)
        self._second.truncate(length)

    def close(self) -> None:
        """See :class:`~specrag.speculation.drafters.base.Drafter`."""
        self._first.close()
        self._second.close()
