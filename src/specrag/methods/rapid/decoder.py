"""RAPID: a drafter that reads the retrieved part of a long context guesses for a target that reads all of it.

Chen et al. 2025, "Long-Context Inference with Retrieval-Augmented Speculative Decoding". At eta = 0 the text is the
target's own, token for token. Above 0, the text follows the retrieval-augmented target, which mixes in the drafter's
opinion of every token (:mod:`specrag.speculation.augmented_target`), and may be better than either's. What the
drafter reads is set for each request (:meth:`RapidDecoder.reading`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from specrag.checks import check_whole
from specrag.engine import Coroutine, FinishReason, Row, SamplingParams, Session, SessionModel, check_room
from specrag.errors import InputError
from specrag.methods.base import PromptNeeds
from specrag.methods.rapid.drafters import SELF, DrafterModel, Fit, HasLoadedModel
from specrag.speculation import (
    Augmented,
    AugmentedSettings,
    Guard,
    Matching,
    Residual,
    Settings,
    Speculation,
    TextSink,
)
from specrag.speculation.decode import decode
from specrag.speculation.drafters import (
    RAG,
    Drafter,
    FirstNonEmpty,
    Guessing,
    RagDrafter,
    Recycling,
    RetrievalDrafter,
    RetrievalSettings,
    Stopwatch,
    SuffixDrafter,
    TranslatedRagDrafter,
    Weighed,
)
from specrag.speculation.schedule import (
    ByModel,
    ChainCosts,
    ChainLength,
    CostAware,
    FixedBudget,
    SharedCosts,
    TokenSchedule,
)

if TYPE_CHECKING:
    from specrag.models import LoadedModel

#: The paper's number of guesses per round.
GAMMA = 10
#: Tokens that must agree before what followed them is copied.
MIN_MATCH = 5
#: Maximum number of tokens copied per round by a drafter that must give its opinion of them.
MOST_COPIES = 20
#: If guesses are weighed, a chain ends after a likeliest token with a lower probability than this: the target's own
#: weights, which only save reading the context, must be surer of the next guess than a model whose passes cost almost
#: nothing.
_LEAST_CONFIDENCE_SELF, _LEAST_CONFIDENCE_OTHER = 0.5, 0.2


@dataclass(frozen=True)
class RapidDecoder:
    """Retrieval-augmented speculative decoding, for all requests of one configuration.

    Args:
        drafter: ``self`` for the target's own weights in a second session (self-speculation), a model's name, or a
            loaded :class:`~specrag.LanguageModel`; it may be larger (upward speculation). A drafter with another
            vocabulary drafts only at ``eta=0``.
        eta: strength of the knowledge transfer from the drafter (Eq. 6); 0 gives the target's own text, as does
            temperature 0, the limit of Eq. 6 (docs/decisions/0018). The paper uses 5 to 20 for self-speculation, and 40
            and 50 for upward speculation.
        gamma: guesses per round; their maximum if they are weighed.
        residual: ``exact`` gives p-hat, ``paper`` what the paper prints.
        guard: of the tail (Eq. 9): ``renormalised``, ``raw`` or ``off``; by default renormalised if the residual
            is exact, otherwise raw.
        cost_aware: weigh guesses by their measured cost: at ``eta=0`` down to none, above it only their number changes.
        suffix: copy after a repetition before the drafter guesses; above ``eta=0`` from what the drafter reads, with
            its opinion of the copies. By default off with the paper's residual, since the paper has no copies. At
            ``eta=0``, if guesses are weighed, copies and recycled tokens as in ReSpec, plus the drafter where it
            promises more.
        mask: tokens that the drafter gives less than this share of its likeliest's probability are not moved (0.1 in
            the authors' code, 0 in the paper).
        name: in results; a baseline has its own.

    Raises:
        InputError: a value cannot be used.
    """

    drafter: str | HasLoadedModel = SELF
    eta: float = 0.0
    gamma: int = GAMMA
    residual: Residual = "exact"
    guard: Guard | None = None
    cost_aware: bool = True
    suffix: bool | None = None
    mask: float = 0.0
    name: str = "rapid"
    _model: DrafterModel = field(init=False, repr=False, compare=False)
    _costs: ByModel[SharedCosts] = field(
        default_factory=lambda: ByModel(SharedCosts), init=False, repr=False, compare=False
    )
    _chain_costs: ByModel[ChainCosts] = field(
        default_factory=lambda: ByModel(ChainCosts), init=False, repr=False, compare=False
    )

    prompt_needs = PromptNeeds()

    def __post_init__(self) -> None:
        self.augmented  # noqa: B018 - checks the values
        check_whole("gamma", self.gamma, remedy="give the number of tokens to guess, at least 1")
        object.__setattr__(self, "_model", DrafterModel(self.drafter))

    @property
    def augmented(self) -> AugmentedSettings:
        """The settings of the target that the text follows."""
        return AugmentedSettings(self.eta, self.residual, self.guard, self.mask)

    @property
    def copies(self) -> bool:
        """Whether guesses are copied where the text repeats itself."""
        return self.suffix if self.suffix is not None else self.eta == 0 or self.residual == "exact"

    def drafter_model(self, loaded: LoadedModel) -> LoadedModel:
        """The model that drafts for a target: its tokenizer encodes the input of :meth:`reading`.

        Raises:
            ModelFilesError: the drafter's files are missing or damaged.
        """
        return self._model.loaded_for(loaded)

    def reading(self, tokens: Sequence[int]) -> Reading:
        """The method for one request.

        Args:
            tokens: the drafter's prompt, in tokens of :meth:`drafter_model`: the retrieved part of the context and
                the question, after which the answer begins.

        Raises:
            InputError: there are none.
        """
        return Reading(self, tuple(int(token) for token in tokens))

    def check(self, loaded: LoadedModel) -> None:
        """See :class:`~specrag.methods.base.Decoder`.

        Raises:
            InputError: always, since it does not know what the drafter reads (:meth:`reading`).
        """
        del loaded
        self._refuse()

    def decode(
        self,
        session: Session,
        settings: Settings,
        text: TextSink,
        clock: Callable[[], float],
        prompt_rows: Sequence[Row] = (),
    ) -> Coroutine[FinishReason]:
        """See :class:`~specrag.methods.base.Decoder`; :class:`Reading` decodes.

        Raises:
            InputError: always.
        """
        del session, settings, text, clock, prompt_rows
        self._refuse()
        yield from ()
        raise AssertionError

    def _refuse(self) -> None:
        remedy = "it needs a long context (specrag ask --context FILE), or what its drafter reads: .reading(tokens)"
        raise InputError("method", self.name, remedy)

    def check_drafter(self, loaded: LoadedModel) -> None:
        """Load the drafter and make sure that it fits a target.

        Raises:
            InputError: its vocabulary differs, which only ``eta=0`` allows, or cannot be aligned.
            ModelFilesError: its files are missing or damaged.
        """
        fit = self._model.fit(loaded)
        if fit.pair is not None and self.eta > 0:
            remedy = "a drafter of another vocabulary has no opinion of the target's tokens; take eta=0"
            raise InputError("eta", self.eta, remedy)

    def _transfers(self, sampling: SamplingParams) -> bool:
        """Whether the drafter's opinion influences the text."""
        return self.eta > 0 and not sampling.greedy

    def _schedule(
        self, target: SessionModel, own_context: int | None, sampling: SamplingParams
    ) -> TokenSchedule:
        if not self.cost_aware:
            return FixedBudget(self.gamma)
        if self._transfers(sampling):
            return ChainLength(
                self._chain_costs.of(target), self.gamma, MOST_COPIES if self.copies else 0, RAG
            )
        return CostAware(self._costs.of(target), own_context=own_context)

    def _drafter(
        self,
        fit: Fit,
        target: SessionModel,
        tokens: Sequence[int],
        settings: Settings,
        schedule: TokenSchedule,
        watch: Stopwatch,
    ) -> Drafter:
        """The drafter of one request; whatever decodes with it closes it."""
        least = 0.0
        if self.cost_aware:
            least = _LEAST_CONFIDENCE_SELF if fit.model is target else _LEAST_CONFIDENCE_OTHER
        if self._transfers(settings.sampling):
            copy_from = MIN_MATCH if self.copies else 0
            guessing = Guessing(
                settings.sampling, opinions=True, copy_from=copy_from, processors=settings.processors
            )
            if isinstance(schedule, ChainLength):
                guessing = replace(
                    guessing, most=lambda: schedule.length, most_copies=lambda: schedule.copies
                )
            return RagDrafter(fit.model, tokens, guessing, watch)
        drafter: Drafter
        if fit.pair is not None:
            drafter = TranslatedRagDrafter(fit.model, fit.pair, tokens, self.gamma, least, watch)
        else:
            guessing = Guessing(settings.sampling, most=lambda: self.gamma, min_confidence=least)
            drafter = RagDrafter(fit.model, tokens, guessing, watch)
        if not self.copies:
            return drafter

        def budget() -> int:
            return schedule.budget(runs_passes=True)

        if not isinstance(schedule, CostAware):
            return FirstNonEmpty(SuffixDrafter(MIN_MATCH), drafter, budget)
        free = RetrievalDrafter(
            RetrievalSettings(), Recycling(estimates=schedule), budget, estimates=schedule
        )
        return Weighed(free, drafter, schedule, budget)


