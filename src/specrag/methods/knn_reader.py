"""Reads the states that kNN-LM searches for: one a pass, or several where a drafter guesses the tokens between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specrag.engine.outputs import Outputs, Row
from specrag.engine.passes import Coroutine
from specrag.engine.session import Session
from specrag.retrieval.knn_manifest import HIDDEN
from specrag.speculation.decode import Speculation
from specrag.speculation.schedule import Timed
from specrag.speculation.tree import EMPTY, ROOT, DraftTree, Round, Verdict

_OUTPUTS = Outputs(logits=True, hidden=(HIDDEN,))


@dataclass(frozen=True, slots=True)
class Beside:
    """What a pass has read beside the newest token.

    Attributes:
        proposed: who guessed each token.
        followed: who guessed each of those that came.
    """

    proposed: tuple[str, ...] = ()
    followed: tuple[str, ...] = ()


class Reader:
    """Feeds a session's newest token, and with it a tree of tokens that may follow.

    The tokens that it is told to follow need not be final: kNN-LM guesses them too, and may take them back.

    Args:
        session: holds the prompt.
        speculation: whose drafter and schedule guess; ``None`` feeds one token a pass.
        clock: seconds.

    Attributes:
        reading: seconds in which the drafter read the prompt.
    """

    def __init__(self, session: Session, speculation: Speculation | None, clock: Callable[[], float]) -> None:
        self.reading = 0.0
        self._session = session
        self._speculation = speculation
        self._clock = clock
        self._outputs = _OUTPUTS if speculation is None else _OUTPUTS.union(speculation.drafter.outputs)
        self._tree: DraftTree = EMPTY
        self._proposed: DraftTree = EMPTY
        self._rows: Sequence[Row] = ()
        self._path: list[int] = []
        self._timed: Timed | None = None

    def start(self, prompt_rows: Sequence[Row]) -> Coroutine[None]:
        """Let the drafter read the prompt; ``prompt_rows`` are the answers to its method's needs."""
        if self._speculation is not None:
            began = self._clock()
            yield from self._speculation.drafter.start(self._session, prompt_rows)
            self.reading = self._clock() - began

    def read(self, most: int) -> Coroutine[Row]:
        """The row behind the newest token.

        Args:
            most: guesses that may stand behind it.
        """
        began = self._clock()
        self._proposed = self._tree = EMPTY
        if self._speculation is not None:
            yield from self._propose(self._speculation, most)
        asked = self._clock()
        self._rows = yield from self._session.score(self._tree, self._outputs)
        ended = self._clock()
        self._path = []
        self._timed = Timed(
            len(self._session), asked - began, ended - asked, ended - began, self._session.report
        )
        return self._rows[0]

    def follow(self, token: int) -> Row | None:
        """The row behind a token that follows the last row given, if it was read too."""
        node = self._tree.child(self._path[-1] if self._path else ROOT, token)
        if node is None:
            return None
        self._path.append(node)
        return self._rows[node + 1]

    def commit(self, token: int) -> Beside:
        """Add what was followed, and a token behind it that is still to be read."""
        beside = Beside(self._tree.sources, tuple(self._tree.sources[node] for node in self._path))
        self._session.commit(self._path, token)
        if self._speculation is not None:
            assert self._timed is not None
            tokens = (*(self._tree.tokens[node] for node in self._path), token)
            verdict = Verdict(tuple(self._path), token)
            round = Round(self._tree, self._rows, verdict, tokens, self._proposed)
            self._speculation.drafter.observe(round)
            self._speculation.schedule.observe(round, self._timed)
        self._tree, self._rows, self._path = EMPTY, (), []
        return beside

    def take_back(self, length: int, token: int) -> None:
        """Keep ``length`` tokens, the last of which becomes ``token`` and is still to be read."""
        self._session.truncate(length)
        self._session.tokens[-1] = token  # the cache holds what is in front of it only
        if self._speculation is not None:
            self._speculation.drafter.truncate(length - 1)

    def close(self) -> None:
        """Release what the drafter holds."""
        if self._speculation is not None:
            self._speculation.drafter.close()

    def _propose(self, speculation: Speculation, most: int) -> Coroutine[None]:
        drafter, schedule = speculation.drafter, speculation.schedule
        budget = schedule.budget(runs_passes=drafter.runs_passes)
        if budget and most > 0:
            self._proposed = yield from drafter.propose(self._session, budget, most)
        self._tree = schedule.choose(self._proposed, len(self._session))
