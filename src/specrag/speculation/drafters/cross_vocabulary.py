"""A draft model with a different vocabulary: its text is verified as tokens of the target.

String-level exact match of Timor et al. (2025), arXiv 2502.05202: draft tokens are decoded, the text is encoded in
the target's vocabulary, and the resulting tokens are verified as a deterministic draft. The only requirement is that
both vocabularies can spell the text.
"""

from __future__ import annotations

import math
from bisect import bisect, bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from specrag.checks import check_whole
from specrag.engine import NOTHING, Coroutine, Outputs, Row, Session, SessionModel
from specrag.errors import InputError
from specrag.speculation.drafters.base import ANY_DEPTH
from specrag.speculation.drafters.draft_model import CONFIDENCES, DRAFT_MODEL, FEW, likeliest
from specrag.speculation.tree import EMPTY, DraftTree, Round
from specrag.speculation.vocabularies import Continuation, FollowedText, VocabularyPair

#: The last token of a draft gets its own grades, starting here: more text might turn it into another token.
_OPEN_GRADE = len(CONFIDENCES) + 1
_TOP = Outputs(top_k=1)


@dataclass(slots=True)
class _Draft:
    """What the draft model wrote in a round.

    Attributes:
        data: the bytes of its tokens.
        starts: where each token begins in those bytes.
        confidences: the probability of each token.
        ended: its last token ends the text.
    """

    data: bytes = b""
    starts: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    ended: bool = False

    def add(self, piece: bytes, confidence: float) -> None:
        self.starts.append(len(self.data))
        self.confidences.append(confidence)
        self.data += piece


class CrossVocabulary:
    """A draft model that reads and writes the target's text in its own tokens; guesses a chain.

    A guess is the draft model's likeliest token. Drafting stops when the text yields as many target tokens as were
    asked for, at a special token, or at the end of the draft model's context; nothing is proposed beyond that. After
    :meth:`truncate` the drafter behaves as if it had never seen the removed tokens.

    Args:
        model: the draft model.
        pair: the two vocabularies (:func:`~specrag.speculation.vocabularies.check_alignment`).
        max_tokens: maximum number of draft model guesses per round, in its own tokens.
        min_confidence: end a draft after a token whose draft model probability is lower than this; 0: never.

    Raises:
        InputError: a value is out of range.
    """

    outputs: Outputs = NOTHING
    runs_passes = True

    def __init__(
        self,
        model: SessionModel,
        pair: VocabularyPair,
        max_tokens: int = 16,
        min_confidence: float = 0.0,
    ) -> None:
        check_whole("max_tokens", max_tokens, remedy="give an integer, at least 1")
        if not 0 <= min_confidence <= 1:
            raise InputError("min_confidence", min_confidence, "give a probability, 0 for no early end")
        self._model = model
        self._pair = pair
        self._max_tokens = max_tokens
        self._min_confidence = min_confidence
        self._session = Session(model)
        self._text = FollowedText(pair)
        self._followed = 0  # leading tokens of the own session that are settled tokens of the text

    def start(self, session: Session, rows: Sequence[Row]) -> Coroutine[None]:
        del rows
        missing = self._missing(session)
        if missing and self._can_read(missing):
            yield from self._session.extend(missing)

    def propose(self, session: Session, budget: int, depth: int = ANY_DEPTH) -> Coroutine[DraftTree]:
        missing = self._missing(session)
        if not self._can_read(missing):
            return EMPTY
        if len(missing) > FEW or not self._session.tokens:
            yield from self._session.extend(missing)
            missing = []
        budget = min(budget, depth)
        behind = Continuation(self._pair.target, session.tokens)
        draft = _Draft()
        found: list[int] = []
        while len(found) < budget and len(draft.starts) < self._max_tokens and behind.fits(draft.data):
            if len(self._session) + len(missing) > self._model.context_length:
                break
            rows = yield from self._session.score(DraftTree.chain(missing, DRAFT_MODEL), _TOP)
            guess = likeliest(rows[-1])
            piece = self._pair.draft.token_bytes(guess.token)
            if not piece:  # special, or a column that pads the logits
                end = self._pair.ends.get(guess.token)
                if end is not None and behind.spells(found, draft.data):
                    draft.add(b"", guess.confidence)
                    draft.ended = True
                    found.append(end)
                break
            # Fed with the next guess, or with the target's next tokens.
            self._session.commit(range(len(missing)), guess.token)
            missing = []
            draft.add(piece, guess.confidence)
            found = behind.tokens(draft.data)
            if guess.confidence < self._min_confidence:
                break
        tokens = list(takewhile(session.model.vocab_size.__gt__, found[:budget]))
        return DraftTree.chain(tokens, DRAFT_MODEL, self._grades(found, behind, draft)[: len(tokens)])

    def observe(self, round: Round) -> None:
        del round  # the tokens are read from the session when they are needed

    def truncate(self, length: int) -> None:
        self._text.truncate(length)
        self._followed = min(self._followed, self._text.settled)

    def fork(self) -> CrossVocabulary:
        other = CrossVocabulary(self._model, self._pair, self._max_tokens, self._min_confidence)
        other._session = self._session.fork()
        other._text = self._text.fork()
        other._followed = self._followed
        return other

    def close(self) -> None:
        self._session.close()
        self._text = FollowedText(self._pair)
        self._followed = 0

    def _missing(self, session: Session) -> list[int]:
        """Drop own tokens that the text no longer holds or now spells differently; return the tokens still to read."""
        self._text.follow(session.tokens)
        own, right = self._session.tokens, self._text.tokens
        same = self._followed
        while same < min(len(own), len(right)) and own[same] == right[same]:
            same += 1
        if same < len(own):
            self._session.truncate(same)
        self._followed = min(same, self._text.settled)
        return right[same:]

    def _can_read(self, missing: Sequence[int]) -> bool:
        fits = 0 < len(self._text.tokens) <= self._model.context_length
        return fits and max(missing, default=0) < self._model.vocab_size

    def _grades(self, found: Sequence[int], behind: Continuation, draft: _Draft) -> list[int]:
        """The class of each token, by the probability of the draft model's tokens that begin in it."""
        grades: list[int] = []
        seen, place = 0, len(behind.pending)
        for count, token in enumerate(found, start=1):
            place += len(self._pair.target.token_bytes(token))
            upto = bisect_left(draft.starts, place) if count < len(found) else len(draft.starts)
            grades.append(bisect(CONFIDENCES, math.prod(draft.confidences[seen:upto])))
            seen = upto
        if grades and not draft.ended:
            grades[-1] += _OPEN_GRADE
        return grades
