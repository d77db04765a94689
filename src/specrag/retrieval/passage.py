"""Passages and hits: what a knowledge base holds and what a search returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of a document that is short enough for an encoder.

    Attributes:
        id: a hash of the document's name, the title and the text, below 2^53: the same in every knowledge base,
            whatever else is added or removed.
        source: the document's path below the folder that was indexed, with forward slashes.
        title: the document's title; empty if it has none.
        place: where in the document it is, such as ``page 3``, ``lines 10-24`` or ``Install > Linux``.
        text: the passage's text.
        metadata: other fields of the document, such as its year.
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
