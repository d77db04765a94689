"""The drafter protocol, and the drafter that proposes nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from specrag.engine import NOTHING, Coroutine, Outputs, Row, Session
from specrag.speculation.tree import EMPTY, DraftTree, Round

#: No limit on the length of a path.
ANY_DEPTH = sys.maxsize


@dataclass
class Stopwatch:
    """Measures the seconds in which a drafter reads its prompt, which are not part of its guesses' price."""

    clock: Callable[[], float] = time.perf_counter
    seconds: float = 0.0

    def timed(self, reading: Coroutine[object]) -> Coroutine[None]:
        """Run to the end and add the time of it."""
        began = self.clock()
        yield from reading
        self.seconds += self.clock() - began


class Drafter(Protocol):
    """Proposes tokens for one session. ``start`` and ``propose`` may run passes of their own."""

    @property
    def outputs(self) -> Outputs:
        """What it reads of the target's rows, in :meth:`start` and in :meth:`observe`."""

    @property
    def runs_passes(self) -> bool:
        """Whether a proposal costs passes, so that its price must be weighed before it is made."""

    def start(self, session: Session, rows: Sequence[Row]) -> Coroutine[None]:
        """Read the prompt, which the session holds; what takes passes may wait for the first proposal.

        Args:
            session: the target's session.
            rows: the target's answers for the last tokens of the prompt but the newest, as far as they were
                asked for and are known.
        """

    def propose(self, session: Session, budget: int, depth: int = ANY_DEPTH) -> Coroutine[DraftTree]:
        """Guess behind the session's newest token.

        Args:
            session: the target's session.
            budget: most nodes of the tree.
            depth: longest path worth proposing: the tokens that may still come, without the bonus.
        """

    def observe(self, round: Round) -> None:
        """Learn what became of a proposal; the round's tokens are committed already."""

    def truncate(self, length: int) -> None:
        """Forget everything behind the first ``length`` tokens of the session."""

    def fork(self) -> Drafter:
        """A drafter in the same state, for a fork of the session."""

    def close(self) -> None:
        """Release memory; called by whoever made the drafter, since it may serve several calls of the loop."""


class NoDrafter:
    """Proposes nothing: plain decoding."""

    outputs = NOTHING
    runs_passes = False

    def start(self, session: Session, rows: Sequence[Row]) -> Coroutine[None]:
        del session, rows
        yield from ()

    def propose(self, session: Session, budget: int, depth: int = ANY_DEPTH) -> Coroutine[DraftTree]:
        del session, budget, depth
        yield from ()
        return EMPTY

    def observe(self, round: Round) -> None:
        del round

    def truncate(self, length: int) -> None:
        del length

    def fork(self) -> NoDrafter:
        return self

    def close(self) -> None:
        pass
