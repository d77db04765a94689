"""A small exact model in numpy, for proofs by enumeration and for testing decoding loops without networks.

Its next-token distribution depends only on the last ``order`` tokens, through a table of logits drawn once from a
seed. Its cache keeps the tokens themselves, row by row, and the logits are computed from the cache's content and the
rows' ancestors, so a row kept in the wrong place changes the output, as it would with keys and values. Its output
matrix is the identity, so its hidden states are its logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specrag.engine import Outputs, Row, Segment


class ToyCache:
    """Tokens of one sequence; see :class:`specrag.engine.passes.Cache`."""

    def __init__(self, rows: Sequence[int] = ()) -> None:
        self.rows = list(rows)
        self.fresh: list[int] = []

    @property
    def length(self) -> int:
        return len(self.rows)

    def accept(self, rows: Sequence[int]) -> None:
        kept = [self.fresh[row] for row in rows]
        self.rows += kept
        self.fresh = self.fresh[len(kept) :] if list(rows) == list(range(len(kept))) else []

    def truncate(self, length: int) -> None:
        del self.rows[length:]
        self.fresh = []

    def fork(self, length: int) -> ToyCache:
        return ToyCache(self.rows[:length])

    def reserve(self, length: int) -> None:
        del length  # a list grows by itself

    @property
    def nbytes(self) -> int:
        return 8 * len(self.rows)

    def extents(self) -> list[ToyCache]:
        return [self]

    def clear(self) -> None:
        self.truncate(0)


class ToyModel:
    """A :class:`~specrag.engine.passes.SessionModel` of a few tokens.

    Args:
        vocab_size: number of tokens.
        order: how many of the last tokens the distribution depends on; missing ones count as an extra token.
        scale: standard deviation of the logits, in nats; larger is more peaked.
        seed: seed of the table.
        context_length: largest number of tokens in a sequence.
    """

    def __init__(
        self,
        vocab_size: int = 5,
        order: int = 2,
        scale: float = 1.5,
        seed: int = 0,
        context_length: int = 512,
    ) -> None:
        generator = np.random.default_rng(seed)
        size = (vocab_size + 1,) * order + (vocab_size,)
        self.table = generator.normal(0.0, scale, size).astype(np.float32)
        self._order = order
        self._context_length = context_length
        self.passes = 0
        self.rows = 0

    @property
    def vocab_size(self) -> int:
        return int(self.table.shape[-1])

    @property
    def context_length(self) -> int:
        return self._context_length

    def new_cache(self) -> ToyCache:
        return ToyCache()

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Float32 ``[vocab_size]``: the logits after these tokens."""
        last = list(tokens[-self._order :])
        missing = [self.vocab_size] * (self._order - len(last))
        row: np.ndarray = self.table[tuple(missing + last)]
        return row

    def forward(self, segments: Sequence[Segment]) -> list[list[Row]]:
        self.passes += 1
        answers = []
        for segment in segments:
            self.rows += len(segment.tokens)
            cache: ToyCache = segment.cache
            cache.fresh = list(segment.tokens)
            parents = segment.parents or range(-1, len(segment.tokens) - 1)
            rows = []
            for number, outputs in enumerate(segment.outputs):
                path: list[int] = []
                node = number
                while node >= 0:
                    path.append(segment.tokens[node])
                    node = parents[node]
                rows.append(_row(self.logits([*cache.rows, *path[::-1]]), outputs))
            answers.append(rows)
        return answers


def _row(logits: np.ndarray, outputs: Outputs) -> Row:
    exact = logits.astype(np.float64)
    log_probs = exact - exact.max()
    log_probs -= np.log(np.exp(log_probs).sum())
    row = Row()
    if outputs.argmax:
        row.argmax = int(logits.argmax())
    if outputs.logits:
        row.logits = logits.copy()
    if outputs.entropy:
        row.entropy_of = lambda: float(-(np.exp(log_probs) * log_probs).sum())
    if outputs.top_k:
        order = np.argsort(-logits, kind="stable")[: outputs.top_k]
        row.top_tokens = order
        row.top_log_probs = log_probs[order].astype(np.float32)
    if outputs.log_probs_of:
        row.log_probs = log_probs[list(outputs.log_probs_of)].astype(np.float32)
    if outputs.hidden:
        row.hidden = dict.fromkeys(outputs.hidden, logits.copy())
    return row
