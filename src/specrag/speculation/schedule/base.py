"""The schedule that the decoding loop asks how much to guess, and the fixed budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from specrag.checks import check_whole
from specrag.engine import Others, PassReport
from specrag.speculation.tree import DraftTree, Round


@dataclass(frozen=True, slots=True)
class Timed:
    """Timing of one round.

    Attributes:
        context: tokens of the session when the round began.
        proposing: seconds until the part of the proposal worth verifying was known.
        verifying: seconds of the target's pass, waiting for others included.
        total: seconds of the whole round.
        report: of the target's pass; ``None`` where whoever ran it does not tell.
    """

    context: int
    proposing: float
    verifying: float
    total: float
    report: PassReport | None = None

    @property
    def computing(self) -> float:
        """Seconds of the target's pass, without waiting for others where that is known."""
        return self.verifying if self.report is None else self.report.seconds

    @property
    def others(self) -> Others:
        """What was computed beside this request's rows, as far as that is known."""
        return Others() if self.report is None else self.report.others

    @property
    def writing(self) -> Others:
        """Those of the others that write; the rest read their prompts, and may be gone in the next pass."""
        return Others() if self.report is None else self.report.writing

    @property
    def mixed(self) -> bool:
        """Whether some of the others read prompts."""
        return self.others.segments > self.writing.segments


class Estimates(Protocol):
    """What a cost-aware schedule expects of guesses before they are made: what cannot pay need not be proposed."""

    def rate(self, source: str, grade: int) -> float:
        """The chance that a guess of this kind is accepted, given that its parent is."""

    def least_chance(self) -> float:
        """A guess whose whole path is less likely than this is not worth its row in the next pass."""

    def prefers(self, tree: DraftTree) -> bool:
        """Whether to verify this proposal promises at least the tokens a second of a drafter that runs passes."""

    def note_drafted(self, guessed: DraftTree) -> None:
        """Learn what a drafter that ran passes guessed, where a proposal holds others' guesses beside it."""


class TokenSchedule(Protocol):
    """Chooses how much to guess, for one request. It changes an output's time, never the output."""

    def budget(self, *, runs_passes: bool) -> int:
        """The most nodes worth proposing in the next round; 0 for plain decoding.

        Args:
            runs_passes: whether the proposal itself costs passes.
        """

    def choose(self, tree: DraftTree, context: int) -> DraftTree:
        """The part of a proposal that is worth verifying behind ``context`` tokens.

        For drafts that were drawn at random the choice may depend on what was fixed before they were drawn only,
        such as their sources and depths; else the law of the output changes.
        """

    def observe(self, round: Round, timed: Timed) -> None:
        """Learn what the last round gave and took."""


class FixedBudget:
    """The same budget in every round, and all of a proposal is verified.

    Args:
        tokens: the budget, 0 for plain decoding.
    """

    def __init__(self, tokens: int) -> None:
        check_whole("budget", tokens, 0, remedy="give the number of tokens to guess, 0 for none")
        self._tokens = tokens

    def budget(self, *, runs_passes: bool) -> int:
        del runs_passes
        return self._tokens

    def choose(self, tree: DraftTree, context: int) -> DraftTree:
        del context
        return tree

    def observe(self, round: Round, timed: Timed) -> None:
        del round, timed
