"""The RAG drafter: a language model that reads the retrieved part of a long prompt (RAPID, section 2.3).

It may be the target's own weights in a second session, or another model. It follows only the output; instead of the
target's prompt it reads a prompt of its own, which is given with the request.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from specrag.engine import (
    LOGITS,
    NOTHING,
    Chain,
    Coroutine,
    LogitsProcessor,
    Outputs,
    Row,
    SamplingParams,
    Session,
    SessionModel,
    State,
    build_processors,
    check_room,
    choose,
    warp,
)
from specrag.errors import InputError
from specrag.speculation.drafters.base import ANY_DEPTH, Stopwatch
from specrag.speculation.drafters.cross_vocabulary import CrossVocabulary
from specrag.speculation.drafters.draft_model import FEW, Guess, grades_of, likeliest
from specrag.speculation.drafters.suffix import SUFFIX, copy_grade
from specrag.speculation.suffix.automaton import SuffixAutomaton
from specrag.speculation.target import draw_guess
from specrag.speculation.tree import EMPTY, DraftTree, Round
from specrag.speculation.vocabularies import VocabularyPair

#: Source of the RAG drafter's own guesses.
RAG = "rag"

_TOP = Outputs(top_k=1)


@dataclass(frozen=True, slots=True)
class Guessing:
    """Settings of a RAG drafter.

    Args:
        sampling: the request's. Greedy: the likeliest token.
        opinions: the rule reads the drafter's distributions after the request's penalties, bans and processors.
            Guesses are then drawn from them independently of the target. Without opinions, the drafter uses the same
            random numbers that the target will use, so that two similar distributions mostly give the same token
            (Daliri et al. 2024, "Coupling without communication"). Not for greedy text, which needs none.
        most: how many of its own guesses are worth a pass each; by default as many as the loop asks for.
        min_confidence: end a chain after a likeliest token whose probability is lower than this; 0: never.
        copy_from: copy what followed the newest tokens in the drafter's own text, if at least this many agree; all
            copies of a round take one pass of the drafter. 0: never. Needs ``opinions``.
        most_copies: how many copies are worth that pass; by default as many as the loop asks for.
        processors: the request's own logits processors; they change the opinions.
    """

    sampling: SamplingParams
    opinions: bool = False
    most: Callable[[], int] | None = None
    min_confidence: float = 0.0
    copy_from: int = 0
    most_copies: Callable[[], int] | None = None
    processors: Sequence[LogitsProcessor] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.min_confidence <= 1:
            raise InputError("min_confidence", self.min_confidence, "give a probability, 0 for no early end")
        if self.opinions and self.sampling.greedy:
            raise InputError("opinions", True, "a greedy text needs none; give a temperature above 0")
        if self.copy_from < 0:
            raise InputError("copy_from", self.copy_from, "give a number of tokens, 0 for no copies")
        if self.copy_from and not self.opinions:
            raise InputError(
                "copy_from", self.copy_from, "copies that need no opinion come from a SuffixDrafter"
            )


class RagDrafter:
    """A RAG drafter with the target's vocabulary, which can report its own distributions.

    The prompt is read when the first guess is asked for, since a schedule may never ask.

    After :meth:`truncate` the drafter behaves as if it had never seen the removed tokens. Beyond its model's context
    nothing is proposed; if its opinion is needed there, that is an error.

    Args:
        model: the drafter's model, or the target itself.
        reading: tokens that it reads in place of the target's prompt.
        guessing: how guesses are made.
        watch: runs while the prompt is read.

    Raises:
        InputError: there is nothing to read.
    """

    outputs: Outputs = NOTHING
    runs_passes = True

    def __init__(
        self,
        model: SessionModel,
        reading: Sequence[int],
        guessing: Guessing,
        watch: Stopwatch | None = None,
    ) -> None:
        if not len(reading):
            raise InputError("reading", list(reading), "give the drafter at least one token to read")
        self._model = model
        self._reading = tuple(reading)
        self._guessing = guessing
        self._watch = watch or Stopwatch()
        self._session = Session(model)
        self._first: int | None = None  # number of session tokens in front of the output
        self._followed = 0  # leading tokens of the output that the own session holds
        self._text = SuffixAutomaton() if guessing.copy_from else None
        # Only opinions are processed: a guess that is compared with the target's own draw may ignore a penalty.
        self._chain = (
            build_processors(guessing.sampling, guessing.processors) if guessing.opinions else Chain(())
        )
        self._prompt = 0  # tokens of the session that the processors treat as the prompt
        self._state: State | None = None  # of the processors, after the first `_stated` tokens of the session
        self._stated = 0

    def start(self, session: Session, rows: Sequence[Row]) -> Coroutine[None]:
        """Remember, on the first call, where the output begins."""
        del rows
        if self._first is None:
            self._first = len(session)
        self._prompt, self._state = len(session), None
        yield from ()

    def propose(self, session: Session, budget: int, depth: int = ANY_DEPTH) -> Coroutine[DraftTree]:
        """Copy, or guess with one pass per token.

        Raises:
            ContextLengthError: its opinion is needed but its model's context is full.
        """
        missing = self._missing(session)
        if not self._can_read(missing):
            if self._guessing.opinions:
                check_room(self._model, len(self._session) + len(missing))
            return EMPTY
        if not self._session.tokens:
            yield from self._watch.timed(self._session.extend(missing))
            missing = []
        elif len(missing) > FEW:
            yield from self._session.extend(missing)
            missing = []
        budget = min(budget, depth)
        room = self._model.context_length - len(self._session) - len(missing)
        copies = self._copies(min(budget, room), missing)
        if copies:
            tree = yield from self._scored(copies, missing, session)
            self._note_followed(session)
            return tree
        guessing = self._guessing
        most = budget if guessing.most is None else min(budget, guessing.most())
        # Without opinions the last guess is not fed, so it needs no room.
        most = min(most, room if guessing.opinions else room + 1)
        tree = yield from self._guessed(most, missing, session)
        self._note_followed(session)
        return tree

    def observe(self, round: Round) -> None:
        del round  # the tokens are read from the session when they are needed

    def truncate(self, length: int) -> None:
        if self._first is None:
            return
        self._first = min(self._first, length)
        self._followed = min(self._followed, length - self._first)
        kept = len(self._reading) + length - self._first
        if kept < len(self._session):
            self._session.truncate(kept)
        if self._text is not None and kept < len(self._text):
            self._text.truncate(kept)
        self._prompt = min(self._prompt, length)
        if length < self._stated:
            self._state = None

    def fork(self) -> RagDrafter:
        other = RagDrafter(self._model, self._reading, self._guessing, self._watch)
        other._session = self._session.fork()
        other._prompt, other._state, other._stated = self._prompt, self._state, self._stated
        other._first, other._followed = self._first, self._followed
        if self._text is not None:
            other._text = self._text.fork()
        return other

    def close(self) -> None:
        self._session.close()
        self._followed = 0
        self._text = SuffixAutomaton() if self._guessing.copy_from else None

    # -- following the target -----------------------------------------------------------------------------------

    def _missing(self, session: Session) -> list[int]:
        """Drop the guesses that the target did not keep; return the tokens still to read."""
        assert self._first is not None, "start comes first"
        own, right, front = self._session.tokens, session.tokens, len(self._reading)
        if not own:
            return [*self._reading, *right[self._first :]]
        same = self._followed
        while (
            front + same < len(own)
            and self._first + same < len(right)
            and own[front + same] == right[self._first + same]
        ):
            same += 1
        if front + same < len(own):
            self._session.truncate(front + same)
        self._followed = same
        return right[self._first + same :]

    def _note_followed(self, session: Session) -> None:
        """Update how much of the output the own session holds, not counting guesses."""
        assert self._first is not None
        held = max(len(self._session) - len(self._reading), 0)
        self._followed = min(held, len(session) - self._first)

    def _can_read(self, missing: Sequence[int]) -> bool:
        fits = len(self._session) + len(missing) <= self._model.context_length
        return fits and max(missing, default=0) < self._model.vocab_size

    # -- guesses ------------------------------------------------------------------------------------------------

    def _guessed(self, most: int, missing: list[int], session: Session) -> Coroutine[DraftTree]:
        """A chain of guesses at one pass each, and one more pass if the opinion after the last one is needed."""
        guessing, vocab_size = self._guessing, session.model.vocab_size
        outputs = _TOP if guessing.sampling.greedy else LOGITS
        guesses: list[Guess] = []
        opinions: list[NDArray[np.float64]] = []
        state = self._state_behind(session)
        while len(guesses) < most or (guessing.opinions and len(opinions) <= len(guesses)):
            rows = yield from self._session.score(DraftTree.chain(missing, RAG), outputs)
            if guessing.opinions:
                logits = self._processed(rows[-1], state, vocab_size)
                opinions.append(warp(logits, guessing.sampling).dense(vocab_size))
                if len(guesses) >= most:
                    self._session.commit(range(len(missing)))
                    break
                guess = self._guess_from(opinions[-1], len(session) + len(guesses))
                state = self._chain.advance(state, guess.token)
            else:
                guess = self._guess(rows[-1], len(session) + len(guesses), vocab_size)
            if guess.token >= vocab_size:  # a column that pads the logits
                self._session.commit(range(len(missing)))
                break
            # It is fed with the next guess, or with the target's next tokens.
            self._session.commit(range(len(missing)), guess.token)
            missing = []
            guesses.append(guess)
            if guess.confidence < guessing.min_confidence:
                most = len(guesses)
        return self._tree(guesses, opinions)

    def _guess(self, row: Row, position: int, vocab_size: int) -> Guess:
        """The likeliest token, or the one that the target's own random numbers give here."""
        if not self._guessing.sampling.greedy:
            assert row.logits is not None
            return Guess(choose(row.logits[:vocab_size], self._guessing.sampling, position), 1.0)
        return likeliest(row)

    def _guess_from(self, opinion: NDArray[np.float64], position: int) -> Guess:
        """A guess drawn from the opinion, independently of the target."""
        return Guess(draw_guess(opinion, self._guessing.sampling.seed, position), 1.0)

    def _processed(self, row: Row, state: State, vocab_size: int) -> NDArray[np.floating]:
        """``[vocab_size]``, after the request's penalties, bans and own processors."""
        assert row.logits is not None
        return self._chain.apply(row.logits[:vocab_size], state)

    def _state_behind(self, session: Session) -> State:
        """The processors' state after the target's tokens: the target's prompt counts, not the drafter's."""
        if not self._chain.processors:
            return ()
        if self._state is None:
            self._state, self._stated = self._chain.start(session.tokens[: self._prompt]), self._prompt
        for token in session.tokens[self._stated :]:
            self._state = self._chain.advance(self._state, token)
        self._stated = len(session)
        return self._state

    def _tree(self, guesses: Sequence[Guess], opinions: Sequence[NDArray[np.float64]]) -> DraftTree:
        return DraftTree(
            tuple(guess.token for guess in guesses),
            tuple(range(-1, len(guesses) - 1)),
            (RAG,) * len(guesses),
            grades_of(guesses, drawn=not self._guessing.sampling.greedy),
            tuple(opinions),
        )

    # -- copies -------------------------------------------------------------------------------------------------

    def _copies(self, most: int, missing: Sequence[int]) -> list[int]:
        """What followed the newest tokens earlier in the drafter's own text."""
        if self._text is None:
            return []
        most = most if self._guessing.most_copies is None else min(most, self._guessing.most_copies())
        if most < 1:
            return []
        text = [*self._session.tokens, *missing]
        self._text.extend(text[len(self._text) :])
        match = self._text.longest_match()
        if match.length < self._guessing.copy_from:
            return []
        copied: list[int] = self._text.continuation(self._text.first_occurrence(match), most).tolist()
        return copied

    def _scored(self, copies: list[int], missing: Sequence[int], session: Session) -> Coroutine[DraftTree]:
        """The copies as a chain, cut at the first forbidden token, with the drafter's opinion of each; one pass."""
        assert self._text is not None
        vocab_size = session.model.vocab_size
        matched = self._text.longest_match().length
        rows = yield from self._session.score(DraftTree.chain([*missing, *copies], SUFFIX), LOGITS)
        self._session.commit(range(len(missing) + len(copies)))
        state, opinions = self._state_behind(session), []
        for row, token in zip_longest(rows[len(missing) :], copies):
            logits = self._processed(row, state, vocab_size)
            opinions.append(warp(logits, self._guessing.sampling).dense(vocab_size))
            # A grammar need not know what follows a token that it forbids.
            if token is None or logits[token] == -np.inf:
                break
            state = self._chain.advance(state, token)
        copies = copies[: len(opinions) - 1]
        grades = tuple(copy_grade(matched + depth, 0, None) for depth in range(len(copies)))
        chain = DraftTree.chain(copies, SUFFIX, grades)
        return DraftTree(chain.tokens, chain.parents, chain.sources, chain.grades, tuple(opinions))


