"""Draft trees, the verdicts on them, and one round of both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from specrag.engine import Row
from specrag.errors import InputError

#: The parent of the first guesses: the session's newest token.
ROOT = -1


@dataclass(frozen=True)
class DraftTree:
    """A draft tree: guesses at the tokens after the session's newest one.

    Args:
        tokens: one token per node.
        parents: the node that each node follows, :data:`ROOT` for the first guesses; parents come before their
            children, and no two children of a node hold the same token.
        sources: who proposed each node, such as ``"suffix"``.
        grades: a small number for each node: nodes of one source and grade are accepted about equally often,
            given that their parent is. All 0 by default.
        opinions: the drafter's own distribution (``[vocab_size]``) after the session's newest token and then
            after each node, for rules that read it; empty for all others.
        also: the other sources that also guessed each node; empty if no node has any.

    Raises:
        InputError: one of these rules is broken.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()
    grades: tuple[int, ...] = ()
    opinions: tuple[np.ndarray, ...] = field(default=(), compare=False)
    also: tuple[frozenset[str], ...] = ()

    def __post_init__(self) -> None:
        if not self.grades:
            object.__setattr__(self, "grades", (0,) * len(self.tokens))
        if not len(self.tokens) == len(self.parents) == len(self.sources) == len(self.grades):
            sizes = (len(self.tokens), len(self.parents), len(self.sources), len(self.grades))
            raise InputError("tree", sizes, "give a token, a parent, a source and a grade for each node")
        if len(self.opinions) not in (0, 1 + len(self.tokens)):
            raise InputError("opinions", len(self.opinions), "give one more than there are nodes, or none")
        if len(self.also) not in (0, len(self.tokens)):
            raise InputError("also", len(self.also), "give one for each node, or none")
        for node, parent in enumerate(self.parents):
            if not ROOT <= parent < node:
                raise InputError("parents", parent, f"node {node} must follow an earlier node or -1")
        if len(self._children) != len(self.tokens):
            raise InputError("tree", self.tokens, "two children of a node hold the same token; merge them")

    @classmethod
    def chain(cls, tokens: Sequence[int], source: str, grades: Sequence[int] = ()) -> DraftTree:
        """Each token follows the one before it."""
        if grades and len(grades) != len(tokens):
            raise InputError("grades", len(grades), f"give one for each of {len(tokens)} tokens, or none")
        count = len(tokens)
        return cls._sound(
            tuple(tokens), tuple(range(-1, count - 1)), (source,) * count, tuple(grades) or (0,) * count
        )

    @classmethod
    def _sound(
        cls,
        tokens: tuple[int, ...],
        parents: tuple[int, ...],
        sources: tuple[str, ...],
        grades: tuple[int, ...],
        opinions: tuple[np.ndarray, ...] = (),
        also: tuple[frozenset[str], ...] = (),
    ) -> DraftTree:
        """Build a tree without checks, which took an eighth of a proposal's time."""
        tree = object.__new__(cls)
        tree.__dict__.update(
            tokens=tokens,
            parents=parents,
            sources=sources,
            grades=grades,
            opinions=opinions,
            also=also,
        )
        return tree

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def _children(self) -> dict[tuple[int, int], int]:
        pairs = zip(self.parents, self.tokens, strict=True)
        return {(parent, token): node for node, (parent, token) in enumerate(pairs)}

    def sources_of(self, node: int) -> frozenset[str]:
        """All sources that guessed a node."""
        own = frozenset((self.sources[node],))
        return own | self.also[node] if self.also else own

    def child(self, node: int, token: int) -> int | None:
        """The child of ``node`` that holds ``token``, if there is one."""
        return self._children.get((node, token))

    def trunk(self) -> DraftTree:
        """The first guess, its first child, and so on."""
        nodes, newest = [], ROOT
        for node, parent in enumerate(self.parents):
            if parent == newest:
                nodes.append(node)
                newest = node
        return self.kept(nodes)

    def kept(self, nodes: Sequence[int]) -> DraftTree:
        """The tree of only these nodes, given in ascending order; every node's parent must be among them."""
        if len(nodes) == len(self.tokens):
            return self
        place = {ROOT: ROOT} | {node: new for new, node in enumerate(nodes)}
        return DraftTree._sound(
            tuple(self.tokens[node] for node in nodes),
            tuple(place[self.parents[node]] for node in nodes),
            tuple(self.sources[node] for node in nodes),
            tuple(self.grades[node] for node in nodes),
            tuple(self.opinions[node + 1] for node in (ROOT, *nodes)) if self.opinions else (),
            tuple(self.also[node] for node in nodes) if self.also else (),
        )


EMPTY = DraftTree()


def merge(
    trees: Sequence[DraftTree], budget: int, rate: Callable[[str, int], float] | None = None
) -> DraftTree:
    """One tree that holds every path of several; a shared node stays the earlier tree's and lists the other's source.

    Args:
        trees: deterministic drafts, best first.
        budget: nodes that do not fit are left out, those of the last trees first.
        rate: the chance of a source and grade; a node in two trees takes the source and grade that promise more.
    """
    full = [tree for tree in trees if len(tree)]
    if len(full) == 1 and len(full[0]) <= budget:
        return full[0]
    tokens: list[int] = []
    parents: list[int] = []
    sources: list[str] = []
    grades: list[int] = []
    also: dict[int, frozenset[str]] = {}
    children: dict[tuple[int, int], int] = {}
    for tree in full:
        place = {ROOT: ROOT}
        for node, token in enumerate(tree.tokens):
            parent = place.get(tree.parents[node])
            if parent is None:  # an ancestor was left out
                continue
            known = children.get((parent, token))
            if known is None:
                if len(tokens) == budget:
                    continue
                known = children[parent, token] = len(tokens)
                tokens.append(token)
                parents.append(parent)
                sources.append(tree.sources[node])
                grades.append(tree.grades[node])
                others = tree.also[node] if tree.also else frozenset[str]()
            else:
                source, grade = tree.sources[node], tree.grades[node]
                others = tree.sources_of(node) | also.get(known, frozenset()) | {sources[known]}
                if rate is not None and rate(source, grade) > rate(sources[known], grades[known]):
                    sources[known], grades[known] = source, grade
            others -= {sources[known]}
            if others:
                also[known] = others
            place[node] = known
    beside = tuple(also.get(node, frozenset()) for node in range(len(tokens))) if also else ()
    return DraftTree._sound(tuple(tokens), tuple(parents), tuple(sources), tuple(grades), also=beside)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an acceptance rule keeps of a tree.

    Args:
        path: accepted nodes, from a child of the root downwards.
        bonus: the token that follows the path; ``None`` only where the text was cut inside the path.
        relaxed: the nodes of the path that are not the target's own choice.
    """

    path: tuple[int, ...]
    bonus: int | None
    relaxed: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Round:
    """One round of token speculation, as a drafter and a schedule see it afterwards.

    Attributes:
        tree: what was verified.
        rows: ``[1 + len(tree)]`` answers of the target: after the root, then after each node.
        verdict: what was kept of it.
        tokens: the tokens that the round added, path and bonus.
        proposed: what the drafter proposed, before the schedule chose the part worth verifying.
    """

    tree: DraftTree
    rows: Sequence[Row]
    verdict: Verdict
    tokens: tuple[int, ...]
    proposed: DraftTree
