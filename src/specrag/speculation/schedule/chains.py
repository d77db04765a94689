"""How long a chain to guess if every token needs the drafter's distribution (RAPID at eta > 0)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specrag.checks import check_whole
from specrag.speculation.schedule.base import Timed
from specrag.speculation.schedule.cost_model import CostModel
from specrag.speculation.tree import DraftTree, Round

_SMOOTHING = 0.1
#: Assumed acceptance of a copy before one was tried, and the rate at which it drifts back while none is tried.
_COPY_RATE, _DRIFT = 0.85, 0.02


@dataclass
class ChainCosts:
    """Costs and acceptance that all requests of a method learn together; they change no output.

    Attributes:
        passes: cost of the target's passes.
        draft_seconds: of one pass of the drafter; 0 before the first.
        rate: acceptance of a guess, given that the one before it was accepted.
        copy_rate: the same for a copied token.
    """

    passes: CostModel = field(default_factory=CostModel)
    draft_seconds: float = 0.0
    rate: float = 0.7
    copy_rate: float = _COPY_RATE


class ChainLength:
    """Picks the chain length with the most expected tokens per second, counting a drafter pass after the last guess.

    Unlike other schedules it never leaves the drafter out, since every token needs its opinion: it changes only how
    many tokens a round has. It leaves nothing out of a proposal either.

    Args:
        costs: shared.
        most: longest chain of guesses.
        most_copies: tokens that may be copied in one round, 0 if the drafter does not copy.
        source: guesses of this source cost a pass each; all others are copies, which cost one pass together.
    """

    def __init__(self, costs: ChainCosts, most: int, most_copies: int, source: str) -> None:
        check_whole("gamma", most, remedy="give the number of tokens to guess, at least 1")
        self._costs = costs
        self._most = most
        self._most_copies = most_copies
        self._source = source
        self._context = 0

    @property
    def length(self) -> int:
        """The number of guesses that pays best."""
        return self._guesses().tokens if self._costs.draft_seconds else self._most

    @property
    def copies(self) -> int:
        """The number of copies that pays best; 0 if guesses pay better."""
        if not self._costs.draft_seconds or not self._most_copies:
            return self._most_copies
        costs, counts = self._costs, np.arange(1, self._most_copies + 1)
        verifying = costs.passes.seconds(counts + 1, self._context)
        # The drafter's pass grows with its rows as the target's does.
        drafting = costs.draft_seconds * verifying / costs.passes.seconds(1, self._context)
        best = _best(costs.copy_rate, counts, drafting + verifying)
        return best.tokens if best.rate >= self._guesses().rate else 0

    def budget(self, *, runs_passes: bool) -> int:
        del runs_passes
        return max(self.length, self.copies)

    def _guesses(self) -> _Best:
        costs, counts = self._costs, np.arange(1, self._most + 1)
        seconds = (counts + 1) * costs.draft_seconds + costs.passes.seconds(counts + 1, self._context)
        return _best(costs.rate, counts, seconds)

    def choose(self, tree: DraftTree, context: int) -> DraftTree:
        self._context = context
        return tree

    def observe(self, round: Round, timed: Timed) -> None:
        costs, drafted = self._costs, len(round.tree)
        costs.passes.observe(1 + drafted, timed.context, timed.computing, timed.others, mixed=timed.mixed)
        accepted = len(round.verdict.path)
        tried = accepted + (accepted < drafted)
        if drafted and round.tree.sources[0] != self._source:
            step = 1.0 - (1.0 - _SMOOTHING) ** tried
            costs.copy_rate += step * (accepted / tried - costs.copy_rate)
            return
        costs.copy_rate += _DRIFT * (_COPY_RATE - costs.copy_rate)
        each = timed.proposing / (drafted + 1)
        costs.draft_seconds += (_SMOOTHING if costs.draft_seconds else 1.0) * (each - costs.draft_seconds)
        if tried:
            step = 1.0 - (1.0 - _SMOOTHING / 2) ** tried
            costs.rate += step * (accepted / tried - costs.rate)


class _Best(NamedTuple):
    """A number of tokens, and the expected tokens per second with it."""

    tokens: int
    rate: float


def _best(acceptance: float, counts: NDArray[np.int64], seconds: NDArray[np.float64]) -> _Best:
    rates = (1.0 + np.cumsum(acceptance**counts)) / seconds
    place = int(np.argmax(rates))
    return _Best(int(counts[place]), float(rates[place]))
