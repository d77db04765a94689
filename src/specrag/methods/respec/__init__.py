"""ReSpec as published (Fang et al.): entropy trigger, scored copies, a tree of 60 nodes, EAGLE-2 if there is a head.

Departures from the paper are options: ``cost_aware`` weighs every guess by its measured cost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from specrag.methods.decoding import DecodingMethod
from specrag.methods.retrieval_options import CopyingOptions, corpus_of

if TYPE_CHECKING:
    from specrag.methods.base import Decoder
    from specrag.methods.resources import Resources
    from specrag.speculation.suffix import SuffixCorpus

#: The default drafter: EAGLE-2 with the head that comes with the target, otherwise token recycling.
AUTO = "auto"


class ReSpec(DecodingMethod):
    """ReSpec as published: copies from text where the entropy is low, elsewhere a drafter guesses.

    Args:
        options: :class:`ReSpec.Options`; the defaults are the paper's.
    """

    name = "respec"
    summary = "ReSpec: copies from text where entropy is low, else a drafter guesses (as published)"

    class Options(CopyingOptions):
        """Options of ReSpec."""

        drafter: str = Field(
            AUTO,
            max_length=4096,
            description="Guesses where nothing is copied: auto (EAGLE-2 where the model has a head, else token "
            "recycling), recycling, lookup, none, model:NAME or eagle:NAME.",
            json_schema_extra={"resource": "drafters", "own": [AUTO, "recycling", "lookup", "none"]},
        )
        trigger: bool = Field(True, description="Look up only where the entropy is low (section 3.2).")
        feedback_rate: Annotated[float, Field(gt=0, le=1)] | None = Field(
            0.3, title="alpha", description="Weight of the newest reward in a copy's score; none: no scores."
        )
        score_threshold: Annotated[float, Field(ge=0, le=1)] = Field(
            0.2, title="theta_score", description="Least score of a copy."
        )
        candidates: Annotated[int, Field(ge=1, le=32)] = Field(
            3, description="Copies merged into a tree (top 3)."
        )
        draft_size: Annotated[int, Field(ge=1, le=256)] = Field(60, description="Nodes of the tree.")
        cost_aware: bool = Field(
            False, description="Weigh every guess by its measured cost (not in the paper)."
        )

    options: Options

    def decoder(self, given: Resources) -> Decoder:
        """See :class:`~specrag.methods.decoding.DecodingMethod`."""
        from specrag.methods.drafters import DRAFTERS

        drafter = self.options.drafter
        given.check_drafter(drafter, (AUTO, *DRAFTERS))
        if drafter == AUTO:
            drafter = _best_drafter(given.llm.loaded.name) if given.has_model else "recycling"
        return given.shared.get(_make, self.options, drafter, corpus_of(self.options, given))


def _best_drafter(model: str) -> str:
    """EAGLE-2 with the head that comes with a model; token recycling if none does."""
    from specrag.methods.drafters import EAGLE_PREFIX
    from specrag.models import shipped_heads

    return f"{EAGLE_PREFIX}{model}" if model in shipped_heads() else "recycling"


def _make(options: Any, drafter: str, corpus: SuffixCorpus | None) -> Decoder:
    from specrag.methods.retrieval_decoder import RetrievalDecoder
    from specrag.speculation.drafters import EntropyTrigger, RetrievalSettings

    settings = RetrievalSettings(
        trigger=EntropyTrigger() if options.trigger else None,
        feedback_rate=options.feedback_rate,
        score_threshold=options.score_threshold,
        candidates=options.candidates,
        draft_size=options.draft_size,
        combine=False,
    )
    return RetrievalDecoder(
        drafter=drafter,
        retrieval=settings,
        cost_aware=options.cost_aware,
        corpus=corpus,
        name=ReSpec.name,
        **options.relaxation(),
    )
