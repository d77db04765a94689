"""The compiled loops of the online suffix automaton: add and take back positions, look strings up.

The automaton is Blumer et al.'s (1985), built token by token. Its edges are found through an open-addressing
hash table with linear probing, keyed by (state, token), that holds an edge's row + 1. Rows are added and
taken back last in, first out, also in the table, so that an emptied slot never breaks a probe.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specrag.engine.compiling import compiled
from specrag.speculation.suffix.layout import (
    EDGE_ROWS,
    EDGES,
    EDGES_BEFORE,
    EDGES_FULL,
    FIRST,
    FULL,
    LAST,
    LEAF,
    LEFT,
    LENGTH,
    LINK,
    NOTHING_FULL,
    OLDER,
    OWNER,
    PARENT,
    PIECE_POSITION,
    PIECE_ROWS,
    PIECE_STATE,
    PIECES_BEFORE,
    PIECES_FULL,
    POSITIONS,
    POSITIONS_FULL,
    RIGHT,
    ROOT,
    SOURCE,
    SPLIT,
    SPLIT_FROM,
    STATES,
    STATES_FULL,
    TARGET,
    TOKEN,
    Counts,
    Ints,
)
from specrag.speculation.suffix.recency import (
    find_pieces,
    give_back,
    insert_above,
    remove_above,
    splay,
    take_over,
)


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
def insert(
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
