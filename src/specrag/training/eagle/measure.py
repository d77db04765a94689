"""Accepted length of a finished head, measured in the engine with chains of guesses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specrag.engine import Coroutine, FinishReason, Row, Session
from specrag.language_model import LanguageModel
from specrag.methods import PromptNeeds
from specrag.models import EagleHead, load_head
from specrag.speculation import Matching, Settings, Speculation, TextSink
from specrag.speculation.decode import decode
from specrag.speculation.drafters import PROMPT_ROWS, Eagle
from specrag.speculation.schedule import FixedBudget

if TYPE_CHECKING:
    from specrag.models import LoadedModel


class _Chains:
    """A :class:`~specrag.methods.base.Decoder`: the head's likeliest token, ``length`` times in a row."""

    name = "eagle-chain"

    def __init__(self, head: EagleHead, length: int) -> None:
        self._head = head
        self._length = length

    @property
    def prompt_needs(self) -> PromptNeeds:
        return PromptNeeds(PROMPT_ROWS, Eagle.outputs)

    def check(self, loaded: LoadedModel) -> None:
        del loaded  # the head was loaded for it

    def decode(
        self,
        session: Session,
        settings: Settings,
        text: TextSink,
        clock: Callable[[], float],
        prompt_rows: Sequence[Row] = (),
    ) -> Coroutine[FinishReason]:
        drafter = Eagle(self._head, depth=self._length, top_k=1, min_gain=0)
        speculation = Speculation(drafter, Matching(), FixedBudget(self._length))
        return decode(session, settings, text, speculation, clock, prompt_rows)


@dataclass(frozen=True, slots=True)
class ChainResult:
    """The result of a measurement.

    Attributes:
        prompts, tokens, passes: prompts answered, tokens generated, passes of the target.
    """

    prompts: int
    tokens: int
    passes: int

    @property
    def mean_accepted_tokens(self) -> float:
        """Tokens per pass (MAT), the bonus token included."""
        return self.tokens / max(self.passes, 1)


def measure_chains(
    llm: LanguageModel, head: Path, prompts: Sequence[Sequence[int]], *, length: int, max_tokens: int
) -> ChainResult:
    """Answer prompts greedily with chains of the head's guesses.

    Args:
        head: its folder.
        prompts: token ids.
        length: guesses of a chain.
        max_tokens: of an answer.

    Raises:
        InputError, ModelFilesError: the head cannot be used with the model.
    """
    method = _Chains(load_head(str(head), llm.loaded), length)
    made = [llm.generate(prompt, method=method, max_tokens=max_tokens) for prompt in prompts]
    return ChainResult(
        len(made),
        sum(generation.usage.completion_tokens for generation in made),
        sum(generation.usage.passes for generation in made),
    )
