"""A RAG drafter that reads and writes tokens of its own vocabulary."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from specrag.engine.outputs import NOTHING, Outputs, Row
from specrag.engine.passes import Coroutine, SessionModel
from specrag.engine.session import Session
from specrag.errors import InputError
from specrag.speculation.drafters.base import ANY_DEPTH, Stopwatch
from specrag.speculation.drafters.cross_vocabulary import CrossVocabulary
from specrag.speculation.tree import DraftTree, Round
from specrag.speculation.vocabularies import VocabularyPair


class TranslatedRagDrafter:
    """A RAG drafter of another vocabulary; without opinions, so for the target's own text (eta = 0) only.

    Args:
        model: the drafter's model.
        pair: the two vocabularies.
        reading: what it reads in place of the target's prompt, in its own tokens.
        max_tokens: most guesses of the draft model in a round, in its own tokens.
        min_confidence: end a draft behind a token that the draft model gives a smaller probability; 0: never.
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
        """See :class:`~specrag.speculation.drafters.base.Drafter`; the first call is where the output begins."""
        del rows
        if self._first is None:
            self._first = len(session)
        yield from ()

    def propose(self, session: Session, budget: int, depth: int = ANY_DEPTH) -> Coroutine[DraftTree]:
        """See :class:`~specrag.speculation.drafters.base.Drafter`."""
        output = self._output_of(session)
        if not self._read:
            self._read = True
            yield from self._watch.timed(self._drafter.start(output, ()))
        return (yield from self._drafter.propose(output, budget, depth))

    def observe(self, round: Round) -> None:
        """See :class:`~specrag.speculation.drafters.base.Drafter`."""
        self._drafter.observe(round)

    def truncate(self, length: int) -> None:
        """See :class:`~specrag.speculation.drafters.base.Drafter`."""
        if self._first is not None:
            self._first = min(self._first, length)
            self._drafter.truncate(length - self._first)

    def fork(self) -> TranslatedRagDrafter:
        """See :class:`~specrag.speculation.drafters.base.Drafter`."""
        other = copy.copy(self)
        other._drafter = self._drafter.fork()
        return other

    def close(self) -> None:
        """See :class:`~specrag.speculation.drafters.base.Drafter`."""
        self._drafter.close()

    def _output_of(self, session: Session) -> Session:
        """The output as a session of its own, of which a drafter reads the tokens and nothing else."""
        assert self._first is not None, "start comes first"
        return Session(session.model, session.cache, session.tokens[self._first :])
