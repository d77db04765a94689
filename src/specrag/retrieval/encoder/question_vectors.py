"""Passage vectors conditioned on a question, for clustering (Speculative RAG, section 3.2).

The paper uses an encoder that takes instructions (InBedder). Here an ordinary sentence encoder is conditioned by
encoding question and passage together, as one text: the vector then lies between the two, and passages that say
different things about the question lie apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from specrag.retrieval.passage import Passage, passage_text

if TYPE_CHECKING:
    from specrag.retrieval.encoder.encoder import Encoder


@runtime_checkable
class HasEncoder(Protocol):
    """Anything with a sentence encoder, such as a knowledge base."""

    def encoder(self) -> Encoder:
        """The encoder, loaded on first use."""


class QuestionVectors:
    """Embeds passages for a question.

    Args:
        load: returns a sentence encoder when it is first needed; by default the default encoder.
    """

    def __init__(self, load: Callable[[], Encoder] | None = None) -> None:
        self._load = load
        self._encoder: Encoder | None = None

    @property
    def name(self) -> str:
        """Description of how the vectors are made."""
        return f"{self._loaded().name}, question and passage together"

    def embed(self, question: str, passages: Sequence[Passage]) -> np.ndarray:
        """Vectors of unit length, float32 ``[passages, dimension]``."""
        texts = [f"{question}\n{passage_text(passage.title, passage.text)}" for passage in passages]
        return self._loaded().encode_passages(texts)

    def _loaded(self) -> Encoder:
        if self._encoder is None:
            if self._load is not None:
                self._encoder = self._load()
            else:
                from specrag.retrieval.encoder.encoder import load_encoder  # it imports torch

                self._encoder = load_encoder()
        return self._encoder
