"""One chain of guesses from places where the newest tokens stood before, and how sure each of them is.

The places vote: the first guess is the token that most of them go on with, the next one what most of those that agreed
go on with, and so on. Where the newest tokens are few that agree, a place counts for more the more of the words before
them stand before it too. How sure a guess is depends on how many tokens in front of it agree and on how clear the vote
was; both make its *grade*, and acceptance is counted by grade.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specrag.engine import compiled
from specrag.speculation.drafters import COPY_RATES, copy_grade
from specrag.speculation.suffix import Match, SuffixIndex

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Floats = NDArray[np.float64]

#: Where guesses are copied from, in the order of preference among equally long matches.
SOURCES = ("request", "answers", "corpus")
#: Places that vote.
MOST_PLACES = 16
#: Tokens before a place that are compared with the newest ones, and the longest match for which they are.
_AROUND, _SHORT = 16, 2
#: Largest numbers of agreeing tokens of the classes; the last class is open.
LENGTHS = (1, 2, 3, 5, 8, 16, 32)
_LENGTHS = np.array(LENGTHS, dtype=np.int64)
# The votes: all of several places agree; there is one place; at least two thirds agree; fewer do.
_ALL, _LONE, _MOST, _SPLIT = range(4)
_VOTES = 4
GRADES = (len(LENGTHS) + 1) * _VOTES
#: An observation's weight is halved after about 0.7 times as many more of its kind.
_SHARED_MEMORY, _OWN_MEMORY = 500.0, 40.0
#: What is known beforehand is worth this many observations, what other requests saw at most as many to a request.
_PRIOR_WEIGHT = 10.0


@compiled
def _weigh(tokens: Ints, ends: Longs, newest: Ints, matched: int) -> Longs:
    """One for each place, and one for each token shortly before the match that stands shortly before the place too."""
    weights = np.ones(len(ends), dtype=np.int64)
    if matched > _SHORT or len(ends) == 1:
        return weights
    for place in range(len(ends)):
        around = tokens[max(0, ends[place] - _AROUND) : max(0, ends[place] - matched)]
        for token in newest[: len(newest) - matched]:
            weights[place] += np.any(around == token)
    return weights


@compiled
def _majority(said: Ints, alive: NDArray[np.bool_], weights: Longs) -> int:
    """The token that most weight is behind, the first of equals."""
    winner, most = -1, 0
    for place in range(len(said)):
        if alive[place]:
            agreeing = 0
            for other in range(place, len(said)):
                if alive[other] and said[other] == said[place]:
                    agreeing += weights[other]
            if agreeing > most:
                winner, most = said[place], agreeing
    return winner


@compiled
def _vote(tokens: Ints, ends: Longs, weights: Longs, copied: Ints, votes: Longs) -> int:
    """Follow the majority of the places, the first of them where there is none; returns the length of the chain.

    Args:
        tokens: of the text, a negative number at the end of each part.
        ends: the places, each the position of the token that followed.
        weights: of the places.
        copied: filled with the chain. Behind the newest token a place goes on with what it copied itself.
        votes: filled with the class of each vote.
    """
    newest = len(tokens)
    alive = np.ones(len(ends), dtype=np.bool_)
    said = np.empty(len(ends), dtype=np.int32)
    for step in range(len(copied)):
        voters, agreeing = 0, 0
        for place in range(len(ends)):
            if alive[place]:
                said[place] = tokens[ends[place] + step % (newest - ends[place])]
                alive[place] = said[place] >= 0
                voters += alive[place]
        if voters == 0:
            return step
        copied[step] = _majority(said, alive, weights)
        for place in range(len(ends)):
            alive[place] = alive[place] and said[place] == copied[step]
            agreeing += alive[place]
        if agreeing == voters:
            votes[step] = _LONE if voters == 1 else _ALL
        else:
            votes[step] = _MOST if 3 * agreeing >= 2 * voters else _SPLIT
    return len(copied)


@compiled
def _grade(matched: int, vote: int, lengths: Longs) -> int:
    length = 0
    while length < len(lengths) and matched > lengths[length]:
        length += 1
    return length * _VOTES + vote


@compiled
def _judge(
    tokens: Ints,
    ends: Longs,
    newest: Ints,
    most: int,
    matched: int,
    own: Floats,
    shared: Floats,
    lengths: Longs,
) -> tuple[Ints, Longs, Floats]:
    """Copy a chain of at most ``most`` guesses; returns it, their grades, and their chances (:class:`Chain`)."""
    copied = np.empty(most, dtype=np.int32)
    votes = np.empty(most, dtype=np.int64)
    weights = _weigh(tokens, ends, newest, matched)
    count = _vote(tokens, ends, weights, copied, votes)
    grades, chances = np.empty(count, dtype=np.int64), np.empty(count)
    chance = 1.0
    for step in range(count):
        grade = _grade(matched + step, votes[step], lengths)
        grades[step] = grade
        known = shared[1, grade] / shared[0, grade]
        weight = min(shared[0, grade], _PRIOR_WEIGHT)
        chance *= (own[1, grade] + weight * known) / (own[0, grade] + weight)
        chances[step] = chance
    return copied[:count], grades, chances


@compiled
def _count(tokens: Ints, grades: Longs, came: Ints, own: Floats, shared: Floats) -> int:
    """Compare a chain with the tokens that came, verified or not; returns how many came true."""
    for step in range(min(len(tokens), len(came))):
        right = tokens[step] == came[step]
        grade = grades[step]
        own[0, grade] = own[0, grade] * (1 - 1 / _OWN_MEMORY) + 1
        own[1, grade] = own[1, grade] * (1 - 1 / _OWN_MEMORY) + right
        shared[0, grade] = shared[0, grade] * (1 - 1 / _SHARED_MEMORY) + 1
        shared[1, grade] = shared[1, grade] * (1 - 1 / _SHARED_MEMORY) + right
        if not right:
            return step
    return min(len(tokens), len(came))


def _prior() -> Floats:
    """The rates of copies that were measured elsewhere, ``[tried or accepted, grades]``."""
    table = np.empty((2, GRADES))
    table[0] = _PRIOR_WEIGHT
    for length, matched in enumerate((*LENGTHS, LENGTHS[-1] + 1)):
        for vote in range(_VOTES):
            table[1, length * _VOTES + vote] = COPY_RATES[copy_grade(matched, int(vote == _SPLIT), None)]
    table[1] *= _PRIOR_WEIGHT
    return table


@dataclass(slots=True)
class Acceptance:
    """Guesses tried and accepted by source and grade: of all requests, or of one.

    Attributes:
        counts: float64 ``[tried or accepted, grades]`` by source; older ones weigh less.
    """

    counts: dict[str, Floats]

    @classmethod
    def of_all(cls) -> Acceptance:
        """What is known before anything was tried."""
        return cls({source: _prior() for source in SOURCES})

    @classmethod
    def of_one(cls) -> Acceptance:
        """The counts of a request that has tried nothing."""
        return cls({source: np.zeros((2, GRADES)) for source in SOURCES})

    def rate(self, source: str) -> float:
        """The share of a source's guesses that came true lately."""
        tried, accepted = self.counts[source].sum(axis=1)
        return float(accepted / tried) if tried else 0.0


