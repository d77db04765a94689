"""Prompt lookup: copies what followed the first occurrence of the newest n-gram (Saxena 2023).

It picks the same match as transformers (``prompt_lookup_num_tokens``): the longest n-gram that occurred before,
its earliest occurrence, and the tokens after it up to the end of the text. Without a match nothing is proposed.
Unlike transformers it keeps tokens that would end the text: the decoding loop cuts there anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

from specrag.checks import check_whole
from specrag.engine import NOTHING, Coroutine, Outputs, Row, Session
from specrag.speculation.drafters.base import ANY_DEPTH
from specrag.speculation.tree import EMPTY, DraftTree, Round

#: Source of tokens copied by prompt lookup.
LOOKUP = "lookup"

#: Guesses preceded by at least this many agreeing tokens share one grade.
_MOST_AGREEING = 12


class PromptLookup:
    """Copies one chain after the earliest occurrence of the longest n-gram that ends the text.

    Each token costs ``ngram_max`` dictionary entries and each proposal as many look-ups, however long the text is.
    After :meth:`truncate` the drafter behaves as if it had never seen the removed tokens.

    Args:
        ngram_max: the longest n-gram tried, down to a single token (transformers: 2; the first publication: 3).
        max_tokens: longest chain.

    Raises:
        InputError: a number is less than 1.
    """

    outputs: Outputs = NOTHING
    runs_passes = False

    def __init__(self, ngram_max: int = 3, max_tokens: int = 10) -> None:
        check_whole("ngram_max", ngram_max, remedy="give an integer, at least 1")
        check_whole("max_tokens", max_tokens, remedy="give an integer, at least 1")
        self._ngram_max = ngram_max
        self._max_tokens = max_tokens
        self._tokens: list[int] = []
        # For every n-gram that has a token after it, where that token first occurred.
        self._first: dict[tuple[int, ...], int] = {}

    def start(self, session: Session, rows: Sequence[Row]) -> Coroutine[None]:
        del rows
        self._follow(session)
        yield from ()

    def propose(self, session: Session, budget: int, depth: int = ANY_DEPTH) -> Coroutine[DraftTree]:
        yield from ()
        self._follow(session)
        length = len(self._tokens)
        for size in range(min(self._ngram_max, length), 0, -1):
            start = self._first.get(tuple(self._tokens[length - size :]))
            if start is not None:
                copied = self._tokens[start : start + min(budget, depth, self._max_tokens)]
                # A later position is reached only after more tokens agreed, so it is more certain.
                grades = [min(size + depth, _MOST_AGREEING) for depth in range(len(copied))]
                return DraftTree.chain(copied, LOOKUP, grades)
        return EMPTY

    def observe(self, round: Round) -> None:
        del round  # the tokens are read from the session when they are needed

    def truncate(self, length: int) -> None:
        while len(self._tokens) > length:
            place = len(self._tokens) - 1
            for ngram in self._ending(place):
                if self._first[ngram] == place:
                    del self._first[ngram]
            self._tokens.pop()

    def fork(self) -> PromptLookup:
        other = PromptLookup(self._ngram_max, self._max_tokens)
        other._tokens = self._tokens.copy()
        other._first = self._first.copy()
        return other

    def close(self) -> None:
        self._tokens = []
        self._first = {}

    def _follow(self, session: Session) -> None:
        for token in session.tokens[len(self._tokens) :]:
            place = len(self._tokens)
            for ngram in self._ending(place):
                self._first.setdefault(ngram, place)
            self._tokens.append(token)

    def _ending(self, place: int) -> list[tuple[int, ...]]:
        """The n-grams that end in front of a position."""
        return [
            tuple(self._tokens[place - size : place]) for size in range(1, min(self._ngram_max, place) + 1)
        ]
