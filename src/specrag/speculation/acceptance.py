"""Acceptance rules: pure functions from a scored tree to what is kept of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specrag.engine import Distribution, SamplingParams
from specrag.errors import InputError
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


def reject(tree: DraftTree, target: View, target_probs: Callable[[int], NDArray[np.float64]]) -> Verdict:
    """Accept drawn guesses in proportion to the target's probabilities (Leviathan et al. 2023, Algorithm 1).

    A guess x, drawn from q, is accepted with probability min(1, p(x) / q(x)). The first rejected guess is replaced by
    a token drawn from the residual max(p - q, 0); a chain without rejections is followed by a token drawn from p.
    Every token then follows p, provided that every guess was really drawn from its q; whether a guess is verified at
    all must not depend on its token.

    Args:
        tree: a chain with ``draft_probs``.
        target: the source of random numbers.
        target_probs: from a node or :data:`ROOT` to the distribution p of the token after it, float64
            ``[vocab_size]``.

    Raises:
        InputError: the tree branches, has no ``draft_probs``, or holds a token that its q excludes.
    """
    check_chain(tree)
    for node, token in enumerate(tree.tokens):
        before = node - 1
        draft, wanted = tree.draft_probs[node], target_probs(before)
        if not draft[token] > 0:
            raise InputError(
                "draft_probs", float(draft[token]), f"token {token} cannot have been drawn from it"
            )
        # u < p / q. The random number is below 1, so no minimum is needed.
        if target.uniform(before) * draft[token] < wanted[token]:
            continue
        left = np.maximum(wanted - draft, 0.0)
        # The residual is empty only if p and q are equal up to rounding.
        return Verdict(tuple(range(node)), target.draw_from(before, left if left.any() else wanted))
    last = len(tree) - 1
    return Verdict(tuple(range(len(tree))), target.draw_from(last, target_probs(last)))


def check_chain(tree: DraftTree) -> None:
    """Check that a tree is a chain of drawn guesses.

    Raises:
        InputError: it is not.
    """
    if tree.parents != tuple(range(ROOT, len(tree) - 1)):
        raise InputError(
            "tree", tree.parents, "a drawn guess is verified in a chain; give a tree without branches"
        )
    if len(tree.draft_probs) != len(tree):
        raise InputError("draft_probs", (), "give the distribution that each node was drawn from")


@dataclass(frozen=True, slots=True)
class Rejection:
    """Rejection sampling, for chains whose tokens were drawn from ``draft_probs``.

    Every token follows the target's law, after temperature, top-k, top-p and min-p. The law is guaranteed, but not
    plain decoding's exact text. Never use it for the deterministic best of a distribution: that would be biased.
    """

    needs: RowNeeds = RowNeeds(logits=True)

    def judge(self, tree: DraftTree, target: View) -> Verdict:
        """Accept what the tree's own distributions allow.

        Raises:
            InputError: see :func:`reject`.
        """
        if not len(tree):
            return Verdict((), target.draw(ROOT))
        check_chain(tree)
        vocab_size = len(tree.draft_probs[0])
        return reject(tree, target, lambda node: target.probs(node).dense(vocab_size))
