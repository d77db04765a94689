"""The compiled loops of the online suffix automaton, and the arrays that it is kept in.

The automaton is Blumer et al.'s (1985), built token by token. Its edges are found through an open-addressing
hash table with linear probing, keyed by (state, token), that holds an edge's row + 1. Rows are added and
taken back last in, first out, also in the table, so that an emptied slot never breaks a probe.

Which occurrence of a suffix is the most recent is read from the link tree, cut into paths. Adding position ``p``
makes it the most recent occurrence of all its suffixes, that is of every state on the way from its own state up to
the root of the link tree. Setting that state by state costs the depth of the tree, which for a text that repeats
itself is the length of the text. So each path is owned by one position and goes down to that position's own state:
the states whose strings occurred there last. A link-cut tree (Sleator and Tarjan, 1983) keeps each path in a splay
tree and lets a new position take over the upper part of the paths above it; the number of paths taken over is
O(log n) on average over all positions, and each costs O(log n) on average.

What a position takes over says where each of its suffixes occurred last before it. These *pieces*, pairs of a state
(its length: the longest suffix) and a position, are kept, and never change: occurrences are read from the most
recent one backwards by following them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specrag.engine import compiled

# -- the arrays: one row of int32 a state, an edge, a piece or a position ---------------------------------------

Ints = NDArray[np.int32]
Counts = NDArray[np.int64]

# A state. Of the automaton: length of its longest string, suffix link, position where its strings end first,
# newest edge (-1: none). Of the path trees: children, parent, owner.
LENGTH, LINK, FIRST, EDGES, LEFT, RIGHT, PARENT, OWNER = range(8)
STATE_FIELDS = 8
ROOT = 0  # the state of the empty string

# An edge: from a state, with a token, to a state; and the next older edge from the same state (-1: none).
SOURCE, TOKEN, TARGET, OLDER = range(4)
EDGE_FIELDS = 4

# A piece: a state and a position.
PIECE_STATE, PIECE_POSITION = range(2)
PIECE_FIELDS = 2

# A position: its own state, the edges and the pieces that there were before it, and, where it split a state,
# that state and the longest suffix whose edge to it was redirected (0, 0: it split none).
LEAF, EDGES_BEFORE, PIECES_BEFORE, SPLIT, SPLIT_FROM = range(5)
JOURNAL_FIELDS = 5

# How many rows are in use, the own state of the newest position, and which array an insertion found full.
POSITIONS, STATES, EDGE_ROWS, PIECE_ROWS, LAST, FULL = range(6)
COUNT_FIELDS = 6
NOTHING_FULL, POSITIONS_FULL, STATES_FULL, EDGES_FULL, PIECES_FULL = range(5)

# -- the link tree, cut into paths -----------------------------------------------------------------------------

# Path trees use four fields of a state; 0, the automaton's root, stands for none and is in no path. PARENT of a path
# tree's root is the state that the path hangs from; OWNER holds for a path tree's root only.


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


# -- the automaton ----------------------------------------------------------------------------------------------


@compiled
def _slot(table: Ints, edges: Ints, state: int, token: int) -> int:
    """The slot that holds the edge of ``state`` with ``token``, or the empty one where it would go."""
    mixed = state * 0x9E3779B97F4A7C1 + token * 0x2545F4914F6CDD1
    mask = len(table) - 1
    slot = (mixed ^ (mixed >> 29)) & mask
    while table[slot] != 0:
        edge = table[slot] - 1
        if edges[edge, SOURCE] == state and edges[edge, TOKEN] == token:
            break
        slot = (slot + 1) & mask
    return slot


@compiled
def _edge(table: Ints, edges: Ints, state: int, token: int) -> int:
    """The edge of ``state`` with ``token``, -1 if there is none."""
    return int(table[_slot(table, edges, state, token)]) - 1


@compiled
def _add_edge(
    counts: Counts, states: Ints, table: Ints, edges: Ints, source: int, token: int, target: int
) -> None:
    edge = counts[EDGE_ROWS]
    table[_slot(table, edges, source, token)] = edge + 1
    edges[edge, SOURCE] = source
    edges[edge, TOKEN] = token
    edges[edge, TARGET] = target
    edges[edge, OLDER] = states[source, EDGES]
    states[source, EDGES] = edge
    counts[EDGE_ROWS] = edge + 1


@compiled
def fill_table(table: Ints, edges: Ints, count: int) -> None:
    """Enter the first ``count`` edges into an empty table, oldest first."""
    for edge in range(count):
        table[_slot(table, edges, edges[edge, SOURCE], edges[edge, TOKEN])] = edge + 1


@compiled
def _redirect(table: Ints, edges: Ints, states: Ints, state: int, token: int, old: int, new: int) -> None:
    """Turn the edges with ``token`` to ``old``, of ``state`` and its suffixes, to ``new``."""
    while True:
        edge = _edge(table, edges, state, token)
        if edge < 0 or edges[edge, TARGET] != old:
            return
        edges[edge, TARGET] = new
        if state == ROOT:
            return
        state = states[state, LINK]


@compiled
def _add_leaf(states: Ints, leaf: int, position: int, link: int) -> None:
    states[leaf, LENGTH] = position + 1
    states[leaf, LINK] = link
    states[leaf, FIRST] = position
    states[leaf, EDGES] = -1
    states[leaf, LEFT] = 0
    states[leaf, RIGHT] = 0
    states[leaf, PARENT] = 0
    states[leaf, OWNER] = position


@compiled
def insert(  # noqa: C901, PLR0915 - a compiled loop is fastest in one piece
    new: NDArray[np.int64],
    counts: Counts,
    tokens: Ints,
    journal: Ints,
    states: Ints,
    edges: Ints,
    table: Ints,
    pieces: Ints,
) -> int:
    """Add tokens; a negative one ends a text. Returns how many were added before an array was full.

    Nothing of a token that was not added is left behind; ``counts[FULL]`` says which array must grow.
    """
    for done in range(len(new)):
        token = new[done]
        position = counts[POSITIONS]
        leaf = counts[STATES]
        first_piece = counts[PIECE_ROWS]
        if position == len(tokens):
            counts[FULL] = POSITIONS_FULL
            return done
        if leaf + 2 > len(states):
            counts[FULL] = STATES_FULL
            return done

        # Look first and write later, so that a full array is noticed while nothing has changed.
        link = ROOT
        split_from = 0
        without = 0  # suffixes that no such token has followed
        clone = 0
        end_piece = first_piece
        if token >= 0:
            state = counts[LAST]
            edge = _edge(table, edges, state, token)
            while edge < 0:
                without += 1
                if state == ROOT:
                    break
                state = states[state, LINK]
                edge = _edge(table, edges, state, token)
            needed = without
            if edge >= 0:
                link = edges[edge, TARGET]
                if states[link, LENGTH] != states[state, LENGTH] + 1:
                    clone = leaf + 1
                    split_from = state
                    needed += 1  # the state to be split may itself get an edge now
                    older = states[link, EDGES]
                    while older >= 0:
                        needed += 1
                        older = edges[older, OLDER]
            if counts[EDGE_ROWS] + needed > len(edges):
                counts[FULL] = EDGES_FULL
                return done
            end_piece = find_pieces(states, link, pieces, first_piece)
            if end_piece < 0:
                counts[FULL] = PIECES_FULL
                return done

        tokens[position] = token
        journal[position, LEAF] = leaf
        journal[position, EDGES_BEFORE] = counts[EDGE_ROWS]
        journal[position, PIECES_BEFORE] = first_piece
        journal[position, SPLIT] = link if clone != 0 else 0
        journal[position, SPLIT_FROM] = split_from
        state = counts[LAST]
        for _ in range(without):
            _add_edge(counts, states, table, edges, state, token, leaf)
            state = states[state, LINK]
        if clone != 0:
            states[clone, LENGTH] = states[split_from, LENGTH] + 1
            states[clone, LINK] = states[link, LINK]
            states[clone, FIRST] = states[link, FIRST]
            states[clone, EDGES] = -1
            older = states[link, EDGES]
            while older >= 0:
                _add_edge(counts, states, table, edges, clone, edges[older, TOKEN], edges[older, TARGET])
                older = edges[older, OLDER]
            _redirect(table, edges, states, split_from, token, link, clone)
            states[link, LINK] = clone
            insert_above(states, link, clone)
            pieces[first_piece, PIECE_STATE] = clone
            link = clone
        _add_leaf(states, leaf, position, link)
        take_over(states, leaf, position, pieces, first_piece, end_piece)
        counts[STATES] = leaf + (2 if clone != 0 else 1)
        counts[PIECE_ROWS] = end_piece
        counts[LAST] = leaf
        counts[POSITIONS] = position + 1
    counts[FULL] = NOTHING_FULL
    return len(new)


@compiled
def remove(
    length: int,
    counts: Counts,
    tokens: Ints,
    journal: Ints,
    states: Ints,
    edges: Ints,
    table: Ints,
    pieces: Ints,
) -> None:
    """Take back all positions from ``length`` on, newest first, each the way it came."""
    while counts[POSITIONS] > length:
        position = counts[POSITIONS] - 1
        leaf = journal[position, LEAF]
        first_piece = journal[position, PIECES_BEFORE]
        give_back(states, leaf, pieces, first_piece, counts[PIECE_ROWS], journal)
        split = journal[position, SPLIT]
        if split != 0:
            clone = leaf + 1
            remove_above(states, split, clone)
            states[split, LINK] = states[clone, LINK]
            _redirect(table, edges, states, journal[position, SPLIT_FROM], tokens[position], clone, split)
        first_edge = journal[position, EDGES_BEFORE]
        for edge in range(counts[EDGE_ROWS] - 1, first_edge - 1, -1):
            table[_slot(table, edges, edges[edge, SOURCE], edges[edge, TOKEN])] = 0
            states[edges[edge, SOURCE], EDGES] = edges[edge, OLDER]
        counts[EDGE_ROWS] = first_edge
        counts[PIECE_ROWS] = first_piece
        counts[STATES] = leaf
        counts[LAST] = journal[position - 1, LEAF] if position > 0 else ROOT
        counts[POSITIONS] = position


@compiled
def own_suffix(counts: Counts, states: Ints) -> int:
    """The length of the longest suffix of all tokens that occurred before and was continued."""
    return int(states[_continued(states, states[counts[LAST], LINK]), LENGTH])


@compiled
def first_position(position: int, length: int, journal: Ints, states: Ints) -> int:
    """Where the last token of the string of ``length`` tokens that ends at ``position`` stands first."""
    state = journal[position, LEAF]
    while states[states[state, LINK], LENGTH] >= length:
        state = states[state, LINK]
    return int(states[state, FIRST])


@compiled
def _continued(states: Ints, state: int) -> int:
    """The longest suffix of ``state`` that does not only occur at the ends of texts; each skipped one is one text."""
    while states[state, EDGES] < 0 and state != ROOT:
        state = states[state, LINK]
    return state


@compiled
def foreign_suffix(tail: NDArray[np.int64], states: Ints, edges: Ints, table: Ints) -> tuple[int, int]:
    """The longest suffix of ``tail`` that occurs and is continued: its length and its most recent position."""
    state = ROOT
    length = 0
    for token in tail:
        edge = _edge(table, edges, state, token)
        while edge < 0 and state != ROOT:
            state = states[state, LINK]
            length = states[state, LENGTH]
            edge = _edge(table, edges, state, token)
        if edge >= 0:
            state = edges[edge, TARGET]
            length += 1
    continued = _continued(states, state)
    if continued != state:
        length = states[continued, LENGTH]
    if length == 0:
        return 0, -1
    splay(states, continued)
    return length, states[continued, OWNER]


@compiled
def recent_ends(
    position: int,
    length: int,
    ends: NDArray[np.int64],
    counts: Counts,
    tokens: Ints,
    journal: Ints,
    states: Ints,
    pieces: Ints,
) -> int:
    """Fill ``ends`` with the continued occurrences, from ``position`` back, of the string that ends there.

    Returns how many were found.
    """
    found = 0
    while found < len(ends):
        if position + 1 < counts[POSITIONS] and tokens[position + 1] >= 0:
            ends[found] = position + 1
            found += 1
        # The most recent piece that is long enough; along the pieces of a position lengths fall and
        # positions rise.
        low = journal[position, PIECES_BEFORE]
        high = counts[PIECE_ROWS]
        if position + 1 < counts[POSITIONS]:
            high = journal[position + 1, PIECES_BEFORE]
        begin = low
        while low < high:
            middle = (low + high) >> 1
            if states[pieces[middle, PIECE_STATE], LENGTH] >= length:
                low = middle + 1
            else:
                high = middle
        if low == begin:
            break
        position = pieces[low - 1, PIECE_POSITION]
    return found