class TranslatedRagDrafter:
    """A RAG drafter with another vocabulary; it has no opinions, so it serves only the target's own text (eta = 0).

    Args:
        model: the drafter's model.
        pair: the two vocabularies.
        reading: what it reads in place of the target's prompt, in its own tokens.
        max_tokens: maximum number of draft model guesses per round, in its own tokens.
        min_confidence: end a draft after a token whose draft model probability is lower than this; 0: never.
        watch: runs while the prompt is read, which waits for the first proposal.

    Raises:
        InputError: there is nothing to read.
    """

    outputs: Outputs = NOTHING
    runs_passes = True

    def __init__(
        self,
        model: SessionModel,
        pair: VocabularyPair,
        reading: Sequence[int],
        max_tokens: int = 16,
        min_confidence: float = 0.0,
        watch: Stopwatch | None = None,
    ) -> None:
        if not len(reading):
            raise InputError("reading", list(reading), "give the drafter at least one token to read")
        behind = copy.copy(pair)
        behind.front = tuple(reading)
        self._drafter = CrossVocabulary(model, behind, max_tokens, min_confidence)
        self._first: int | None = None
        self._watch = watch or Stopwatch()
        self._read = False

    def start(self, session: Session, rows: Sequence[Row]) -> Coroutine[None]:
        """Remember, on the first call, where the output begins."""
        del rows
        if self._first is None:
            self._first = len(session)
        yield from ()

    def propose(self, session: Session, budget: int, depth: int = ANY_DEPTH) -> Coroutine[DraftTree]:
        output = self._output_of(session)
        if not self._read:
            self._read = True
            yield from self._watch.timed(self._drafter.start(output, ()))
        return (yield from self._drafter.propose(output, budget, depth))

    def observe(self, round: Round) -> None:
        self._drafter.observe(round)

    def truncate(self, length: int) -> None:
        if self._first is not None:
            self._first = min(self._first, length)
            self._drafter.truncate(length - self._first)

    def fork(self) -> TranslatedRagDrafter:
        other = copy.copy(self)
        other._drafter = self._drafter.fork()
        return other

    def close(self) -> None:
        self._drafter.close()

    def _output_of(self, session: Session) -> Session:
        """The output as a session of its own; a drafter reads only its tokens."""
        assert self._first is not None, "start comes first"
        return Session(session.model, session.cache, session.tokens[self._first :])
