"""A draft model with the target's vocabulary guesses a chain (Leviathan et al. 2023; Chen et al. 2023)."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from specrag.checks import check_whole
from specrag.engine import NOTHING, Coroutine, Outputs, Row, Session, SessionModel
from specrag.errors import InputError
from specrag.speculation.drafters.base import ANY_DEPTH
from specrag.speculation.tree import EMPTY, DraftTree, Round

#: Source of a draft model's tokens.
DRAFT_MODEL = "draft-model"

#: Upper bounds of the confidence classes; guesses in one class are accepted about equally often.
CONFIDENCES = (0.2, 0.4, 0.6, 0.8, 0.9, 0.97)
#: Drawn guesses are graded by depth, starting at this grade.
_DRAWN_GRADE, _MOST_DEPTH = 8, 7
#: Up to this many tokens of backlog go into the pass of the first guess, where every row is answered.
FEW = 32
_TOP = Outputs(top_k=1)


class Vocabulary(Protocol):
    """The part of a tokenizer that is compared (:class:`specrag.models.tokenizer.Tokenizer`)."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""

    def token_bytes(self, token: int) -> bytes:
        """What a token stands for; nothing for a special one."""


def check_same_vocabulary(target: Vocabulary, draft: Vocabulary) -> None:
    """Check that every token means the same to both models; takes a second or two for a large vocabulary.

    Raises:
        InputError: some token differs.
    """
    remedy = "take a draft model of the target's family, which shares its vocabulary"
    if target is draft:
        return
    if target.vocab_size != draft.vocab_size:
        sizes = f"{draft.vocab_size} tokens where the target has {target.vocab_size}"
        raise InputError("draft model", sizes, remedy)
    for token in range(target.vocab_size):
        theirs, ours = target.token_bytes(token), draft.token_bytes(token)
        if theirs != ours:
            raise InputError("draft model", f"token {token} is {ours!r}, the target's {theirs!r}", remedy)


@dataclass(frozen=True, slots=True)
class Guess:
    """A token and its probability under the draft model."""

    token: int
    confidence: float


def likeliest(row: Row) -> Guess:
    """The likeliest token of a row whose top tokens were requested."""
    assert row.top_tokens is not None
    assert row.top_log_probs is not None
    return Guess(int(row.top_tokens[0]), math.exp(row.top_log_probs[0]))


def grades_of(guesses: Sequence[Guess], drawn: bool) -> tuple[int, ...]:
    """Grade by confidence, or drawn guesses by depth: a schedule reads grades and must not see what was drawn."""
    if drawn:
        return tuple(_DRAWN_GRADE + min(depth, _MOST_DEPTH) for depth in range(len(guesses)))
    return tuple(bisect(CONFIDENCES, guess.confidence) for guess in guesses)


class DraftModel:
    """A draft model that follows the target's tokens in a session of its own; guesses a chain.

    A guess is the draft model's likeliest token. Nothing is proposed beyond the draft model's context. After
    :meth:`truncate` the drafter behaves as if it had never seen the removed tokens.

    Args:
        model: the draft model, with the target's vocabulary (:func:`check_same_vocabulary`).
        max_tokens: longest chain.

    Raises:
        InputError: ``max_tokens`` is out of range.
    """

    outputs: Outputs = NOTHING
    runs_passes = True

    def __init__(self, model: SessionModel, max_tokens: int = 16) -> None:
        check_whole("max_tokens", max_tokens, remedy="give an integer, at least 1")
        self._model = model
        self._max_tokens = max_tokens
        self._session = Session(model)
        self._followed = 0  # leading tokens of the own session that are not guesses

    def start(self, session: Session, rows: Sequence[Row]) -> Coroutine[None]:
        del rows
        missing = self._missing(session)
        if missing and self._can_read(session, missing):
            yield from self._session.extend(missing)
            self._followed = len(session)

    def propose(self, session: Session, budget: int, depth: int = ANY_DEPTH) -> Coroutine[DraftTree]:
        missing = self._missing(session)
        if not self._can_read(session, missing):
            return EMPTY
        if len(missing) > FEW or not self._session.tokens:
            yield from self._session.extend(missing)
            missing = []
        # The last guess is not fed, so it needs no room.
        room = self._model.context_length - len(session) + 1
        guesses: list[Guess] = []
        while len(guesses) < min(budget, depth, self._max_tokens, room):
            rows = yield from self._session.score(DraftTree.chain(missing, DRAFT_MODEL), _TOP)
            guess = likeliest(rows[-1])
            if guess.token >= session.model.vocab_size:  # a column that pads the logits
                break
            # It is fed with the next guess, or with the target's next tokens.
            self._session.commit(range(len(missing)), guess.token)
            missing = []
            guesses.append(guess)
        self._followed = min(len(self._session), len(session))
        tokens = [guess.token for guess in guesses]
        return DraftTree.chain(tokens, DRAFT_MODEL, grades_of(guesses, drawn=False))

    def observe(self, round: Round) -> None:
        del round  # the tokens are read from the session when they are needed

    def truncate(self, length: int) -> None:
        if length < len(self._session):
            self._session.truncate(length)
        self._followed = min(self._followed, length)

    def fork(self) -> DraftModel:
        other = DraftModel(self._model, self._max_tokens)
        other._session = self._session.fork()
        other._followed = self._followed
        return other

    def close(self) -> None:
        self._session.close()
        self._followed = 0

    def _missing(self, session: Session) -> list[int]:
        """Drop the guesses that the target did not keep; return the target's tokens still to read."""
        own, right = self._session.tokens, session.tokens
        same = self._followed
        while same < min(len(own), len(right)) and own[same] == right[same]:
            same += 1
        if same < len(own):
            self._session.truncate(same)
        self._followed = same
        return right[same:]

    def _can_read(self, session: Session, missing: Sequence[int]) -> bool:
        fits = len(session) <= self._model.context_length
        return fits and max(missing, default=0) < self._model.vocab_size
