"""What every drafter offers, and the one that proposes nothing."""

from __future__ import annotations

from typing import Protocol

from specrag.engine.passes import Coroutine
from specrag.engine.session import Session
from specrag.speculation.tree import EMPTY, DraftTree, Round


class Drafter(Protocol):
    """Proposes tokens for one session. ``start``, ``propose`` and ``observe`` may run passes of their own."""

    def start(self, session: Session) -> Coroutine[None]:
        """Read the prompt, which the session holds."""

    def propose(self, session: Session, budget: int) -> Coroutine[DraftTree]:
        """Guess at most ``budget`` tokens behind the session's newest token."""

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

    def start(self, session: Session) -> Coroutine[None]:
        del session
        yield from ()

    def propose(self, session: Session, budget: int) -> Coroutine[DraftTree]:
        del session, budget
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
