"""How much of a long context a drafter reads (RAPID, section 3.1), and which of its chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import get_args

import numpy as np

from specrag.errors import InputError
from specrag.retrieval.context_chunks import ContextChunk
from specrag.retrieval.context_scores import ChunkScores, Pooling, Scoring

#: The fewest tokens that a chunk may be cut to, as of :class:`~specrag.retrieval.chunking.Chunker`.
FEWEST_CHUNK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class ContextSettings:
    """The defaults are the paper's, as PAPERS.md reads it.

    Args:
        chunk_tokens: most tokens of a chunk.
        threshold: chunks with a smaller cosine are left out; ``bm25`` has no use for it.
        min_tokens: the part may always have so many tokens.
        share: the part of a longer context may have one ``share``-th of its tokens.
        max_tokens: the part has never more tokens, but for a single best chunk that is longer; ``None`` for no limit.
        scoring: ``dense``, ``bm25`` or ``hybrid``.
        pooling: how a chunk that the encoder reads in several windows gets one score.

    Raises:
        InputError: a value is out of range.
    """

    chunk_tokens: int = 512
    threshold: float = 0.3
    min_tokens: int = 4096
    share: int = 24
    max_tokens: int | None = None
    scoring: Scoring = "dense"
    pooling: Pooling = "max"

    def __post_init__(self) -> None:
        _check_whole("chunk_tokens", self.chunk_tokens, FEWEST_CHUNK_TOKENS)
        _check_whole("min_tokens", self.min_tokens, 1)
        _check_whole("share", self.share, 1)
        if self.max_tokens is not None:
            _check_whole("max_tokens", self.max_tokens, self.min_tokens)
        threshold = self.threshold
        if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not -1 <= threshold <= 1:
            raise InputError("threshold", threshold, "give a cosine similarity from -1 to 1")
        _check_name("scoring", self.scoring, get_args(Scoring))
        _check_name("pooling", self.pooling, get_args(Pooling))

    def budget(self, tokens: int) -> int:
        """Most tokens of the part of a context that has so many: ``max(min_tokens, tokens / share)``, limited."""
        wanted = max(self.min_tokens, tokens // self.share)
        return wanted if self.max_tokens is None else min(wanted, self.max_tokens)


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    """A chunk in the part.

    Attributes:
        number: its place among the context's chunks, from 0.
        score: as of :class:`~specrag.retrieval.context_scores.ChunkScores`.
    """

    chunk: ContextChunk
    number: int
    score: float


@dataclass(frozen=True, slots=True)
class ContextPart:
    """The chunks that a drafter reads.

    Attributes:
        chunks: in document order.
        budget: most tokens that it was allowed.
        context_tokens, context_chunks: of the whole context.
        below_threshold: no chunk is relevant; the single best one stands here all the same.
        seconds: wall-clock time of cutting, encoding and ranking.
    """

    chunks: tuple[ScoredChunk, ...]
    budget: int
    context_tokens: int
    context_chunks: int
    below_threshold: bool
    seconds: float = field(default=0.0, compare=False)

    @property
    def tokens(self) -> int:
        """Of its chunks together."""
        return sum(scored.chunk.tokens for scored in self.chunks)

    @property
    def whole(self) -> bool:
        """Whether nothing was left out: a drafter that reads this reads everything."""
        return len(self.chunks) == self.context_chunks


def choose(scores: ChunkScores, tokens: Sequence[int], budget: int) -> list[int]:
    """The chunks to read, ascending: the best relevant ones, until the next would exceed the budget.

    Ties go to the earlier chunk. The best chunk is always among them, be it irrelevant or longer than the budget.

    Args:
        tokens: of each chunk.
        budget: most tokens together.
    """
    order = np.lexsort((np.arange(len(tokens)), -scores.scores))
    relevant = [int(number) for number in order if scores.relevant[number]]
    chosen: list[int] = []
    used = 0
    for number in relevant or [int(order[0])]:
        if chosen and used + tokens[number] > budget:
            break
        chosen.append(number)
        used += tokens[number]
    return sorted(chosen)


def _check_whole(field: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(field, value, f"give a whole number of at least {least}")


def _check_name(field: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        raise InputError(field, value, f"take one of {', '.join(known)}")
