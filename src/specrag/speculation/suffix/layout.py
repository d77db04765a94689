"""The arrays that a suffix automaton is kept in: one row of int32 a state, an edge, a piece or a position."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Counts = NDArray[np.int64]

# A state. Of the automaton: length of its longest string, suffix link, position where its strings end first,
# newest edge (-1: none). Of the path trees (see recency.py): children, parent, owner.
LENGTH, LINK, FIRST, EDGES, LEFT, RIGHT, PARENT, OWNER = range(8)
STATE_FIELDS = 8
ROOT = 0  # the state of the empty string

# An edge: from a state, with a token, to a state; and the next older edge from the same state (-1: none).
SOURCE, TOKEN, TARGET, OLDER = range(4)
EDGE_FIELDS = 4

# A piece (see recency.py): a state and a position.
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
