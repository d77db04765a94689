"""EAGLE-2: a head on the target's features guesses a tree that grows where acceptance is likeliest.

Li et al. 2024, "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees", sections 4.1 and 4.2: the
likeliest nodes of a level are expanded, and of all nodes those on the likeliest paths are kept. Candidates are a
function of the text alone: they are verified by the target's own draw, never by a ratio of two probabilities.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from specrag.checks import check_whole
from specrag.engine import (
    NOTHING,
    PREFILL_ROWS,
    Coroutine,
    Outputs,
    Pass,
    Row,
    Segment,
    Session,
    SessionModel,
)
from specrag.errors import InputError
from specrag.speculation.drafters.base import ANY_DEPTH
from specrag.speculation.tree import EMPTY, ROOT, DraftTree, Round

#: Source of the head's tokens.
EAGLE = "eagle"
#: The paper's tree: longest path; nodes expanded per level, which is also the number of children per node.
DEPTH, TOP_K = 5, 10
#: Maximum number of prompt rows that a head reads, the newest ones: the public heads were trained on this length.
PROMPT_ROWS = 2048
#: Tokens that a further pass of the head must promise: it costs about a tenth of a small target's pass.
MIN_GAIN = 0.1

#: Upper bounds of the probability classes, in nats; guesses in one class are accepted about equally often.
_LOG_PROBS = tuple(map(math.log, (0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.95)))
#: Estimated features drift: the head is trusted less after its own guesses. Deeper levels share the last class.
_DEPTHS = 3


class FeatureModel(SessionModel, Protocol):
    """A model whose segments carry features (:class:`specrag.models.eagle_head.EagleHead`)."""

    def keep(self, feature: Any) -> Any:
        """A copy of one row's feature that does not keep its whole pass in memory."""


class Eagle:
    """Guesses a tree with a head that reads the target's features.

    The head's cache holds only rows of true target features; rows estimated while a tree grows are written after them
    and overwritten. Beside the cache, the drafter keeps the feature of every token that the head reads
    (``hidden_size`` numbers each, a tenth or less of the target's own keys and values), so that it can resume from any
    truncation. From the prompt it reads the rows it is given, which may be only the newest; a prompt found in a prefix
    cache leaves it little to read.

    Args:
        head: shared by all requests.
        depth: longest path, at one pass of the head per level.
        top_k: nodes expanded per level, and children per node.
        min_gain: stop growing a tree when the paths that could still grow have a total probability below this, since
            another pass could not add more tokens than that on average; 0: never stop early (the paper).

    Raises:
        InputError: a value is out of range.
    """

    outputs = Outputs(hidden=("final",))
    runs_passes = True

    def __init__(
        self, head: FeatureModel, depth: int = DEPTH, top_k: int = TOP_K, min_gain: float = MIN_GAIN
    ) -> None:
        check_whole("depth", depth, remedy="give an integer, at least 1")
        check_whole("top_k", top_k, remedy="give an integer, at least 1")
        if not 0 <= min_gain <= 1:
            raise InputError("min_gain", min_gain, "give a number of tokens from 0 to 1, 0 for no early end")
        self._head = head
        self._depth, self._top_k, self._min_gain = depth, top_k, min_gain
        self._cache = head.new_cache()
        # Features of the session's tokens from `_first` to the newest but one: always one short of the session's end.
        self._first = 0
        self._features: list[Any] = []

    def start(self, session: Session, rows: Sequence[Row]) -> Coroutine[None]:
        end = max(len(session) - 1, 0)
        known = [
            row.hidden["final"] for row in rows if "final" in row.hidden
        ]  # rows without one are the oldest
        missing = end - self._first - len(self._features)
        if missing > len(known):  # a gap: what lies before it is of no use
            self._cache.truncate(0)
            self._features = known
        elif missing > 0:
            self._features += known[len(known) - missing :]
        self._first = end - len(self._features)
        # The newest row is read with the first proposal, which needs its answer.
        if self._cache.length < len(self._features) - 1:
            yield from self._read(session, len(self._features) - 1, NOTHING)

    def propose(self, session: Session, budget: int, depth: int = ANY_DEPTH) -> Coroutine[DraftTree]:
        if not self._features or min(budget, depth) < 1:
            return EMPTY
        count = len(self._features)
        if self._cache.length == count:  # nothing new since the last proposal
            self._cache.truncate(count - 1)
        wanted = Outputs(top_k=min(self._top_k, budget), hidden=("final",))
        answer = yield from self._read(session, count, wanted)
        growth = _Growth(self._top_k, budget)
        growth.expand([ROOT], [answer])
        for _ in range(min(self._depth, depth) - 1):
            frontier = growth.frontier()
            if not frontier or sum(math.exp(growth.log_probs[node]) for node in frontier) < self._min_gain:
                break
            answers = yield Pass(self._head, growth.segment(self._cache, frontier, wanted))
            growth.expand(frontier, answers)
        return growth.tree()

    def observe(self, round: Round) -> None:
        before = [ROOT, *round.verdict.path][: len(round.tokens)]
        self._features += [self._head.keep(round.rows[node + 1].hidden["final"]) for node in before]

    def truncate(self, length: int) -> None:
        end = max(length - 1, 0)
        kept = max(end - self._first, 0)
        del self._features[kept:]
        self._first = min(self._first, end)
        self._cache.truncate(min(self._cache.length, kept))

    def fork(self) -> Eagle:
        other = Eagle(self._head, self._depth, self._top_k, self._min_gain)
        other._cache = self._cache.fork(self._cache.length)
        other._first = self._first
        other._features = list(self._features)
        return other

    def close(self) -> None:
        self._cache.clear()
        self._first = 0
        self._features = []

    def _read(self, session: Session, count: int, newest: Outputs) -> Coroutine[Row]:
        """Feed the head the first ``count`` true features; returns the answer for the newest of them."""
        self._cache.reserve(count)
        while True:
            fed = self._cache.length
            features = self._features[fed : min(fed + PREFILL_ROWS, count)]
            # A row's token is the one after its feature.
            start = self._first + fed + 1
            tokens = session.tokens[start : start + len(features)]
            outputs = [NOTHING] * (len(features) - 1) + [newest]
            rows: list[Row] = yield Pass(self._head, Segment(self._cache, tokens, None, outputs, features))
            self._cache.accept(range(len(features)))
            if fed + len(features) == count:
                return rows[-1]


