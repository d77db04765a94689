"""An EAGLE head of the toy model, in numpy: every row that its cache holds changes every answer behind it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specrag.engine.outputs import Row
from specrag.engine.passes import Segment
from specrag.models.toy import ToyModel

Feature = NDArray[np.float32]


class ToyHeadCache:
    """Tokens and features of one sequence; see :class:`specrag.engine.passes.Cache`."""

    def __init__(self, rows: Sequence[tuple[int, Feature]] = ()) -> None:
        self.rows = list(rows)
        self.fresh: list[tuple[int, Feature]] = []

    @property
    def length(self) -> int:
        return len(self.rows)

    def accept(self, rows: Sequence[int]) -> None:
        self.rows += [self.fresh[row] for row in rows]
        self.fresh = []

    def truncate(self, length: int) -> None:
        del self.rows[length:]
        self.fresh = []

    def fork(self, length: int) -> ToyHeadCache:
        return ToyHeadCache(self.rows[:length])

    def reserve(self, length: int) -> None:
        pass

    @property
    def nbytes(self) -> int:
        return 64 * len(self.rows)

    def extents(self) -> list[ToyHeadCache]:
        return [self]

    def clear(self) -> None:
        self.truncate(0)


class ToyHead:
    """Knows the target well: its estimate is four fifths the truth, the rest is what its cache holds.

    Args:
        target: whose logits are the features.
    """

    def __init__(self, target: ToyModel) -> None:
        self._target = target
        self.passes = 0
        self.rows = 0

    @property
    def vocab_size(self) -> int:
        return self._target.vocab_size

    @property
    def context_length(self) -> int:
        return self._target.context_length

    def new_cache(self) -> ToyHeadCache:
        return ToyHeadCache()

    def keep(self, feature: Feature) -> Feature:
        return feature.copy()

    def estimate(self, rows: Sequence[tuple[int, Feature]]) -> Feature:
        """The feature behind these tokens, ``[vocab_size]``."""
        truth = self._target.logits([token for token, _ in rows])
        features = np.stack([feature for _, feature in rows])
        mixed: Feature = 0.8 * truth + 0.15 * features[-1] + 0.05 * features.mean(axis=0)
        return mixed.astype(np.float32)

    def forward(self, segments: Sequence[Segment]) -> list[list[Row]]:
        self.passes += 1
        self.rows += sum(len(segment.tokens) for segment in segments)
        return [self._run(segment) for segment in segments]

    def _run(self, segment: Segment) -> list[Row]:
        cache: ToyHeadCache = segment.cache
        assert segment.features is not None
        fresh = list(zip(segment.tokens, segment.features, strict=True))
        cache.fresh = cache.fresh[: segment.written] + fresh
        assert len(cache.fresh) == segment.written + len(fresh)
        parents = segment.parents or range(-1, len(fresh) - 1)
        rows = []
        for number, outputs in enumerate(segment.outputs, start=segment.written):
            path = []
            node = number
            while node >= 0:
                path.append(cache.fresh[node])
                node = parents[node]
            feature = self.estimate([*cache.rows, *path[::-1]])
            row = Row(hidden=dict.fromkeys(outputs.hidden, feature))
            if outputs.top_k:
                order = np.argsort(-feature, kind="stable")[: outputs.top_k]
                exact = feature.astype(np.float64)
                log_probs = exact - exact.max()
                log_probs -= np.log(np.exp(log_probs).sum())
                row.top_tokens, row.top_log_probs = order, log_probs[order].astype(np.float32)
            rows.append(row)
        return rows
