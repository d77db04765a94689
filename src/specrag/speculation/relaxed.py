"""ReSpec's relaxed verification with look-ahead tolerance (Fang et al., section 3.4): faster, not lossless."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specrag.checks import check_whole
from specrag.errors import InputError
from specrag.speculation.acceptance import Matching, RowNeeds, View
from specrag.speculation.tree import ROOT, DraftTree, Verdict


@dataclass(frozen=True, slots=True)
class Accepted:
    """How much of one candidate is kept.

    Attributes:
        length: number of leading nodes that are kept (the paper's ``last``).
        relaxed: those of them that do not match, in order.
    """

    length: int
    relaxed: tuple[int, ...] = ()


def look_ahead(
    candidate: Sequence[int],
    matches: Callable[[int], bool],
    near: Callable[[int], bool],
    attempts: int,
    run: int,
) -> Accepted:
    """How far a candidate is kept: its matching prefix, and what a few tolerated nodes add to it.

    An attempt looks at one node, the first one not looked at yet. The node must be near, otherwise the
    search ends. If at least ``run`` matches follow it, everything up to the end of these matches is kept, including
    provisional nodes, and the next attempt starts after them. If fewer follow, the node stays
    provisional, and the next attempt is made one node further.

    Args:
        candidate: nodes from a child of the root to a leaf.
        matches: whether a node is the target's own choice.
        near: whether a node that does not match may be tolerated.
        attempts: relaxed checks (the paper's Φ).
        run: matches that must follow (the paper's m).
    """
    end = len(candidate)
    last = _end_of_run(candidate, matches, 0)
    current = last
    provisional: list[int] = []
    kept: tuple[int, ...] = ()
    for _ in range(attempts):
        if current + run >= end:  # too short for enough matches
            break
        node = candidate[current]
        if not matches(node):
            if not near(node):
                break
            provisional.append(node)
        behind = _end_of_run(candidate, matches, current + 1)
        if behind - (current + 1) >= run:
            last = current = behind
            kept = tuple(provisional)
        else:
            current += 1
    return Accepted(last, kept)


def _end_of_run(candidate: Sequence[int], matches: Callable[[int], bool], start: int) -> int:
    """The first place at or after ``start`` that does not match."""
    end = start
    while end < len(candidate) and matches(candidate[end]):
        end += 1
    return end


@dataclass(frozen=True, slots=True)
class Relaxed:
    """Accept a copied guess that is near the target's choice, if matches follow it.

    Every candidate, a path from the root to a leaf, is judged on its own rows. The one that is kept furthest
    wins; among equals the one with fewer relaxed tokens, then the one that was merged into the tree first.

    The text may differ from plain decoding's. The bound applies to each relaxed token: it is among the target's
    ``top_k`` likeliest and at most ``tau`` nats below the best, given the text before it. Meant for greedy
    decoding; sampled text is verified by :class:`~specrag.speculation.acceptance.Matching`.

    Args:
        sources: nodes of these sources may be relaxed, even if others guessed them too; all other nodes must match.
        top_k: the paper's K.
        tau: nats.
        attempts: relaxed checks per round for each candidate (Φ); 0 for none.
        matches: matches that must follow a relaxed token (m).

    Raises:
        InputError: a value is out of range.
    """

    sources: frozenset[str]
    top_k: int = 5
    tau: float = 3.0
    attempts: int = 2
    matches: int = 3

    def __post_init__(self) -> None:
        check_whole("top_k", self.top_k, remedy="give an integer, at least 1")
        check_whole("attempts", self.attempts, 0, remedy="give an integer, at least 0")
        check_whole("matches", self.matches, remedy="give an integer, at least 1")
        if isinstance(self.tau, bool) or not isinstance(self.tau, (int, float)):
            raise InputError("tau", self.tau, "give a number of nats, 0 or more")
        if not (math.isfinite(self.tau) and self.tau >= 0):
            raise InputError("tau", self.tau, "give a number of nats, 0 or more")

    @property
    def needs(self) -> RowNeeds:
        return RowNeeds(top_k=self.top_k)

    def judge(self, tree: DraftTree, target: View) -> Verdict:
        strict = Matching().judge(tree, target)
        candidates = self._candidates(tree, strict)
        if not candidates:
            return strict
        tolerable: dict[int, bool] = {}

        def matches(node: int) -> bool:
            return target.draw(tree.parents[node]) == tree.tokens[node]

        def near(node: int) -> bool:
            if node not in tolerable:
                tolerable[node] = self._tolerates(tree, target, node)
            return tolerable[node]

        best = strict
        for candidate in candidates:
            accepted = look_ahead(candidate, matches, near, self.attempts, self.matches)
            path = candidate[: accepted.length]
            found = Verdict(path, None, frozenset(accepted.relaxed))
            if _rank(found) < _rank(best):
                best = found
        return best if best is strict else Verdict(best.path, target.draw(best.path[-1]), best.relaxed)

    def _candidates(self, tree: DraftTree, strict: Verdict) -> list[tuple[int, ...]]:
        """The paths to leaves that leave the matching path early enough for a relaxed token and its matches."""
        if not self.attempts:
            return []
        matching = set(strict.path)
        behind: list[int] = []  # nodes of a node's path that come after the matching path
        for node, parent in enumerate(tree.parents):
            behind.append(0 if node in matching else 1 + (0 if parent == ROOT else behind[parent]))
        inner = set(tree.parents)
        return [
            _path(tree, node)
            for node, count in enumerate(behind)
            if count > self.matches and node not in inner
        ]

    def _tolerates(self, tree: DraftTree, target: View, node: int) -> bool:
        if self.sources.isdisjoint(tree.sources_of(node)):
            return False
        gap = target.gap(tree.parents[node], tree.tokens[node], self.top_k)
        return gap is not None and gap <= self.tau


def _rank(verdict: Verdict) -> tuple[int, int, int]:
    """Smaller is better. A path's last node was added by the first candidate that holds the whole path."""
    return -len(verdict.path), len(verdict.relaxed), verdict.path[-1] if verdict.path else ROOT


def _path(tree: DraftTree, node: int) -> tuple[int, ...]:
    path = []
    while node != ROOT:
        path.append(node)
        node = tree.parents[node]
    return tuple(reversed(path))
