"""What every method of the token level offers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from specrag.engine.passes import Coroutine
from specrag.engine.session import Session
from specrag.engine.stopping import FinishReason
from specrag.speculation.decode import Settings, TextSink


class DecodingMethod(Protocol):
    """A configuration of drafter, acceptance rule and schedule, shared by all requests that ask for it.

    What a request learns stays in the coroutine of its :meth:`decode`. The object itself holds settings, what
    is costly to make (a draft model, a corpus), and the measured cost of passes, which changes no output.
    """

    @property
    def name(self) -> str:
        """As in the registry, with what was changed after a plus sign."""

    def decode(
        self, session: Session, settings: Settings, text: TextSink, clock: Callable[[], float]
    ) -> Coroutine[FinishReason]:
        """Decode behind the session's tokens; emits a :class:`~specrag.speculation.decode.Step` a round."""
