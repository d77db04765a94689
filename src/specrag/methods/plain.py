"""Plain decoding: one pass a token. The baseline of every method, so it must be good."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from specrag.engine.outputs import Row
from specrag.engine.passes import Coroutine
from specrag.engine.session import Session
from specrag.engine.stopping import FinishReason
from specrag.methods.base import PromptNeeds
from specrag.scheduling.tokens import FixedBudget
from specrag.speculation.acceptance import Matching
from specrag.speculation.decode import Settings, Speculation, TextSink, decode
from specrag.speculation.drafters.base import NoDrafter

if TYPE_CHECKING:
    from specrag.models.loading import LoadedModel


class Plain:
    """Guesses nothing."""

    name = "plain"
    prompt_needs = PromptNeeds()

    def check(self, loaded: LoadedModel) -> None:
        """Every model will do."""
        del loaded

    def decode(
        self,
        session: Session,
        settings: Settings,
        text: TextSink,
        clock: Callable[[], float],
        prompt_rows: Sequence[Row] = (),
    ) -> Coroutine[FinishReason]:
        """See :class:`~specrag.methods.base.DecodingMethod`."""
        return decode(session, settings, text, self.speculation(session, settings), clock, prompt_rows)

    def speculation(self, session: Session, settings: Settings) -> Speculation:
        """See :class:`~specrag.methods.base.TokenMethod`."""
        del session, settings
        return Speculation(NoDrafter(), Matching(), FixedBudget(0))
