"""Plain decoding: one pass a token. The baseline of every method, so it must be good."""

from __future__ import annotations

from collections.abc import Callable

from specrag.engine.passes import Coroutine
from specrag.engine.session import Session
from specrag.engine.stopping import FinishReason
from specrag.scheduling.tokens import FixedBudget
from specrag.speculation.decode import Settings, TextSink, decode
from specrag.speculation.drafters.base import NoDrafter


class Plain:
    """Guesses nothing."""

    name = "plain"

    def decode(
        self, session: Session, settings: Settings, text: TextSink, clock: Callable[[], float]
    ) -> Coroutine[FinishReason]:
        """See :class:`~specrag.methods.base.DecodingMethod`."""
        return decode(session, settings, text, NoDrafter(), FixedBudget(0), clock)