@dataclass(frozen=True)
class Reading:
    """RAPID for one request, with the drafter's prompt; costs and models belong to the method.

    Args:
        method: the configuration.
        tokens: the drafter's prompt, in its own model's tokens.

    Raises:
        InputError: there are no tokens.
    """

    method: RapidDecoder
    tokens: tuple[int, ...] = field(repr=False)

    prompt_needs = PromptNeeds()

    def __post_init__(self) -> None:
        if not self.tokens:
            raise InputError("reading", self.tokens, "give the drafter at least one token to read")

    @property
    def name(self) -> str:
        """The name in the registry."""
        return self.method.name

    def check(self, loaded: LoadedModel) -> None:
        """See :class:`~specrag.methods.base.Decoder`.

        Raises:
            InputError: the drafter does not fit the target.
            ContextLengthError: it cannot read that much.
        """
        self.method.check_drafter(loaded)
        check_room(self.method.drafter_model(loaded).model, len(self.tokens))

    def decode(
        self,
        session: Session,
        settings: Settings,
        text: TextSink,
        clock: Callable[[], float],
        prompt_rows: Sequence[Row] = (),
    ) -> Coroutine[FinishReason]:
        """See :class:`~specrag.methods.base.Decoder`.

        Raises:
            ContextLengthError: every token needs the drafter's opinion, and its model cannot read the longest output.
        """
        method, sampling, watch = self.method, settings.sampling, Stopwatch(clock)
        fit = method._model.known_fit(session.model)
        transfers = method._transfers(sampling)
        if transfers:
            check_room(fit.model, len(self.tokens) + settings.stop.max_tokens)
        own_context = len(self.tokens) if fit.model is session.model else None
        schedule = method._schedule(session.model, own_context, sampling)
        rule = Augmented(method.augmented, sampling) if transfers else Matching()
        drafter = method._drafter(fit, session.model, self.tokens, settings, schedule, watch)
        speculation = Speculation(drafter, rule, schedule, watch)
        return (yield from decode(session, settings, text, speculation, clock, prompt_rows))
