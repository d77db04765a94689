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
    """Measures the time a drafter spends reading its prompt, which is not part of the price of its guesses."""

    clock: Callable[[], float] = time.perf_counter
    seconds: float = 0.0

    def timed(self, reading: Coroutine[object]) -> Coroutine[None]:
        """Run the reading to its end and add the time it took."""
        began = self.clock()
        yield from reading
        self.seconds += self.clock() - began


class Drafter(Protocol):
    """Proposes tokens for one session. ``start`` and ``propose`` may run passes of their own."""

    @property
    def outputs(self) -> Outputs:
        """What it reads from the target's rows, in :meth:`start` and in :meth:`observe`."""

    @property
    def runs_passes(self) -> bool:
        """Whether a proposal costs passes, so that its price must be weighed before it is made."""

    def start(self, session: Session, rows: Sequence[Row]) -> Coroutine[None]:
        """Read the prompt, which the session holds; work that takes passes may wait for the first proposal.

        Args:
            session: the target's session.
            rows: the target's answers for the last tokens of the prompt, excluding the newest one: those that were
                asked for and are known.
        """

    def propose(self, session: Session, budget: int, depth: int = ANY_DEPTH) -> Coroutine[DraftTree]:
        """Guess what follows the session's newest token.

        Args:
            session: the target's session.
            budget: maximum number of nodes in the tree.
            depth: longest path worth proposing: the number of tokens that may still come, without the bonus token.
        """

    def observe(self, round: Round) -> None:
        """Learn the outcome of a proposal; the round's tokens are already committed."""

    def truncate(self, length: int) -> None:
        """Forget everything after the first ``length`` tokens of the session."""

    def fork(self) -> Drafter:
        """Return a drafter in the same state, for a fork of the session."""

    def close(self) -> None:
        """Release memory. The decoding loop calls this at its end; a second call changes nothing."""


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
