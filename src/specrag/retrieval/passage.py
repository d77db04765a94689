"""Passages and hits: what a knowledge base holds and what a search returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of a document, as long as an encoder can read.

    Attributes:
        id: a hash of the document's name and of title and text, below 2^53: the same in every knowledge base, whatever
            else comes and goes.
        source: the document's path below the folder that was indexed, with forward slashes.
        title: of the document; empty where it has none.
        place: where in the document, such as ``page 3``, ``lines 10-24`` or ``Install > Linux``.
        text: of the passage.
        metadata: whatever else the document says of itself, such as its year.
    """

    id: int
    source: str
    title: str
    place: str
    text: str
    metadata: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Hit:
    """A passage found by a search; its rank is its place in the list."""

    passage: Passage
    score: float


def passage_text(title: str, text: str) -> str:
    """The text that an encoder reads: the title, if there is one, on a line above the text."""
    return f"{title}\n{text}" if title else text
