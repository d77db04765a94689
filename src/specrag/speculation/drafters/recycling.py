"""Token recycling: tokens that were likely after a token before are guessed after it again.

Luo et al. 2024, "Turning Trash into Treasure". Every row of a verified tree, kept or not, gives the likeliest
next tokens after the row's own token. The newest such answer is stored for each token, and a tree of fixed shape is
filled from these answers.
"""

from __future__ import annotations

import heapq
import math
from array import array
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from specrag.engine import Coroutine, Outputs, Row, Session
from specrag.speculation.drafters.base import ANY_DEPTH
from specrag.speculation.schedule.base import Estimates
from specrag.speculation.tree import ROOT, DraftTree, Round

#: Source of recycled tokens.
RECYCLING = "recycling"
#: Next tokens stored for each token (the paper's k).
CANDIDATES = 8
#: The paper's tree.
NODES, DEPTH = 80, 6


@dataclass(frozen=True, slots=True)
class Shape:
    """A tree of ranks, likeliest paths first, so that each prefix of it is the best tree of its size.

    Attributes:
        parents: the node that each node follows, :data:`~specrag.speculation.tree.ROOT` for the first.
        ranks: which of its parent's candidates a node holds, 0 for the likeliest.
        depths: 0 for the first guesses.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    depths: tuple[int, ...]


def best_shape(nodes: int, depth: int, rates: Sequence[float]) -> Shape:
    """The tree of the likeliest paths when a candidate's chance depends only on its rank.

    Args:
        nodes: size of the tree.
        depth: longest path.
        rates: the chance that the candidate of each rank is right, in descending order.
    """
    parents: list[int] = []
    ranks: list[int] = []
    depths: list[int] = []
    # A node enters the queue when its parent or its sibling one rank above leaves it: neither is less likely.
    queue = [(-rates[0], 0, ROOT, 0, 0)]  # negated chance of the path, age to break ties, parent, rank, depth
    while queue and len(parents) < nodes:
        chance, _, parent, rank, level = heapq.heappop(queue)
        node = len(parents)
        parents.append(parent)
        ranks.append(rank)
        depths.append(level)
        if rank + 1 < len(rates):
            sibling = chance / rates[rank] * rates[rank + 1]
            heapq.heappush(queue, (sibling, 2 * node + 1, parent, rank + 1, level))
        if level + 1 < depth:
            heapq.heappush(queue, (chance * rates[0], 2 * node + 2, node, 0, level + 1))
    return Shape(tuple(parents), tuple(ranks), tuple(depths))


#: How often the candidate of each rank was right, given that its parent was: SmolLM2, 26 Spec-Bench prompts of all
#: tasks, 64 tokens each. It hardly depends on the depth (0.35, 0.39, 0.43, 0.41 for the likeliest at depths 0 to 3).
_RATES = (0.39, 0.105, 0.055, 0.042, 0.023, 0.019, 0.018, 0.017)
_SHAPE = best_shape(NODES, DEPTH, _RATES)
#: Upper bounds of the probability classes, in nats; guesses in one class are accepted about equally often.
_LOG_PROBS = tuple(map(math.log, (0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.95)))
_CLASSES = len(_LOG_PROBS) + 2  # one more than the bounds, and one for what was read in the prompt
#: Initial acceptance rate by grade: 36 Spec-Bench prompts with odd ids (SmolLM2;
#: docs/log/2026-11-21-recycled-tokens-graded-by-probability.md). One line each for the likeliest candidate, the second
#: and the others; by probability class, the last column for what was read in the prompt.
RECYCLED_RATES = (
    *(0.05, 0.05, 0.15, 0.25, 0.3, 0.42, 0.45, 0.64, 0.74, 0.42),
    *(0.03, 0.05, 0.15, 0.15, 0.17, 0.17, 0.17, 0.17, 0.17, 0.2),
    *(0.014, 0.026, 0.07, 0.06, 0.06, 0.06, 0.06, 0.06, 0.06, 0.09),
)


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Distinct next tokens after a token, likeliest first."""

    tokens: Sequence[int] = ()
    log_probs: Sequence[float] = ()  # empty for what was read in the prompt

    def grade(self, rank: int) -> int:
        """The grade by rank and by how likely the target found the candidate when it was learned."""
        likely = bisect(_LOG_PROBS, self.log_probs[rank]) if self.log_probs else _CLASSES - 1
        return min(rank, 2) * _CLASSES + likely


_NONE = _Candidates()


