"""Decoding with copies and a drafter, which ``respec`` and ``adaptive`` share with other settings.

ReSpec's three ideas (Fang et al.) can be switched off separately: an entropy trigger decides when and by which key to
look up, scores learned from acceptance decide from which occurrence to copy, and relaxed verification accepts
near-misses in copied text. Relaxation changes the output, so it is off by default. Beyond the paper, a
schedule weighs every guess by its measured cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from specrag.engine import Outputs, Session
from specrag.methods.base import DraftingDecoder, PromptNeeds
from specrag.methods.drafters import NamedDrafter
from specrag.speculation import Matching, Relaxed, Rule, Settings, Speculation
from specrag.speculation.drafters import (
    CORPUS,
    REFERENCE,
    SUFFIX,
    Drafter,
    Recycling,
    RetrievalDrafter,
    RetrievalSettings,
    Weighed,
)
from specrag.speculation.schedule import (
    ByModel,
    CostAware,
    Estimates,
    FixedBudget,
    SharedCosts,
    TokenSchedule,
)
from specrag.speculation.suffix import SuffixCorpus, SuffixIndex

if TYPE_CHECKING:
    from specrag.models import LoadedModel

#: Sources that relaxed verification may relax: copies of text, never a model's own guesses.
COPIED = frozenset({SUFFIX, REFERENCE, CORPUS})


@dataclass(frozen=True)
class RetrievalDecoder(DraftingDecoder):
    """Copies from text, and a drafter that guesses beside them or where nothing is copied.

    Args:
        drafter: guesses where nothing is copied: ``recycling``, ``lookup``, ``none``, ``model:NAME`` or
            ``eagle:NAME`` (:class:`~specrag.methods.drafters.NamedDrafter`). If guesses are weighed, a drafter that
            runs passes is asked where it promises more tokens per second than copies and recycled tokens.
        relaxed: accept copied tokens that are near enough to the target's choice (section 3.4): each relaxed
            token is among its likeliest and at most ``tolerance`` nats below the best. Greedy decoding only;
            sampled text is always verified by the target's draw.
        tolerance: nats (the paper's tau).
        relax_top_k: a relaxed token is among this many likeliest (K).
        relax_attempts: relaxed tokens tried in a round (Phi).
        relax_matches: tokens that must match after a relaxed one (m).
        retrieval: trigger, scores and tree.
        cost_aware: weigh every guess; otherwise ``retrieval.draft_size`` nodes in every round, as in the paper.
        corpus: a static corpus, shared by all requests.
        name: of the method that it decodes for.

    Raises:
        InputError: a value cannot be used.
    """

    drafter: str = "recycling"
    relaxed: bool = False
    tolerance: float = 3.0
    relax_top_k: int = 5
    relax_attempts: int = 2
    relax_matches: int = 3
    retrieval: RetrievalSettings = field(default_factory=RetrievalSettings)
    cost_aware: bool = True
    corpus: SuffixIndex | None = None
    name: str = "adaptive"
    _costs: ByModel[SharedCosts] = field(
        default_factory=lambda: ByModel(SharedCosts), init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        self._fallback  # noqa: B018 - checks the name
        self._relaxed_rule  # noqa: B018 - checks the values

    @cached_property
    def _fallback(self) -> NamedDrafter:
        return NamedDrafter(self.drafter)

    @cached_property
    def _relaxed_rule(self) -> Relaxed:
        return Relaxed(
            top_k=self.relax_top_k,
            tau=self.tolerance,
            attempts=self.relax_attempts,
            matches=self.relax_matches,
            sources=COPIED,
        )

    @property
    def prompt_needs(self) -> PromptNeeds:
        """The entropies that the trigger reads before the first token, and what the fallback reads."""
        trigger, fallback = self.retrieval.trigger, self._fallback
        if trigger is None or (
            self.retrieval.combine and self.cost_aware
        ):  # all guesses are weighed, none triggered
            return PromptNeeds(features=fallback.prompt_features, joins=True)
        outputs = Outputs(entropy=True).union(fallback.outputs)
        return PromptNeeds(trigger.max_key, outputs, fallback.prompt_features)

    def check(self, loaded: LoadedModel) -> None:
        self._fallback.check(loaded)
        if isinstance(self.corpus, SuffixCorpus):
            self.corpus.require_tokenizer(loaded.tokenizer.fingerprint)

    def speculation(self, session: Session, settings: Settings) -> Speculation:
        costs = self._costs.of(session.model)
        weighing = CostAware(costs, self.retrieval.draft_size) if self.cost_aware else None
        schedule: TokenSchedule = weighing or FixedBudget(self.retrieval.draft_size)
        rule: Rule = self._relaxed_rule if self.relaxed and settings.sampling.greedy else Matching()
        drafter = self._drafter(session, settings.references, schedule, weighing)
        return Speculation(drafter, rule, schedule)

    def _drafter(
        self,
        session: Session,
        references: Sequence[Sequence[int]],
        schedule: TokenSchedule,
        estimates: Estimates | None,
    ) -> Drafter:
        fallback = self._fallback.make(session.model, estimates)
        priced = fallback if fallback.runs_passes and self.retrieval.combine else None
        if priced is None or estimates is None:
            return self._copying(fallback, references, schedule, estimates)
        free = self._copying(Recycling(estimates=estimates), references, schedule, estimates)
        return Weighed(free, priced, estimates, lambda: schedule.budget(runs_passes=True))

    def _copying(
        self,
        fallback: Drafter,
        references: Sequence[Sequence[int]],
        schedule: TokenSchedule,
        estimates: Estimates | None,
    ) -> RetrievalDrafter:
        return RetrievalDrafter(
            self.retrieval,
            fallback,
            lambda: schedule.budget(runs_passes=True),
            references,
            self.corpus,
            estimates,
        )
