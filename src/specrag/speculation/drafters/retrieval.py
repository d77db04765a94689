"""ReSpec's drafter: when to copy, from where, how much, and a fallback otherwise (sections 3.2 and 3.3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from specrag.checks import check_whole
from specrag.engine import NOTHING, Coroutine, Outputs, Row, Session
from specrag.errors import InputError
from specrag.speculation.drafters.base import ANY_DEPTH, Drafter
from specrag.speculation.drafters.suffix import CORPUS, RequestText, TargetMemory, copy_grade
from specrag.speculation.schedule.base import Estimates
from specrag.speculation.suffix.index import SuffixIndex
from specrag.speculation.tree import EMPTY, ROOT, DraftTree, Round, merge

#: Maximum number of occurrences examined per round, most recent first: a common token costs no more than a rare one.
MOST_OCCURRENCES = 32
#: Tokens in front of an occurrence that are compared with the newest ones, to break ties in score.
_LONGEST_COMPARED = 32


@dataclass(frozen=True, slots=True)
class EntropyTrigger:
    """When to look up a continuation, and by which suffix (ReSpec, section 3.2.1, Algorithm 1 lines 3-14).

    A suffix of k tokens has the confidence ``C_k = H_k + length_weight / k`` (lower is better), where ``H_k``
    is the mean entropy of the distributions that its tokens were drawn from. The best suffix is looked up if
    its ``H_k`` is at most the threshold.

    Args:
        max_key: the longest suffix (the paper's l).
        threshold: upper limit for the mean entropy, in nats (θ_entropy).
        length_weight: penalty for short suffixes, in nats (λ_e).
    """

    max_key: int = 3
    threshold: float = 1.5
    length_weight: float = 0.3

    def __post_init__(self) -> None:
        if self.max_key < 1:
            raise InputError("max_key", self.max_key, "give the longest suffix to look up, at least 1")
        if not self.threshold >= 0:
            raise InputError("entropy_threshold", self.threshold, "give nats, 0 or more")
        if not self.length_weight >= 0:
            raise InputError("length_weight", self.length_weight, "give nats, 0 or more")

    def key_length(self, entropies: Sequence[float]) -> int:
        """The length of the suffix to look up, 0 for none.

        Args:
            entropies: nats, of the distributions that the newest tokens were drawn from, newest last; as many as are
                known.
        """
        best, best_entropy, best_length = float("inf"), float("inf"), 0
        total = 0.0
        for length in range(1, min(self.max_key, len(entropies)) + 1):
            total += entropies[-length]
            entropy = total / length
            confidence = entropy + self.length_weight / length
            if confidence < best:
                best, best_entropy, best_length = confidence, entropy, length
        return best_length if best_entropy <= self.threshold else 0


#: Score of a position that was never tried.
FIRST_SCORE = 0.5
#: Maximum number of positions scored above the first score that are considered even if many newer ones exist.
_REMEMBERED = 16


class Feedback:
    """Feedback scores: a moving average of the acceptance for each position that was copied from.

    ReSpec, section 3.2.2, Algorithm 1 lines 15-28.

    Args:
        rate: weight of the newest observation (the paper's alpha).
        threshold: positions with a lower score are left out (θ_score).
    """

    def __init__(self, rate: float = 0.3, threshold: float = 0.2) -> None:
        if not 0 < rate <= 1:
            raise InputError("feedback_rate", rate, "give a number above 0 and up to 1")
        if not 0 <= threshold < FIRST_SCORE:
            raise InputError(
                "score_threshold", threshold, f"give a number from 0 to below {FIRST_SCORE}, the first score"
            )
        self._rate = rate
        self._threshold = threshold
        self._scores: dict[int, float] = {}

    def score(self, position: int) -> float:
        """Between 0 and 1."""
        return self._scores.get(position, FIRST_SCORE)

    def usable(self, position: int) -> bool:
        """Whether the score is high enough for another try."""
        return self.score(position) >= self._threshold

    def best(self) -> list[int]:
        """A few positions, those with the best scores above the first score, best first."""
        good = [(score, position) for position, score in self._scores.items() if score > FIRST_SCORE]
        good.sort(reverse=True)
        return [position for _, position in good[:_REMEMBERED]]

    def observe(self, position: int, reward: float) -> None:
        """``S <- (1 - rate) S + rate R``.

        Args:
            position: the position that was copied from.
            reward: accepted over drafted tokens for a winner, 0 for the others (R).
        """
        self._scores[position] = (1 - self._rate) * self.score(position) + self._rate * reward

    def truncate(self, length: int) -> None:
        """Forget positions at or after ``length``."""
        self._scores = {position: score for position, score in self._scores.items() if position < length}

    def fork(self) -> Feedback:
        """An independent copy."""
        other = Feedback(self._rate, self._threshold)
        other._scores = dict(self._scores)
        return other


@dataclass(frozen=True, slots=True)
class RetrievalSettings:
    """What the paper leaves open, and what an ablation switches off.

    Args:
        trigger: when to look up, and by which key; ``None``: always, by the longest suffix that occurs.
        max_key: longest key without a trigger.
        feedback_rate: weight of the newest reward (the paper's alpha); ``None``: no scores; the longest match wins, and
            among equals the most recent.
        score_threshold: θ_score.
        candidates: occurrences merged into a tree.
        draft_size: nodes of the tree; each copy gets its share of them, a single copy gets all.
        combine: always look up, by the longest suffix; let a fallback whose guesses cost no pass add its own, and let
            the schedule weigh them all, so that no trigger has to choose (not in the paper; for its effect see
            docs/log/2026-11-21-trigger-costs-more-than-it-saves.md). A fallback that runs passes guesses only where
            nothing is copied.
    """

    trigger: EntropyTrigger | None = field(default_factory=EntropyTrigger)
    max_key: int = 3
    feedback_rate: float | None = 0.3
    score_threshold: float = 0.2
    candidates: int = 3
    draft_size: int = 60
    combine: bool = True

    def __post_init__(self) -> None:
        for name in ("max_key", "candidates", "draft_size"):
            check_whole(name, getattr(self, name), remedy="give an integer, at least 1")
        if self.feedback_rate is not None:
            Feedback(self.feedback_rate, self.score_threshold)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A continuation, the place it was copied from, and all positions that agree with it (none for a corpus)."""

    tokens: tuple[int, ...]
    place: int
    positions: tuple[int, ...]
    score: float
    matched: int
    source: str


class RetrievalDrafter:
    """Copies from earlier text where the target is sure, otherwise lets a fallback guess.

    Args:
        settings: see :class:`RetrievalSettings`.
        fallback: guesses where nothing is copied; closed with this drafter.
        fallback_budget: how much to ask of a fallback that runs passes.
        references: texts of this request that the output may quote.
        corpus: a static corpus, shared by all requests.
        estimates: leave out what would not be verified; without them copies are as long as the settings allow.
    """

    runs_passes = False

    def __init__(
        self,
        settings: RetrievalSettings,
        fallback: Drafter,
        fallback_budget: Callable[[], int],
        references: Sequence[Sequence[int]] = (),
        corpus: SuffixIndex | None = None,
        estimates: Estimates | None = None,
    ) -> None:
        self._settings = settings
        self._estimates = estimates
        self._fallback = fallback
        self._fallback_budget = fallback_budget
        self._corpus = corpus
        self._combining = settings.combine and not fallback.runs_passes
        self._trigger = None if self._combining else settings.trigger
        self._opinion = fallback.opinion if isinstance(fallback, TargetMemory) else _no_opinion
        self._text = RequestText(references)
        self._feedback = _scores(settings)
        self._entropies: list[float] = []  # of the distributions that the newest tokens were drawn from
        self._candidates: list[_Candidate] = []

    @property
    def outputs(self) -> Outputs:
        """The entropies for the trigger, and what the fallback reads."""
        own = NOTHING if self._trigger is None else Outputs(entropy=True)
        return own.union(self._fallback.outputs)

    @property
    def nbytes(self) -> int:
        """Bytes of the indexed text."""
        return self._text.automaton.nbytes

    def start(self, session: Session, rows: Sequence[Row]) -> Coroutine[None]:
        self._text.follow(session)
        # An entropy is computed when it is read; without a trigger it is not needed.
        read = rows if self._trigger is not None else ()
        self._entropies = [row.entropy for row in read if row.entropy is not None]
        yield from self._fallback.start(session, rows)

    def propose(self, session: Session, budget: int, depth: int = ANY_DEPTH) -> Coroutine[DraftTree]:
        self._text.follow(session)
        self._candidates = self._retrieve(session)
        size = min(budget, self._settings.draft_size)
        copies = self._copies(session.tokens[-1], min(size, depth))
        if copies and not self._combining:
            return merge(copies, size)
        asked = min(budget, self._fallback_budget()) if self._fallback.runs_passes else budget
        guessed = (yield from self._fallback.propose(session, asked, depth)) if asked else EMPTY
        # What a copy holds beyond its share takes the room that guesses leave: it is seldom reached.
        shares = [copy.kept(range(min(len(copy), self._share))) for copy in copies]
        return merge([*shares, guessed, *copies], budget)

    def observe(self, round: Round) -> None:
        if self._trigger is not None:
            before = [ROOT, *round.verdict.path][: len(round.tokens)]
            for node in before:
                entropy = round.rows[node + 1].entropy
                assert entropy is not None
                self._entropies.append(entropy)
        if self._feedback is not None and self._candidates:
            self._reward(self._feedback, round)
        self._candidates = []
        self._fallback.observe(round)

    def truncate(self, length: int) -> None:
        dropped = len(self._text.automaton) - self._text.offset - length
        self._text.truncate(length)
        if dropped > 0:
            del self._entropies[max(len(self._entropies) - dropped, 0) :]
        if self._feedback is not None:
            self._feedback.truncate(self._text.offset + length)
        self._candidates = []
        self._fallback.truncate(length)

    def fork(self) -> RetrievalDrafter:
        other = RetrievalDrafter(
            self._settings,
            self._fallback.fork(),
            self._fallback_budget,
            corpus=self._corpus,
            estimates=self._estimates,
        )
        other._text = self._text.fork()
        other._feedback = None if self._feedback is None else self._feedback.fork()
        other._entropies = list(self._entropies)
        return other

    def close(self) -> None:
        self._text = RequestText()
        self._feedback = _scores(self._settings)
        self._entropies = []
        self._candidates = []
        self._fallback.close()

    # -- candidates -----------------------------------------------------------------------------------------

    def _retrieve(self, session: Session) -> list[_Candidate]:
        trigger = self._trigger
        wanted = self._settings.max_key if trigger is None else trigger.key_length(self._entropies)
        if wanted == 0:
            return []
        match = self._text.automaton.longest_match(wanted)
        # The trigger chose its key by its entropy; a shorter one may be far less certain.
        found: list[_Candidate] = []
        if match.length == wanted or (trigger is None and match.length > 0):
            ends = self._text.automaton.occurrences(match, MOST_OCCURRENCES)
            found = self._own(self._with_best(ends, match.length))
        if self._corpus is not None and len(found) < self._settings.candidates:
            found += self._from_corpus(self._corpus, session, wanted)
        return self._lengthened(found[: self._settings.candidates])

    @property
    def _share(self) -> int:
        """Tokens per copy when as many copies are found as may be merged."""
        return max(self._settings.draft_size // self._settings.candidates, 1)

    def _lengthened(self, found: list[_Candidate]) -> list[_Candidate]:
        """If fewer copies are found than may be merged, lengthen them to share the whole tree."""
        if not found or len(found) == self._settings.candidates:
            return found
        length = self._settings.draft_size // len(found)
        return [replace(candidate, tokens=self._copied(candidate, length)) for candidate in found]

    def _copied(self, candidate: _Candidate, length: int) -> tuple[int, ...]:
        if candidate.source == CORPUS:
            assert self._corpus is not None
            return tuple(self._corpus.continuation(candidate.place, length).tolist())
        tokens = self._text.copies(np.array([candidate.place]), length, 0)[0][0]
        return tuple(tokens[tokens >= 0].tolist())

    def _with_best(self, ends: NDArray[np.int64], key: int) -> NDArray[np.int64]:
        """Recent ends, plus older ones that scored well, if the key precedes them too."""
        if self._feedback is None or len(ends) < MOST_OCCURRENCES:
            return ends
        oldest = int(ends[-1])
        best = np.array([end for end in self._feedback.best() if end < oldest], dtype=np.int64)
        if not len(best):
            return ends
        return np.concatenate((ends, best[self._text.copies(best, 0, key)[1] >= key]))

    def _own(self, ends: NDArray[np.int64]) -> list[_Candidate]:
        """What follows the ends: equal continuations merged, most promising first."""
        if self._feedback is not None:
            ends = ends[[self._feedback.usable(end) for end in ends.tolist()]]
        if not len(ends):
            return []
        copied, matched, firsts = self._text.copies(ends, self._share, _LONGEST_COMPARED)
        groups: dict[int, list[int]] = {}
        for row, first in enumerate(firsts.tolist()):
            groups.setdefault(first, []).append(row)
        agreeing: list[int] = matched.tolist()
        places: list[int] = ends.tolist()
        found = []
        for first, rows in groups.items():
            tokens = copied[first]
            positions = tuple(places[row] for row in rows)
            scores = [0.0 if self._feedback is None else self._feedback.score(end) for end in positions]
            score = max(scores)
            found.append(
                _Candidate(
                    tuple(tokens[tokens >= 0].tolist()),
                    positions[scores.index(score)],
                    positions,
                    score,
                    max(agreeing[row] for row in rows),
                    self._text.source(positions[0]),
                )
            )
        # Sorting is stable: where all else is equal, the most recent comes first.
        found.sort(key=lambda candidate: (candidate.score, candidate.matched), reverse=True)
        return [candidate for candidate in found if candidate.tokens]

    def _from_corpus(self, corpus: SuffixIndex, session: Session, wanted: int) -> list[_Candidate]:
        match = corpus.match(session.tokens[-_LONGEST_COMPARED:], _LONGEST_COMPARED)
        if match.length < wanted:
            return []
        seen: dict[tuple[int, ...], int] = {}
        for end in corpus.occurrences(match, MOST_OCCURRENCES).tolist():
            seen.setdefault(tuple(corpus.continuation(end, self._share).tolist()), end)
        return [
            _Candidate(tokens, end, (), 0.0, match.length, CORPUS) for tokens, end in seen.items() if tokens
        ]

    def _copies(self, newest: int, budget: int) -> list[DraftTree]:
        estimates, chains = self._estimates, []
        least = 0.0 if estimates is None or not self._candidates else estimates.least_chance()
        for rank, candidate in enumerate(self._candidates):
            tokens, grades, chance = candidate.tokens[:budget], [], 1.0
            for depth, (before, token) in enumerate(pairwise((newest, *tokens))):
                # A later position of a copy is reached only after more tokens agreed, so it is more certain.
                grade = copy_grade(candidate.matched + depth, rank, self._opinion(before, token))
                if estimates is not None:
                    chance *= estimates.rate(candidate.source, grade)
                    # The first guess is always made, so that its rate is learned.
                    if chance < least and depth:
                        break
                grades.append(grade)
            chains.append(DraftTree.chain(tokens[: len(grades)], candidate.source, grades))
        return chains

    def _reward(self, feedback: Feedback, round: Round) -> None:
        """Reward accepted over drafted for candidates that share the whole accepted path, 0 for the others."""
        shares = [_verified(candidate.tokens, round) for candidate in self._candidates]
        most = max(share.accepted for share in shares)
        for candidate, share in zip(self._candidates, shares, strict=True):
            if not share.drafted:  # the schedule left it out: nothing was learned
                continue
            won = most > 0 and share.accepted == most
            for position in self._holding(candidate, most) if won else candidate.positions:
                feedback.observe(position, share.accepted / share.drafted if won else 0.0)

    def _holding(self, candidate: _Candidate, accepted: int) -> list[int]:
        """The positions that hold the accepted path: beyond its share, a copy is only that of its own place."""
        copies = self._text.copies(np.array(candidate.positions, dtype=np.int64), accepted, 0)[0]
        path = list(candidate.tokens[:accepted])
        return [
            end for end, tokens in zip(candidate.positions, copies.tolist(), strict=True) if tokens == path
        ]


def _no_opinion(before: int, token: int) -> None:
    del before, token


def _scores(settings: RetrievalSettings) -> Feedback | None:
    rate = settings.feedback_rate
    return None if rate is None else Feedback(rate, settings.score_threshold)


@dataclass(frozen=True, slots=True)
class _Share:
    """How much of a candidate was verified, and how much of that was accepted."""

    drafted: int
    accepted: int


def _verified(tokens: Sequence[int], round: Round) -> _Share:
    node, drafted, accepted = ROOT, 0, 0
    path = frozenset(round.verdict.path)
    for token in tokens:
        child = round.tree.child(node, token)
        if child is None:
            break
        node = child
        drafted += 1
        accepted += child in path
    return _Share(drafted, accepted)
