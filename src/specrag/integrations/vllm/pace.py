"""How much to guess in a step, so that no step with guesses yields fewer tokens a second than one without.

A step is what happens between the return of one call and the next call: scheduling, the model's pass, sampling. Its
seconds are learned apart for steps without guesses and with them, and apart by the number of rows, since a captured
graph, a kernel or a sampler may serve the one and not the other. Of all guesses of a batch the surest are kept, as many
as promise the most tokens a second, and none where a step without promises more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specrag.engine import Others
from specrag.engine.compiling import compiled
from specrag.speculation.schedule import CostModel

Floats = NDArray[np.float64]

#: Steps with guesses after which one without is measured anew.
_FRESH = 128
#: Of the time without guesses, the share that may be lost by trying some of which no gain is expected.
_TRYING, _MOST_TRYING = 0.005, 0.5
#: Steps after which the seconds of steps with guesses are no longer trusted to rule them out.
_STALE = 256
#: Of the time without guesses, the share that looking for some may take where none paid; and the longest pause.
_LOOKING, _LONGEST_PAUSE = 0.005, 64
_SMOOTHING = 0.1

#: Why there are guesses in a step, or none.
PAYS, TRIES = "pays", "tries"
NOTHING, MEASURES, COSTS, RESTS = "nothing to copy", "measures without", "would cost", "rests"


@dataclass(slots=True)
class _Costs:
    """What is known of steps with about the same number of rows.

    Attributes:
        plain, guessed: seconds of a step without guesses and with some.
        since_plain, since_guessed: steps since one was measured.
        looking: seconds of looking for guesses.
        gain: seconds won by looking, lately, the looking taken off.
        pause: steps left in which nothing is looked for.
        credit: seconds that may be lost by trying.
    """

    plain: CostModel = field(default_factory=CostModel)
    guessed: CostModel = field(default_factory=CostModel)
    since_plain: int = 0
    since_guessed: int = 0
    looking: float = 0.0
    gain: float = 0.0
    pause: int = 0
    credit: float = 0.0


@dataclass(slots=True, eq=False)
class _Sent:
    """The step that runs.

    Attributes:
        lengths: int64 ``[rows]``, tokens of each row.
        guesses: of all rows.
        moment: when the call returned.
    """

    lengths: NDArray[np.int64]
    guesses: int
    moment: float


class Pace:
    """Chooses the length of each row's guess; learns from the time between calls.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._costs: dict[int, _Costs] = {}  # by the number of rows, in powers of two
        self._sent: _Sent | None = None
        self._began = 0.0
        self.reason = NOTHING

    def arrive(self, sampled: Sequence[Sequence[int]], lengths: NDArray[np.int64]) -> None:
        """A call has come: learn what the step took, if it held the rows that it was sent with and no others.

        Args:
            sampled: by row the tokens that the step gave.
            lengths: int64 ``[rows]``, tokens of each row now.
        """
        self._began = self._clock()
        sent, self._sent = self._sent, None
        if sent is None or len(sampled) != len(sent.lengths):
            return
        new = np.fromiter(map(len, sampled), np.int64, len(sampled))
        if not new.all() or not np.array_equal(lengths - new, sent.lengths):
            return  # a prompt was read in it, or a row has come, gone or moved
        costs = self._of(len(sampled))
        seconds = self._began - sent.moment
        kind = costs.guessed if sent.guesses else costs.plain
        rows, context, others = _shape(sent.lengths)
        kind.observe(int(rows) + sent.guesses, context, seconds, others)
        if sent.guesses:
            costs.since_guessed = 0
            costs.since_plain += 1
        else:
            costs.since_plain = 0
            costs.since_guessed += 1

    def rests(self, rows: int) -> bool:
        """Whether nothing need be looked for: it has not paid lately, and looking takes time itself."""
        costs = self._of(rows)
        if not costs.pause:
            return False
        costs.pause -= 1
        self.reason = RESTS
        return True

    def choose(self, chances: Sequence[Floats], lengths: NDArray[np.int64]) -> list[int]:
        """The number of guesses of each row.

        Args:
            chances: by row, float64 ``[guesses]``: that a guess and all before it are accepted; never rising.
            lengths: int64 ``[rows]``, tokens of each row.
        """
        costs = self._of(len(chances))
        looked = self._clock() - self._began
        costs.looking += (_SMOOTHING if costs.looking else 1.0) * (looked - costs.looking)
        choice = _choice(costs, np.concatenate(chances), lengths)
        self.reason = choice.reason
        if choice.reason != MEASURES:
            costs.gain += _SMOOTHING * (choice.gain - costs.looking - costs.gain)
        if choice.reason in (NOTHING, COSTS):
            costs.pause = _pause(costs, lengths)
        if choice.least > 1.0:
            return [0] * len(chances)
        return [_count_from(own, choice.least) for own in chances]

    def leave(self, lengths: NDArray[np.int64], guesses: int) -> None:
        """The call returns; the step begins."""
        self._sent = _Sent(lengths, guesses, self._clock())

    def seconds(self, rows: int, context: int, guesses: int) -> float:
        """Expected seconds of a step.

        Args:
            rows: that are written.
            context: tokens of each.
            guesses: of all of them.
        """
        costs = self._of(rows)
        lengths = np.full(rows, context, dtype=np.int64)
        return float(_guessed(costs, lengths, np.array([guesses]))[0]) if guesses else _plain(costs, lengths)

    def _of(self, rows: int) -> _Costs:
        size = rows.bit_length()
        if size not in self._costs:
            self._costs[size] = _Costs()
        return self._costs[size]


