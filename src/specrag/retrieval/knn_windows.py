"""Texts cut into windows that a model reads, one entry of a kNN-LM datastore for each token that has a next one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from specrag.retrieval.knn_manifest import WindowSettings

Tokens: TypeAlias = npt.NDArray[np.int32]

#: What the ``windows`` file holds for each window: a key of its text, and the number of its entries.
WINDOW_TYPE = np.dtype([("text", "V16"), ("entries", "<i8")])


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Tokens read in one go.

    Args:
        tokens: int32, what the model reads.
        skipped: how many of them, from the first, make no entries.
        values: int32, the token behind each of the others.
    """

    tokens: Tokens
    skipped: int
    values: Tokens

    @property
    def key(self) -> bytes:
        """16 bytes that name this window among all."""
        digest = hashlib.blake2b(self.tokens.tobytes(), digest_size=16)
        digest.update(f"/{self.skipped}/{self.values[-1]}".encode())
        return digest.digest()


def windows(documents: Sequence[Tokens], settings: WindowSettings) -> Iterator[Window]:
    """All windows of some texts, in their order; a text of one token has none.

    Args:
        documents: the tokens of each text.
        settings: how to cut.
    """
    for tokens in documents:
        start, covered = 0, 0  # of the window, and entries made so far
        while covered < len(tokens) - 1:
            end = min(start + settings.tokens, len(tokens) - 1)
            yield Window(tokens[start:end], covered - start, tokens[covered + 1 : end + 1])
            covered = end
            start = max(end - settings.context, 0)


def entries_of(documents: Sequence[Tokens]) -> int:
    """How many entries these texts make."""
    return sum(max(len(tokens) - 1, 0) for tokens in documents)


def value_type(vocab_size: int) -> np.dtype[np.generic]:
    """The smallest type that holds every token."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<i4")
