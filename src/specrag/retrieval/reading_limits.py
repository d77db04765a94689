"""How much of one document is read."""

from __future__ import annotations

import sys
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReadingLimits:
    """Beyond these a document counts as unreadable. Documents from strangers need them: 14 KB can hold 2,000 pages.

    Attributes:
        pages: of a PDF.
        characters: of its text.
    """

    pages: int = sys.maxsize
    characters: int = sys.maxsize


UNLIMITED = ReadingLimits()
