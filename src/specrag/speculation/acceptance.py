"""Acceptance rules: pure functions from a scored tree to what is kept of it."""

from __future__ import annotations

from collections.abc import Callable

from specrag.speculation.tree import ROOT, DraftTree, Verdict


def matching(tree: DraftTree, draw: Callable[[int], int]) -> Verdict:
    """Accept a guess if it *is* the target's own draw.

    The output is the target's draws and nothing else, so its law is plain decoding's whatever was guessed; with
    draws keyed by position it is plain decoding's very text. For a guess without probabilities this accepts as
    often as rejection sampling does (Leviathan et al. 2023, with a one-hot draft).

    Args:
        tree: the guesses.
        draw: the target's draw after a node (:data:`ROOT`: after the session's newest token). Called once for
            each node on the accepted path, from the root downwards.
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
