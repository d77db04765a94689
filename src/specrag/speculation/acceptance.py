"""Acceptance rules: pure functions from a scored tree to what is kept of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specrag.engine import Distribution, SamplingParams
from specrag.speculation.tree import ROOT, DraftTree, Verdict


class View(Protocol):
    """The target's view of a scored tree (:class:`specrag.speculation.target.TargetView`)."""

    def draw(self, node: int) -> int:
        """The target's own token after a node, by its keyed draw."""

    def gap(self, node: int, token: int, top_k: int) -> float | None:
        """Nats that a token lies below the likeliest one; ``None`` if it is not among the ``top_k`` likeliest."""

    def probs(self, node: int, params: SamplingParams | None = None) -> Distribution:
        """The target's distribution after a node, after temperature, top-k, top-p and min-p.

        Args:
            node: a node or :data:`ROOT`.
            params: temperature, top-k, top-p and min-p to use instead of the request's.
        """

    def uniform(self, node: int) -> float:
        """A number between 0 and 1, independent of the draw after the node."""

    def draw_from(self, node: int, probs: NDArray[np.float64]) -> int:
        """A token from another distribution, drawn in the node's place."""

    def guess_from(self, node: int, draft: NDArray[np.float64]) -> int:
        """The token that a drafter with this distribution guesses after a node, whether or not it did."""


@dataclass(frozen=True, slots=True)
class RowNeeds:
    """What a rule reads from the target's rows beside the draw.

    Args:
        top_k: most probable tokens with their log-probabilities.
        logits: the whole vector, for distributions.
        opinions: the drafter's own distributions (``DraftTree.opinions``); the drafter is then asked in every round,
            even if nothing is to be guessed.
    """

    top_k: int = 0
    logits: bool = False
    opinions: bool = False


class Rule(Protocol):
    """Decides what is kept of a scored tree."""

    @property
    def needs(self) -> RowNeeds:
        """What it reads from the target's rows."""

    def judge(self, tree: DraftTree, target: View) -> Verdict:
        """Keep a path from the root, and choose the token that follows it."""


@dataclass(frozen=True, slots=True)
class Matching:
    """Accept a guess if it *is* the target's own draw.

    The output consists only of the target's draws, so its law is plain decoding's whatever was guessed; with
    draws keyed by position it is exactly plain decoding's text. For a guess without probabilities this accepts as
    often as rejection sampling does (Leviathan et al. 2023, with a one-hot draft).
    """

    needs: RowNeeds = RowNeeds()

    def judge(self, tree: DraftTree, target: View) -> Verdict:
        return match(tree, target.draw)


def match(tree: DraftTree, draw: Callable[[int], int]) -> Verdict:
    """Follow the target's draws as far as the tree does.

    Args:
        tree: the guesses.
        draw: from a node or :data:`ROOT` to the token that is drawn after it.
    """
    path: list[int] = []
    node = ROOT
    while True:
        token = draw(node)
        child = tree.child(node, token)
        if child is None:
            return Verdict(tuple(path), token)
        path.append(child)
        node = child


def coupled(
    target: View,
    node: int,
    draft: NDArray[np.float64],
    wanted: NDArray[np.float64],
    left: NDArray[np.float64] | None = None,
) -> int:
    """Speculative sampling of one position's token, using only the drafter's distribution and the wanted one.

    The guess x, drawn from q, is taken with probability min(1, p(x) / q(x)), otherwise a token of the residual. All
    three random numbers are keyed by seed and position, so neither the token nor its law, which is p, depends on
    whether anything was guessed here. A drafter that guesses by :meth:`View.guess_from` is right as often as any
    guess can be: with probability sum min(p, q).

    Args:
        target: the source of random numbers.
        node: a node or :data:`ROOT` that the token follows.
        draft: q, float64 ``[vocab_size]``.
        wanted: p, the same; need not sum to 1 if ``left`` is given.
        left: the residual, up to a factor; by default max(p - q, 0).
    """
    guess = target.guess_from(node, draft)
    # u < p / q. The random number is below 1, so no minimum is needed.
    if target.uniform(node) * draft[guess] < wanted[guess]:
        return guess
    if left is None:
        left = np.maximum(wanted - draft, 0.0)
    # The residual is empty only if p and q are equal up to rounding.
    return target.draw_from(node, left if left.any() else wanted)