@dataclass(frozen=True, slots=True)
class _Choice:
    """Which guesses a step has.

    Attributes:
        reason: for it.
        least: the chance that a guess must have; above 1 for none.
        gain: seconds that they are expected to win, lost if negative.
    """

    reason: str
    least: float = 2.0
    gain: float = 0.0


def _choice(costs: _Costs, chances: Floats, lengths: NDArray[np.int64]) -> _Choice:
    """The guesses of all rows that promise the most tokens a second, or none."""
    if not len(chances):
        return _Choice(NOTHING)
    if not costs.plain.measured or costs.since_plain >= _FRESH:
        return _Choice(MEASURES)
    plain = _plain(costs, lengths)
    first, last = _guessed(costs, lengths, np.array([1, len(chances)]))
    each = (last - first) / max(len(chances) - 1, 1)
    least, gain = _surest(np.sort(chances)[::-1], len(lengths), plain, first, each)
    if gain > 0:
        return _Choice(PAYS, least, gain)
    costs.credit = min(costs.credit + _TRYING * plain, _MOST_TRYING * plain)
    if costs.since_guessed >= _STALE and -gain <= costs.credit:
        costs.credit += gain
        return _Choice(TRIES, least, gain)
    return _Choice(COSTS)


def _pause(costs: _Costs, lengths: NDArray[np.int64]) -> int:
    """Steps for which nothing is looked for, so that looking where nothing pays takes next to no time."""
    if costs.gain > 0 or not costs.plain.measured:
        return 0
    allowed = _LOOKING * _plain(costs, lengths)
    return min(int(costs.looking / allowed), _LONGEST_PAUSE)


@compiled
def _surest(chances: Floats, rows: int, plain: float, first: float, each: float) -> tuple[float, float]:
    """How many of the guesses to take for the most tokens a second.

    Args:
        chances: of all guesses, falling.
        rows: tokens that the step gives without guesses.
        plain, first, each: seconds of a step without guesses, of one with one guess, of each further guess.

    Returns:
        The chance of the last guess taken, at least one, and the seconds won against steps without guesses.
    """
    tokens = float(rows)
    best_rate, least, gain = 0.0, 1.0, 0.0
    for count in range(len(chances)):
        tokens += chances[count]
        seconds = first + count * each
        if tokens / seconds > best_rate:
            best_rate, least = tokens / seconds, chances[count]
            gain = tokens * plain / rows - seconds
    return least, gain


@compiled
def _count_from(chances: Floats, least: float) -> int:
    """How many of the falling chances are at least so large."""
    count = 0
    while count < len(chances) and chances[count] >= least:
        count += 1
    return count


def _shape(lengths: NDArray[np.int64]) -> tuple[int, int, Others]:
    """Rows and mean context of a step, and what makes the sums of the cost model's features right."""
    rows = len(lengths)
    context = int(lengths.sum()) // rows
    return rows, context, Others(segments=rows - 1, context=(rows - 1) * context)


def _plain(costs: _Costs, lengths: NDArray[np.int64]) -> float:
    rows, context, others = _shape(lengths)
    return float(costs.plain.seconds(rows, context, others))


def _guessed(costs: _Costs, lengths: NDArray[np.int64], guesses: NDArray[np.int64]) -> Floats:
    """Seconds of steps with so many guesses; by what steps without took, until one with some was measured."""
    rows, context, others = _shape(lengths)
    model = costs.guessed if costs.guessed.measured else costs.plain
    return model.seconds(rows + guesses, context, others)
