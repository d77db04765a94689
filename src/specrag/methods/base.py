"""What every method of the token level offers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from specrag.engine.outputs import NOTHING, Outputs, Row
from specrag.engine.passes import Coroutine
from specrag.engine.session import PREFILL_ROWS, Session
from specrag.engine.stopping import FinishReason
from specrag.speculation.decode import Settings, Speculation, TextSink

if TYPE_CHECKING:
    from specrag.models.loading import LoadedModel


_FEATURE = Outputs(hidden=("final",))


@dataclass(frozen=True, slots=True)
class PromptNeeds:
    """What a method reads of the prompt's own pass.

    Args:
        rows: how many of its last rows; the newest token is not among them, it is fed with the first round.
        outputs: what each of them returns.
        features: how many of its last rows return their ``final`` hidden state, which needs no logits.
    """

    rows: int = 0
    outputs: Outputs = NOTHING
    features: int = 0


def read_prompt(
    session: Session, tokens: Sequence[int], needs: PromptNeeds, chunk: int = PREFILL_ROWS
) -> Coroutine[list[Row]]:
    """Feed a prompt, at most ``chunk`` rows a pass; the answers for those of its last rows that a method asks for."""
    fed = len(session.pending) + len(tokens) - 1
    full = min(needs.rows, fed)
    wanted = max(full, min(needs.features, fed))
    outputs = [NOTHING] * (fed - wanted) + [_FEATURE] * (wanted - full) + [needs.outputs] * full
    rows = yield from session.extend(tokens, outputs, chunk)
    return rows[fed - wanted :]


class DecodingMethod(Protocol):
    """A configuration of drafter, acceptance rule and schedule, shared by all requests that ask for it.

    What a request learns stays in the coroutine of its :meth:`decode`. The object itself holds settings, what
    is costly to make (a draft model, a corpus), and the measured cost of passes, which changes no output.
    """

    @property
    def name(self) -> str:
        """As in the registry."""

    @property
    def prompt_needs(self) -> PromptNeeds:
        """What it reads of the prompt's own pass."""

    def check(self, loaded: LoadedModel) -> None:
        """Check that it can work with a model, before any work.

        Raises:
            InputError: it cannot, such as a draft model of another vocabulary.
        """

    def decode(
        self,
        session: Session,
        settings: Settings,
        text: TextSink,
        clock: Callable[[], float],
        prompt_rows: Sequence[Row] = (),
    ) -> Coroutine[FinishReason]:
        """Decode behind the session's tokens; emits a :class:`~specrag.speculation.decode.Step` a round.

        Args:
            session: holds the prompt.
            settings: what the caller asks.
            text: turns tokens into characters.
            clock: seconds.
            prompt_rows: the answers to :attr:`prompt_needs`; fewer, if the prompt is shorter or was cached.
        """


class TokenMethod(DecodingMethod, Protocol):
    """A method that is a drafter, a rule and a schedule, which another may use for guesses of its own."""

    def speculation(self, session: Session, settings: Settings) -> Speculation:
        """Those of one request; whoever asked closes the drafter."""
