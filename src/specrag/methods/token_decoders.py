"""Plain decoding and decoding with one drafter. Plain decoding is every method's baseline, so it must be good."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specrag.engine import Session
from specrag.methods.base import DraftingDecoder, PromptNeeds
from specrag.methods.drafters import NamedDrafter
from specrag.speculation import Matching, Settings, Speculation
from specrag.speculation.drafters import Drafter, FirstNonEmpty, NoDrafter, SuffixDrafter
from specrag.speculation.schedule import ByModel, CostAware, FixedBudget, SharedCosts, TokenSchedule

if TYPE_CHECKING:
    from specrag.models import LoadedModel


class PlainDecoder(DraftingDecoder):
    """Guesses nothing."""

    name = "plain"

    def speculation(self, session: Session, settings: Settings) -> Speculation:
        del session, settings
        return Speculation(NoDrafter(), Matching(), FixedBudget(0))


class Drafted(DraftingDecoder):
    """One drafter, strict verification.

    Args:
        name: in the registry.
        drafter: see :class:`~specrag.methods.drafters.NamedDrafter`.
        budget: tokens to guess in every round, as in the drafter's paper; ``None`` weighs them by their cost.
        copy_first: first copy after the longest match, as SAM-Decoding does, and guess only if there is none.
    """

    def __init__(self, name: str, drafter: str, budget: int | None, *, copy_first: bool = False) -> None:
        self.name = name
        self._drafter = NamedDrafter(drafter)
        self._budget = budget
        self._copy_first = copy_first
        self._costs = ByModel(SharedCosts)

    @property
    def prompt_needs(self) -> PromptNeeds:
        """What a head reads from the prompt; other drafters read nothing."""
        return PromptNeeds(features=self._drafter.prompt_features, joins=True)

    def check(self, loaded: LoadedModel) -> None:
        self._drafter.check(loaded)

    def speculation(self, session: Session, settings: Settings) -> Speculation:
        del settings
        weighing = CostAware(self._costs.of(session.model)) if self._budget is None else None
        schedule: TokenSchedule = weighing or FixedBudget(self._budget or 0)
        drafter: Drafter = self._drafter.make(session.model, weighing)
        if self._copy_first:
            drafter = FirstNonEmpty(SuffixDrafter(), drafter, lambda: schedule.budget(runs_passes=True))
        return Speculation(drafter, Matching(), schedule)


#: Transformers' default of ten tokens.
PROMPT_LOOKUP_TOKENS = 10
#: SAM-Decoding copies 40 tokens.
SAM_TOKENS = 40
#: Token recycling verifies a tree of 80 nodes.
RECYCLING_NODES = 80
#: A common choice for a draft model (Leviathan et al. 2023, figure 3).
DRAFT_MODEL_TOKENS = 5
#: EAGLE-2 verifies a tree of 60 nodes.
EAGLE_NODES = 60


def prompt_lookup() -> Drafted:
    """Copies after the newest n-gram, ten tokens per round."""
    return Drafted("prompt-lookup", "lookup", PROMPT_LOOKUP_TOKENS)


def token_recycling() -> Drafted:
    """Guesses the tokens that were likely after the same ones before (Luo et al. 2024)."""
    return Drafted("token-recycling", "recycling", RECYCLING_NODES)


def sam_decoding() -> Drafted:
    """Copies after the longest match, otherwise recycles tokens (Hu et al. 2024)."""
    return Drafted("sam-decoding", "recycling", SAM_TOKENS, copy_first=True)


def draft_model(name: str) -> Drafted:
    """Lets a smaller model guess (Leviathan et al. 2023), even one with another vocabulary (Timor et al. 2025)."""
    return Drafted("draft-model", f"model:{name}", DRAFT_MODEL_TOKENS)


def eagle(name: str) -> Drafted:
    """Lets a head on the target's features guess (Li et al. 2024, EAGLE-2).

    Args:
        name: a head, see :func:`~specrag.models.eagle_files.head_folder`.
    """
    return Drafted("eagle-2", f"eagle:{name}", EAGLE_NODES)
