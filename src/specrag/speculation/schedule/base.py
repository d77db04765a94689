"""The schedule that tells the decoding loop how much to guess, and the fixed budget."""

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
        verifying: seconds of the target's pass, including waiting for others.
        total: seconds of the whole round.
        report: of the target's pass; ``None`` if the runner does not report.
    """

    context: int
    proposing: float
    verifying: float
    total: float
    report: PassReport | None = None

    @property
    def computing(self) -> float:
        """Seconds of the target's pass, excluding time spent waiting for others if that is known."""
        return self.verifying if self.report is None else self.report.seconds

    @property
    def others(self) -> Others:
        """What was computed beside this request's rows, as far as it is known."""
        return Others() if self.report is None else self.report.others

    @property
    def writing(self) -> Others:
        """The part of the others that is decoding; the rest read their prompts and may be gone in the next pass."""
        return Others() if self.report is None else self.report.writing

    @property
    def mixed(self) -> bool:
        """Whether some of the others read prompts."""
        return self.others.segments > self.writing.segments


class Estimates(Protocol):
    """What a cost-aware schedule expects of guesses before they are made, so that hopeless ones are not proposed."""

    def rate(self, source: str, grade: int) -> float:
        """The chance that a guess of this kind is accepted, given that its parent is."""

    def least_chance(self) -> float:
        """A guess whose whole path is less likely than this is not worth its row in the next pass."""

    def prefers(self, tree: DraftTree) -> bool:
        """Whether verifying this proposal promises at least the tokens per second of a drafter that runs passes."""

    def note_drafted(self, guessed: DraftTree) -> None:
        """Learn what a drafter that ran passes guessed, when the proposal also holds guesses of others."""


class TokenSchedule(Protocol):
    """Chooses how much to guess, for one request. It changes the time an output takes, never the output."""

    def budget(self, *, runs_passes: bool) -> int:
        """The maximum number of nodes worth proposing in the next round; 0 for plain decoding.

        Args:
            runs_passes: whether the proposal itself costs passes.
        """

    def choose(self, tree: DraftTree, context: int) -> DraftTree:
        """The part of a proposal that is worth verifying after ``context`` tokens.

        For drafts that were drawn at random, the choice may depend only on what was fixed before they were drawn,
        such as their sources and depths; otherwise the law of the output changes.
        """

    def observe(self, round: Round, timed: Timed) -> None:
        """Learn what the last round gained and cost."""


class FixedBudget:
    """The same budget in every round; every proposal is verified in full.

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
