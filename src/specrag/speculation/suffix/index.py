"""What the places where a suffix may be looked up have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specrag.speculation.suffix.tokens import Tokens

#: How long a suffix is looked for where the caller does not say.
MAX_LENGTH = 64


@dataclass(frozen=True, slots=True)
class Match:
    """A suffix that occurs in an index, with at least one token of the same text behind an occurrence.

    Attributes:
        length: tokens of the suffix; 0 where not even its last token occurs.
        place: where the index found it; means something to that index only, until that index changes.
        count: how often it occurs with a token behind it; ``None`` where that is not known.
    """

    length: int
    place: int
    count: int | None = None


class SuffixIndex(Protocol):
    """Texts in which the suffix of a sequence may be looked up. No match reaches across the end of a text.

    A position is an index into all tokens of the index. A suffix *ends at* ``end`` if its last token stands
    at ``end - 1``: the token at ``end`` is the first guess at what follows.
    """

    def __len__(self) -> int:
        """Number of positions, the borders of texts included."""

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""

    def match(self, tail: Tokens, max_length: int = MAX_LENGTH) -> Match:
        """The longest suffix of ``tail``, of at most ``max_length`` tokens, that occurs."""

    def occurrences(self, match: Match, limit: int) -> NDArray[np.int64]:
        """At most ``limit`` distinct ends of ``match``, each with a token of its text behind it."""

    def continuation(self, end: int, count: int) -> NDArray[np.int32]:
        """The at most ``count`` tokens from ``end`` on, cut where their text ends."""
