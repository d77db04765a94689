"""The ways to answer from a long context, by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from specrag.methods.base import DecodingMethod
from specrag.methods.registry import METHODS, check_method, make_method

if TYPE_CHECKING:
    from specrag.models.loading import LoadedModel

#: The target reads the part alone, as in retrieval-augmented generation.
RAG = "rag"
#: Those whose drafter reads the part, and the one whose drafter reads the two ends.
RAPID, NAIVE_SD, STREAMING = "rapid", "naive-sd", "streaming-drafter"

#: Decodes in place of a method whose drafter has nothing else to read than the target: copies cost no pass.
FALLBACK = "respec"

_OWN = (RAPID, RAG, NAIVE_SD, STREAMING)
PURPOSE = "for a long context"
NAMES = (*_OWN, *(name for name in METHODS if name not in _OWN))


@runtime_checkable
class ReadsPart(Protocol):
    """A method whose drafter reads a part of the context, such as :class:`~specrag.methods.rapid.RAPID`."""

    @property
    def name(self) -> str:
        """In results."""

    def drafter_model(self, loaded: LoadedModel) -> LoadedModel:
        """The model that drafts for a target; its tokenizer encodes the part."""

    def check_drafter(self, loaded: LoadedModel) -> None:
        """Load it, and make sure that it fits the target."""

    def reading(self, tokens: Sequence[int]) -> DecodingMethod:
        """The method for one request, whose drafter reads these tokens."""


@dataclass(frozen=True, slots=True)
class ContextMethod:
    """How to answer from a long context.

    Attributes:
        name: as it was asked for.
        decoding: how the target's text is decoded, a name for the default settings, whose measured costs the
            language model keeps; for one that reads a part, where the part is everything.
        part: drafts from the part; ``None`` where no drafter reads one.
        reads_part_only: the target itself reads the part in place of everything.
    """

    name: str
    decoding: str | DecodingMethod
    part: ReadsPart | None = None
    reads_part_only: bool = False

    @property
    def retrieves(self) -> bool:
        """Whether anybody reads a part."""
        return self.part is not None or self.reads_part_only

    def check(self, loaded: LoadedModel) -> None:
        """Make sure that it can work with a model; loads the drafter.

        Raises:
            InputError: it cannot.
            ModelFilesError: the drafter's files are missing or damaged.
        """
        if self.part is not None:
            self.part.check_drafter(loaded)
        made = make_method(self.decoding) if isinstance(self.decoding, str) else self.decoding
        made.check(loaded)


def context_method(given: str | DecodingMethod | ReadsPart) -> ContextMethod:
    """The method of a name, or around a configured one.

    Raises:
        InputError: there is no such method.
    """
    if isinstance(given, ReadsPart):
        return ContextMethod(given.name, FALLBACK, given)
    if not isinstance(given, str):
        return ContextMethod(given.name, given)
    check_name(given)
    if given == RAG:
        return ContextMethod(RAG, "plain", reads_part_only=True)
    # Imported when they are asked for, as in the registry.
    if given == RAPID:
        from specrag.methods import rapid

        return context_method(rapid.RAPID())
    if given in (NAIVE_SD, STREAMING):
        from specrag.methods import rapid_baselines

        made = rapid_baselines.naive_sd() if given == NAIVE_SD else rapid_baselines.StreamingDrafter()
        return context_method(made)
    return ContextMethod(given, given)


def check_name(name: str) -> None:
    """Check that there is a method of this name for long contexts.

    Raises:
        InputError: there is none.
    """
    check_method(name, known=NAMES, purpose=PURPOSE)
