"""The ways to answer from a long context, by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from specrag.methods.base import Decoder

if TYPE_CHECKING:
    from specrag.models import LoadedModel

#: Decodes instead of a method whose drafter would read the same as the target: copies cost no pass.
FALLBACK = "adaptive"


@runtime_checkable
class ReadsPart(Protocol):
    """Has a drafter that reads a part of the context: :class:`~specrag.methods.rapid.decoder.RapidDecoder`."""

    @property
    def name(self) -> str:
        """The name in results."""

    def drafter_model(self, loaded: LoadedModel) -> LoadedModel:
        """The model that drafts for a target; its tokenizer encodes the part."""

    def check_drafter(self, loaded: LoadedModel) -> None:
        """Load the drafter, and make sure that it fits the target."""

    def reading(self, tokens: Sequence[int]) -> Decoder:
        """The method for one request, whose drafter reads these tokens."""


@dataclass(frozen=True, slots=True)
class ContextMethod:
    """How to answer from a long context.

    Attributes:
        name: as it was requested.
        decoding: how the target's text is decoded; a name stands for the default settings, whose measured costs the
            language model keeps; for a method with a drafter that reads a part, used if the part is everything.
        part: drafts from the part; ``None`` if no drafter reads one.
        reads_part_only: the target itself reads the part instead of everything.
    """

    name: str
    decoding: str | Decoder
    part: ReadsPart | None = None
    reads_part_only: bool = False

    def check(self, loaded: LoadedModel) -> None:
        """Make sure that it can work with a model; loads the drafter.

        Raises:
            InputError: it cannot.
            ModelFilesError: the drafter's files are missing or damaged.
        """
        if self.part is not None:
            self.part.check_drafter(loaded)
        if not isinstance(self.decoding, str):
            self.decoding.check(loaded)


def context_method(given: ContextMethod | Decoder | ReadsPart) -> ContextMethod:
    """How to answer with an object that decodes or drafts."""
    if isinstance(given, ContextMethod):
        return given
    if isinstance(given, ReadsPart):
        return ContextMethod(given.name, FALLBACK, given)
    return ContextMethod(given.name, given)