@dataclass
class _Growth:
    """A growing tree: every candidate node, and the rows of those that were expanded.

    Args:
        top_k: nodes expanded per level.
        budget: nodes of the final tree.
    """

    top_k: int
    budget: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)  # of a node's whole path
    steps: list[float] = field(default_factory=list)  # of a node, given its parent
    _newest: int = 0  # the first node of the newest level
    _features: dict[int, Any] = field(default_factory=dict)  # of expanded nodes, after their token
    _rows: dict[int, int] = field(
        default_factory=lambda: {ROOT: ROOT}
    )  # where they lie after the cache's end
    _row_parents: list[int] = field(default_factory=list)

    def expand(self, nodes: Sequence[int], answers: Sequence[Row]) -> None:
        """Give nodes the children that the head answered."""
        self._newest = len(self.tokens)
        for node, row in zip(nodes, answers, strict=True):
            assert row.top_tokens is not None
            assert row.top_log_probs is not None
            self._features[node] = row.hidden["final"]
            before = 0.0 if node == ROOT else self.log_probs[node]
            depth = 0 if node == ROOT else self.depths[node] + 1
            for token, step in zip(row.top_tokens.tolist(), row.top_log_probs.tolist(), strict=True):
                if not math.isfinite(step):  # from a damaged head
                    continue
                certain = min(step, 0.0)  # rounding must not make a child likelier than its parent
                self.tokens.append(token)
                self.parents.append(node)
                self.depths.append(depth)
                self.log_probs.append(before + certain)
                self.steps.append(certain)

    def frontier(self) -> list[int]:
        """The likeliest nodes of the newest level, without those whose children the final tree would drop.

        A child is never likelier than its parent, so the child of the least likely node that fits in the tree finds no
        place in it.
        """
        newest = [node for node in self._best(self.budget - 1) if node >= self._newest]
        return newest[: self.top_k]

    def segment(self, cache: Any, nodes: Sequence[int], outputs: Outputs) -> Segment:
        """The rows of these nodes, after those of their ancestors; a node's row reads its parent's estimate."""
        written = len(self._row_parents)
        self._row_parents += [self._rows[self.parents[node]] for node in nodes]
        self._rows.update((node, written + place) for place, node in enumerate(nodes))
        return Segment(
            cache,
            [self.tokens[node] for node in nodes],
            list(self._row_parents),
            [outputs] * len(nodes),
            [self._features[self.parents[node]] for node in nodes],
            written,
        )

    def tree(self) -> DraftTree:
        """The nodes on the likeliest paths; a parent is never less likely than its child and never comes later."""
        kept = sorted(self._best(self.budget))
        place = {ROOT: ROOT} | {node: new for new, node in enumerate(kept)}
        return DraftTree(
            tuple(self.tokens[node] for node in kept),
            tuple(place[self.parents[node]] for node in kept),
            (EAGLE,) * len(kept),
            tuple(self._grade(node) for node in kept),
        )

    def _best(self, count: int) -> list[int]:
        """The likeliest nodes, likeliest first; ties go to the earlier node."""
        order = sorted(range(len(self.tokens)), key=lambda node: -self.log_probs[node])
        return order[:count]

    def _grade(self, node: int) -> int:
        likely = bisect(_LOG_PROBS, self.steps[node])
        return min(self.depths[node], _DEPTHS - 1) * (len(_LOG_PROBS) + 1) + likely
