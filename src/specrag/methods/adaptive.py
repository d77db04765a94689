"""Adaptive speculation: copies, recycled tokens and a model's guesses, each weighed by its measured cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from specrag.methods.decoding import DecodingMethod
from specrag.methods.retrieval_options import CopyingOptions, corpus_of

if TYPE_CHECKING:
    from specrag.methods.base import Decoder
    from specrag.methods.resources import Resources
    from specrag.speculation.suffix import SuffixCorpus


class Adaptive(DecodingMethod):
    """The product's default: from every source the guesses that promise more than they cost.

    Args:
        options: :class:`Adaptive.Options`.
    """

    name = "adaptive"
    summary = "Copies, recycled tokens and a model's guesses, each weighed by its measured cost"

    class Options(CopyingOptions):
        """Options of adaptive speculation."""

        drafter: str = Field(
            "recycling",
            max_length=4096,
            description="Who guesses besides what can be copied: recycling, lookup, none, model:NAME or eagle:NAME.",
            json_schema_extra={"resource": "drafters", "own": ["recycling", "lookup", "none"]},
        )

    options: Options

    def decoder(self, given: Resources) -> Decoder:
        """See :class:`~specrag.methods.decoding.DecodingMethod`."""
        from specrag.methods.drafters import DRAFTERS

        given.check_drafter(self.options.drafter, DRAFTERS)
        return given.shared.get(_make, self.options, corpus_of(self.options, given))


def _make(options: Any, corpus: SuffixCorpus | None) -> Decoder:
    from specrag.methods.retrieval_decoder import RetrievalDecoder

    return RetrievalDecoder(
        drafter=options.drafter, corpus=corpus, name=Adaptive.name, **options.relaxation()
    )