class Recycling:
    """Fills a tree of fixed shape from a table of next tokens, likeliest paths first.

    The table belongs to the request. It grows by at most one entry of about 350 bytes for each verified row.

    Args:
        read_prompt: for tokens without an answer from the target so far, guess what followed them in the prompt (not in
            the paper, which reads the answers of all prompt rows; this guesses as well and needs no answers).
        estimates: leave out what would not be verified; without them the tree is as full as the table allows.
    """

    outputs = Outputs(top_k=CANDIDATES)
    runs_passes = False

    def __init__(self, *, read_prompt: bool = True, estimates: Estimates | None = None) -> None:
        self._read_prompt = read_prompt
        self._estimates = estimates
        # Entries are replaced, never modified, so forks can share them.
        self._next: dict[int, _Candidates] = {}
        self._followed: dict[int, _Candidates] = {}
        self._read = 0
        self._newest: int | None = None  # the token that the next round's first row follows

    def start(self, session: Session, rows: Sequence[Row]) -> Coroutine[None]:
        tokens = session.tokens
        self._newest = tokens[-1] if tokens else None
        for token, row in zip(tokens[len(tokens) - 1 - len(rows) : -1], rows, strict=True):
            self._learn(token, row)
        if self._read_prompt:
            unread = tokens[max(self._read - 1, 0) :]
            for token, after in pairwise(unread):
                others = (other for other in self._followed.get(token, _NONE).tokens if other != after)
                self._followed[token] = _Candidates((after, *others)[:CANDIDATES])
            self._read = len(tokens)
        yield from ()

    def propose(self, session: Session, budget: int, depth: int = ANY_DEPTH) -> Coroutine[DraftTree]:
        yield from ()
        self._newest = session.tokens[-1]
        found = [self._candidates(self._newest)]  # of the root, then of each node
        tokens: list[int] = []
        parents: list[int] = []
        grades: list[int] = []
        filled: list[int | None] = [ROOT]  # where the root and each node of the shape went; None: left out
        estimates = self._estimates
        least = 0.0 if estimates is None else estimates.least_chance()
        chances = [1.0]  # of the root, then of each node
        for parent, rank, level in zip(_SHAPE.parents, _SHAPE.ranks, _SHAPE.depths, strict=True):
            if len(tokens) == budget or not found[0].tokens:
                break
            place = filled[parent + 1]
            if place is None or level >= depth or rank >= len(found[place + 1].tokens):
                filled.append(None)
                continue
            candidates = found[place + 1]
            token, grade = candidates.tokens[rank], candidates.grade(rank)
            if estimates is not None:
                chance = chances[place + 1] * estimates.rate(RECYCLING, grade)
                # The first guesses are always made, so that their rates are learned.
                if chance < least and place != ROOT:
                    filled.append(None)
                    continue
                chances.append(chance)
            filled.append(len(tokens))
            tokens.append(token)
            parents.append(place)
            grades.append(grade)
            found.append(self._candidates(token))
        return DraftTree(tuple(tokens), tuple(parents), (RECYCLING,) * len(tokens), tuple(grades))

    def observe(self, round: Round) -> None:
        for token, row in zip(round.tree.tokens, round.rows[1:], strict=True):
            self._learn(token, row)
        # A token may occur in the tree more than once: the answer after the real text counts most.
        if self._newest is not None:
            self._learn(self._newest, round.rows[0])
        for node in round.verdict.path:
            self._learn(round.tree.tokens[node], round.rows[node + 1])
        self._newest = round.tokens[-1]

    def opinion(self, before: int, token: int) -> float | None:
        found = self._next.get(before)
        if found is None:
            return None
        for other, log_prob in zip(found.tokens, found.log_probs, strict=True):
            if other == token:
                return log_prob
        return -math.inf

    def truncate(self, length: int) -> None:
        """Forget what was read of the prompt beyond a length.

        What was learned is kept: it says what is likely after a token, wherever the token occurs.
        """
        self._read = min(self._read, length)
        self._newest = None

    def fork(self) -> Recycling:
        other = Recycling(read_prompt=self._read_prompt, estimates=self._estimates)
        other._next = self._next.copy()
        other._followed = self._followed.copy()
        other._read = self._read
        other._newest = self._newest
        return other

    def close(self) -> None:
        self._next = {}
        self._followed = {}
        self._read = 0
        self._newest = None

    def _candidates(self, token: int) -> _Candidates:
        return self._next.get(token) or self._followed.get(token) or _NONE

    def _learn(self, token: int, row: Row) -> None:
        if row.top_tokens is not None and row.top_log_probs is not None:
            self._next[token] = _Candidates(
                array("i", row.top_tokens[:CANDIDATES].tolist()),
                array("f", row.top_log_probs[:CANDIDATES].tolist()),
            )
