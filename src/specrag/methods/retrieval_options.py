"""Options of the methods that copy guesses from text: ReSpec as published, and its successor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from specrag.methods.base import MethodOptions

if TYPE_CHECKING:
    from specrag.methods.resources import Resources
    from specrag.speculation.suffix import SuffixCorpus


class CopyingOptions(MethodOptions):
    """Where guesses come from, and which are accepted."""

    corpus: str | None = Field(
        None,
        max_length=4096,
        description="Texts that guesses may be copied from, too.",
        json_schema_extra={"resource": "corpora"},
    )
    relaxed: bool = Field(
        False, description="Accept copied tokens near the model's choice: faster, another text."
    )
    tolerance: Annotated[float, Field(ge=0, le=20)] = Field(
        3.0, title="tau", description="Nats that a relaxed token may lie below the best."
    )
    relax_top_k: Annotated[int, Field(ge=1, le=1000)] = Field(
        5, title="K", description="A relaxed token is among this many likeliest."
    )
    relax_attempts: Annotated[int, Field(ge=1, le=64)] = Field(
        2, title="Phi", description="Relaxed tokens tried in a round."
    )
    relax_matches: Annotated[int, Field(ge=1, le=64)] = Field(
        3, title="m", description="Tokens that must match behind a relaxed one."
    )

    def relaxation(self) -> dict[str, Any]:
        """The options of relaxed verification."""
        return self.model_dump(
            include={"relaxed", "tolerance", "relax_top_k", "relax_attempts", "relax_matches"}
        )


def corpus_of(options: CopyingOptions, given: Resources) -> SuffixCorpus | None:
    """The corpus that the options name.

    Raises:
        InputError: there is none of this name.
    """
    return given.corpus(options.corpus)
