"""Plain decoding: one pass per token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specrag.methods.base import Needs
from specrag.methods.decoding import DecodingMethod

if TYPE_CHECKING:
    from specrag.methods.base import Decoder
    from specrag.methods.resources import Resources


class Plain(DecodingMethod):
    """Guesses nothing; the baseline of every other method. A model behind endpoints decodes in its own way."""

    name = "plain"
    summary = "One token a pass: the baseline"
    needs = Needs.GENERATOR

    def decoder(self, given: Resources) -> Decoder:
        """See :class:`~specrag.methods.decoding.DecodingMethod`."""
        from specrag.methods.token_decoders import PlainDecoder

        return given.shared.get(PlainDecoder)