class Chain(NamedTuple):
    """Guesses of what follows a row's newest token.

    Attributes:
        tokens: int32 ``[guesses]``.
        chances: float64 ``[guesses]``: that a guess and all before it are accepted; never rising.
        grades: int64 ``[guesses]``.
        source: one of :data:`SOURCES`.
    """

    tokens: Ints
    chances: Floats
    grades: Longs
    source: str

    def came(self, tokens: Ints, own: Acceptance, shared: Acceptance) -> int:
        """Learn from the tokens that came in its place; returns how many guesses came true."""
        return int(
            _count(self.tokens, self.grades, tokens, own.counts[self.source], shared.counts[self.source])
        )


NO_CHAIN = Chain(np.empty(0, dtype=np.int32), np.empty(0), np.empty(0, dtype=np.int64), SOURCES[0])


class Found(NamedTuple):
    """The longest suffix of a row that an index has.

    Attributes:
        texts: the index that has it.
        tokens: all tokens of the index.
        match: in it.
        source: one of :data:`SOURCES`.
        newest: tokens of the row, as many as are compared with what stands before a place.
    """

    texts: SuffixIndex
    tokens: Ints
    match: Match
    source: str
    newest: Ints

    def chain(self, most: int, own: Acceptance, shared: Acceptance) -> Chain:
        """At most ``most`` guesses by what followed its places."""
        ends = self.texts.occurrences(self.match, MOST_PLACES)
        tried, known = own.counts[self.source], shared.counts[self.source]
        copied, grades, chances = _judge(
            self.tokens, ends, self.newest[-_AROUND:], most, self.match.length, tried, known, _LENGTHS
        )
        return Chain(copied, chances, grades, self.source)
