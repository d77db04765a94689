"""What RAPID is measured against: the same components, configured as in other work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specrag.engine import Coroutine, FinishReason, Row, Session
from specrag.errors import InputError
from specrag.methods.base import PromptNeeds
from specrag.methods.rapid.decoder import GAMMA, RapidDecoder
from specrag.methods.rapid.drafters import SELF, HasLoadedModel
from specrag.speculation import Settings, TextSink

if TYPE_CHECKING:
    from specrag.models import LoadedModel

#: MagicDec's cache: 4,096 entries in all, the first 4 of them sinks (RAPID, section 3.2).
WINDOW, SINKS = 4096, 4


def naive_sd(drafter: str | HasLoadedModel = SELF, gamma: int = GAMMA) -> RapidDecoder:
    """RAPID's drafter, always ``gamma`` guesses, and the target's own law: the paper's naive SD."""
    return RapidDecoder(drafter, gamma=gamma, cost_aware=False, suffix=False, name="naive-sd")


@dataclass(frozen=True)
class StreamingDecoder:
    """The target drafts for itself from the first and the last tokens (StreamingLLM; MagicDec's idea).

    The kept tokens are read again as one text, so that its keys carry nothing of what was left out. The room for
    the output is part of the window.

    Args:
        window: total number of entries in the drafter's cache.
        sinks: those of them that are the prompt's first tokens.
        gamma: guesses per round.
        name: in results.

    Raises:
        InputError: the sinks are not less than half of the window.
    """

    window: int = WINDOW
    sinks: int = SINKS
    gamma: int = GAMMA
    name: str = "streaming-drafter"
    _method: RapidDecoder = field(init=False, repr=False, compare=False)

    prompt_needs = PromptNeeds()

    def __post_init__(self) -> None:
        if not 0 <= self.sinks < self.window // 2:
            raise InputError("sinks", self.sinks, f"give less than half of the window of {self.window}")
        made = RapidDecoder(gamma=self.gamma, cost_aware=False, suffix=False, name=self.name)
        object.__setattr__(self, "_method", made)

    def kept(self, prompt: Sequence[int], new: int) -> list[int]:
        """The prompt's tokens that the drafter reads, if at most ``new`` tokens follow."""
        room = self.window - min(new, self.window // 2)
        if len(prompt) <= room:
            return list(prompt)
        return [*prompt[: self.sinks], *prompt[len(prompt) - (room - self.sinks) :]]

    def check(self, loaded: LoadedModel) -> None:
        """Every model can draft for itself."""
        self._method.check_drafter(loaded)

    def decode(
        self,
        session: Session,
        settings: Settings,
        text: TextSink,
        clock: Callable[[], float],
        prompt_rows: Sequence[Row] = (),
    ) -> Coroutine[FinishReason]:
        reading = self._method.reading(self.kept(session.tokens, settings.stop.max_tokens))
        return reading.decode(session, settings, text, clock, prompt_rows)
