"""An online suffix automaton: where the newest tokens of a growing sequence occurred before."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specrag.errors import InputError
from specrag.speculation.suffix import automaton_loops as loops
from specrag.speculation.suffix.automaton_loops import (
    COUNT_FIELDS,
    EDGE_FIELDS,
    EDGE_ROWS,
    EDGES,
    EDGES_FULL,
    FULL,
    JOURNAL_FIELDS,
    PIECE_FIELDS,
    PIECES_FULL,
    POSITIONS,
    POSITIONS_FULL,
    STATE_FIELDS,
    STATES,
    STATES_FULL,
    Ints,
)
from specrag.speculation.suffix.index import (
    BORDER,
    MAX_LENGTH,
    Match,
    Tokens,
    checked_tokens,
    last_tokens,
    require_not_negative,
    until_border,
)

_ANY_LENGTH = 2**31 - 1


class SuffixAutomaton:
    """Every substring of one or more texts, added token by token; the last tokens can be removed again.

    Give it verified tokens only: the prompt, then what each round accepted. Further texts, such as the
    passages retrieved for the request, are separated with :meth:`end_text`; no match reaches across.

    Cost, for n tokens: adding one takes O(log n) amortised steps, looking up a suffix of m tokens takes O(m), and
    finding k occurrences O(k log n), however many there are; each text that ends with the suffix adds at most one step
    to that. Removing tokens undoes the steps that added them, one by one. Natural text takes about 150 bytes per token;
    arrays grow by doubling.

    Lookups rearrange internal structures, so use it from one thread at a time.
    """

    def __init__(self) -> None:
        self._counts = np.zeros(COUNT_FIELDS, dtype=np.int64)
        self._counts[STATES] = 1
        self._tokens: Ints = np.empty(64, dtype=np.int32)
        self._shown = _read_only(self._tokens)
        self._journal: Ints = np.empty((64, JOURNAL_FIELDS), dtype=np.int32)
        self._states: Ints = np.empty((64, STATE_FIELDS), dtype=np.int32)
        self._states[0] = 0
        self._states[0, EDGES] = -1
        self._edges: Ints = np.empty((64, EDGE_FIELDS), dtype=np.int32)
        self._table: Ints = np.zeros(128, dtype=np.int32)
        self._pieces: Ints = np.empty((64, PIECE_FIELDS), dtype=np.int32)

    def __len__(self) -> int:
        return int(self._counts[POSITIONS])

    @property
    def tokens(self) -> Ints:
        """All tokens, ``[positions]``, with a negative number at the end of each text; a read-only view."""
        return self._shown[: len(self)]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, including their spare room."""
        arrays = (self._tokens, self._journal, self._states, self._edges, self._table, self._pieces)
        return sum(array.nbytes for array in arrays)

    def extend(self, tokens: Tokens) -> None:
        """Add ``tokens`` after the newest one.

        Raises:
            InputError: one is not a token id; nothing is added.
        """
        self._insert(checked_tokens("tokens", tokens))

    def end_text(self) -> None:
        """End the current text: what is added from here on is another one. Takes one position."""
        self._insert(np.array([BORDER], dtype=np.int64))

    def truncate(self, length: int) -> None:
        """Remove everything after the first ``length`` positions.

        Raises:
            InputError: there are fewer positions.
        """
        if not 0 <= length <= len(self):
            raise InputError("length", length, f"give 0 to {len(self)}, the number of positions")
        loops.remove(
            length,
            self._counts,
            self._tokens,
            self._journal,
            self._states,
            self._edges,
            self._table,
            self._pieces,
        )

    def fork(self) -> SuffixAutomaton:
        """An independent copy."""
        other = SuffixAutomaton()
        other._counts = self._counts.copy()
        other._tokens = self._tokens.copy()
        other._shown = _read_only(other._tokens)
        other._journal = self._journal.copy()
        other._states = self._states.copy()
        other._edges = self._edges.copy()
        other._table = self._table.copy()
        other._pieces = self._pieces.copy()
        return other

    def longest_match(self, max_length: int = _ANY_LENGTH) -> Match:
        """The longest suffix of all tokens, of at most ``max_length``, that also occurs earlier.

        The occurrences may overlap the suffix. With several texts, the suffix belongs to the text that is being
        added, and its occurrences may be in any text.
        """
        require_not_negative("max_length", max_length)
        return Match(min(max_length, loops.own_suffix(self._counts, self._states)), len(self) - 1)

    def match(self, tail: Tokens, max_length: int = MAX_LENGTH) -> Match:
        """The longest suffix of ``tail``, of at most ``max_length`` tokens, that occurs with a token after it."""
        new = last_tokens(tail, max_length)
        length, place = loops.foreign_suffix(new, self._states, self._edges, self._table)
        return Match(length, place)

    def occurrences(self, match: Match, limit: int) -> NDArray[np.int64]:
        """At most ``limit`` ends of ``match`` that have a token after them, most recent first.

        Args:
            match: a match from this automaton, made for its current positions.

        Returns:
            ``[ends]``, descending: ``tokens[end]`` is what followed.

        Raises:
            InputError: ``limit`` is negative, or ``match`` ends at a position that does not exist.
        """
        require_not_negative("limit", limit)
        if match.length == 0:
            return np.empty(0, dtype=np.int64)
        self._require_own(match)
        ends = np.empty(min(limit, len(self)), dtype=np.int64)
        found = loops.recent_ends(
            match.place,
            match.length,
            ends,
            self._counts,
            self._tokens,
            self._journal,
            self._states,
            self._pieces,
        )
        return ends[:found]

    def first_occurrence(self, match: Match) -> int:
        """The earliest end of ``match``; it may be the end of a text.

        Immediate for the longest match; a shorter one costs a step for each suffix in between that occurs
        more often than the next longer one.

        Raises:
            InputError: ``match`` is empty or ends at a position that does not exist.
        """
        if match.length == 0:
            raise InputError("match", match, "the empty suffix has no first occurrence")
        self._require_own(match)
        return int(loops.first_position(match.place, match.length, self._journal, self._states)) + 1

    def continuation(self, end: int, count: int) -> NDArray[np.int32]:
        """A copy of at most ``count`` tokens starting at ``end``, cut at the end of their text."""
        return until_border(self._tokens[: len(self)], end, count)

    def _require_own(self, match: Match) -> None:
        if not 0 <= match.place < len(self):
            raise InputError("match", match, "give a match of this automaton, for the positions it has now")

    def _insert(self, new: NDArray[np.int64]) -> None:
        while len(new):
            done = loops.insert(
                new,
                self._counts,
                self._tokens,
                self._journal,
                self._states,
                self._edges,
                self._table,
                self._pieces,
            )
            if done == len(new):
                return
            self._grow()
            new = new[done:]

    def _grow(self) -> None:
        full = self._counts[FULL]
        if full == POSITIONS_FULL:
            self._tokens = _doubled(self._tokens)
            self._shown = _read_only(self._tokens)
            self._journal = _doubled(self._journal)
        elif full == STATES_FULL:
            self._states = _doubled(self._states)
        elif full == PIECES_FULL:
            self._pieces = _doubled(self._pieces)
        elif full == EDGES_FULL:
            self._edges = _doubled(self._edges)
            self._table = np.zeros(2 * len(self._edges), dtype=np.int32)
            loops.fill_table(self._table, self._edges, int(self._counts[EDGE_ROWS]))


def _read_only(array: Ints) -> Ints:
    view = array.view()
    view.flags.writeable = False
    return view


def _doubled(array: Ints) -> Ints:
    larger = np.empty((2 * array.shape[0], *array.shape[1:]), dtype=np.int32)
    larger[: len(array)] = array
    return larger
