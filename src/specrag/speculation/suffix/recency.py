"""Which occurrence of a suffix is the most recent: the link tree of an automaton, cut into paths.

Adding position ``p`` makes it the most recent occurrence of all its suffixes, that is of every state on the
way from its own state up to the root of the link tree. Setting that state by state costs the depth of the
tree, which for a text that repeats itself is the length of the text. So the tree is cut into paths, each
owned by one position and going down to that position's own state: the states whose strings occurred there
last. A link-cut tree (Sleator and Tarjan, 1983) keeps each path in a splay tree and lets a new position take
over the upper part of the paths above it; the number of paths taken over is O(log n) on average over all
positions, and each costs O(log n) on average.

What a position takes over says where each of its suffixes occurred last before it. These *pieces*, pairs of
a state (its length: the longest suffix) and a position, are kept, and never change: occurrences are read
from the most recent one backwards by following them.

Path trees use four fields of a state; 0, the automaton's root, stands for none and is in no path. ``PARENT``
of a path tree's root is the state that the path hangs from; ``OWNER`` holds for a path tree's root only.
"""

from __future__ import annotations

from specrag.engine.compiling import compiled
from specrag.speculation.suffix.layout import (
    LEAF,
    LEFT,
    OWNER,
    PARENT,
    PIECE_POSITION,
    PIECE_STATE,
    RIGHT,
    Ints,
)


@compiled
def _is_tree_root(states: Ints, x: int) -> bool:
    p = states[x, PARENT]
    return bool(p == 0 or (states[p, LEFT] != x and states[p, RIGHT] != x))


@compiled
def _rotate(states: Ints, x: int) -> None:
    p = states[x, PARENT]
    g = states[p, PARENT]
    was_root = _is_tree_root(states, p)
    if states[p, LEFT] == x:
        inner = states[x, RIGHT]
        states[p, LEFT] = inner
        states[x, RIGHT] = p
    else:
        inner = states[x, LEFT]
        states[p, RIGHT] = inner
        states[x, LEFT] = p
    if inner != 0:
        states[inner, PARENT] = p
    states[p, PARENT] = x
    states[x, PARENT] = g
    if was_root:
        states[x, OWNER] = states[p, OWNER]
    elif states[g, LEFT] == p:
        states[g, LEFT] = x
    else:
        states[g, RIGHT] = x


@compiled
def splay(states: Ints, x: int) -> None:
    """Make state ``x`` the root of its path's tree. Changes no path."""
    while not _is_tree_root(states, x):
        p = states[x, PARENT]
        if not _is_tree_root(states, p):
            g = states[p, PARENT]
            _rotate(states, p if (states[p, LEFT] == x) == (states[g, LEFT] == p) else x)
        _rotate(states, x)


@compiled
def find_pieces(states: Ints, state: int, pieces: Ints, start: int) -> int:
    """Write the paths from ``state`` up as pieces, longest suffix first; returns where they end, -1 if too many.

    Changes no path. Leaves each piece's state at the root of its path's tree.
    """
    end = start
    while state != 0:
        splay(states, state)
        if end == len(pieces):
            return -1
        pieces[end, PIECE_STATE] = state
        pieces[end, PIECE_POSITION] = states[state, OWNER]
        end += 1
        state = states[state, PARENT]
    return end


@compiled
def insert_above(states: Ints, q: int, clone: int) -> None:
    """Put the new state ``clone`` between ``q``, the root of its path's tree, and the state above it."""
    left = states[q, LEFT]
    states[clone, LEFT] = left
    if left != 0:
        states[left, PARENT] = clone
    states[clone, RIGHT] = 0
    states[clone, PARENT] = q
    states[q, LEFT] = clone


@compiled
def remove_above(states: Ints, q: int, clone: int) -> None:
    """Undo :func:`insert_above`: ``clone`` is the state above ``q`` on the same path, and nothing hangs from it."""
    splay(states, clone)
    above = states[clone, LEFT]
    hangs_from = states[clone, PARENT]
    owner = states[clone, OWNER]
    states[states[clone, RIGHT], PARENT] = 0
    splay(states, q)
    states[q, LEFT] = above
    if above != 0:
        states[above, PARENT] = q
    states[q, PARENT] = hangs_from
    states[q, OWNER] = owner


@compiled
def take_over(states: Ints, leaf: int, position: int, pieces: Ints, start: int, end: int) -> None:
    """Give ``position``, whose own new state is ``leaf``, the paths that ``pieces[start:end]`` name."""
    path = leaf
    for j in range(start, end):
        state = pieces[j, PIECE_STATE]
        splay(states, state)
        below = states[state, RIGHT]
        if below != 0:
            states[below, OWNER] = pieces[j, PIECE_POSITION]
        states[state, RIGHT] = path
        states[path, PARENT] = state
        path = state
    states[path, OWNER] = position


@compiled
def give_back(states: Ints, leaf: int, pieces: Ints, start: int, end: int, journal: Ints) -> None:
    """Undo :func:`take_over`; the newest position's own state is then in no path."""
    if start == end:
        return
    splay(states, leaf)
    states[states[leaf, LEFT], PARENT] = 0
    for j in range(start, end):
        state = pieces[j, PIECE_STATE]
        splay(states, state)
        below = states[state, RIGHT]
        if below != 0:
            states[below, OWNER] = pieces[j - 1, PIECE_POSITION]
        own = journal[pieces[j, PIECE_POSITION], LEAF]
        if own == state:
            states[state, RIGHT] = 0
        else:
            splay(states, own)  # its path hangs from this state and becomes the lower part of it again
            states[state, RIGHT] = own
        states[state, OWNER] = pieces[j, PIECE_POSITION]
