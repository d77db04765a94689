"""What is guessed, what became of it, and one round of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from specrag.engine.outputs import Row
from specrag.errors import InputError

#: The parent of the first guesses: the session's newest token.
ROOT = -1


@dataclass(frozen=True)
class DraftTree:
    """Guesses at the next tokens, as a tree behind the session's newest token.

    Args:
        tokens: one token a node.
        parents: the node that each node follows, :data:`ROOT` for the first guesses; parents come before their
            children, and no two children of a node hold the same token.
        sources: who proposed each node, such as ``"suffix"``.

    Raises:
        InputError: one of these rules is broken.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.parents) == len(self.sources):
            sizes = (len(self.tokens), len(self.parents), len(self.sources))
            raise InputError("tree", sizes, "give a token, a parent and a source for each node")
        for node, parent in enumerate(self.parents):
            if not ROOT <= parent < node:
                raise InputError("parents", parent, f"node {node} must follow an earlier node or -1")
        if len(self._children) != len(self.tokens):
            raise InputError("tree", self.tokens, "two children of a node hold the same token; merge them")

    @classmethod
    def chain(cls, tokens: Sequence[int], source: str) -> DraftTree:
        """Each token follows the one before it."""
        return cls(tuple(tokens), tuple(range(-1, len(tokens) - 1)), (source,) * len(tokens))

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def _children(self) -> dict[tuple[int, int], int]:
        pairs = zip(self.parents, self.tokens, strict=True)
        return {(parent, token): node for node, (parent, token) in enumerate(pairs)}

    def child(self, node: int, token: int) -> int | None:
        """The child of ``node`` that holds ``token``, if there is one."""
        return self._children.get((node, token))


EMPTY = DraftTree()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a rule decides about a tree.

    Args:
        path: accepted nodes, from a child of the root downwards.
        bonus: the token that follows the path; ``None`` only where the text was cut inside the path.
    """

    path: tuple[int, ...]
    bonus: int | None


@dataclass(frozen=True, slots=True)
class Round:
    """One round of token speculation, as a drafter and a schedule see it afterwards.

    Attributes:
        tree: what was proposed.
        rows: ``[1 + len(tree)]`` answers of the target: after the root, then after each node.
        verdict: what was kept of it.
        tokens: the tokens that the round added, path and bonus.
    """

    tree: DraftTree
    rows: Sequence[Row]
    verdict: Verdict
    tokens: tuple[int, ...]
