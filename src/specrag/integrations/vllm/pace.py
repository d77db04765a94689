"""How much to guess in a step, so that no step with guesses yields fewer tokens a second than one without.

That is expected, and settled: where guesses lose in fact, there are none for a while.

A step is what happens between the return of one call and the next call: scheduling, the model's pass, sampling. Its
seconds are learned apart for steps without guesses and with them, and apart by the number of rows, since a captured
graph, a kernel or a sampler may serve the one and not the other. Of all guesses of a batch the surest are kept, as many
as promise the most tokens a second, and none where a step without promises more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specrag.engine import Others, compiled
from specrag.speculation.schedule import CostModel, Line

Floats = NDArray[np.float64]

#: Steps with guesses after which one without is measured anew.
_FRESH = 128
#: Among so many steps with guesses one has half of them only: what a guess costs shows where their number differs.
_HALF = 8
#: Steps without guesses after which it is forgotten what those with some took, so that they get another chance; twice
#: as many each time that they gain nothing by it.
_STALE, _LONGEST_STALE = 256, 4096
#: Steps' worth of time that guesses may lose, and of what they won before at most so much is set against it; then none
#: for a number of steps that doubles each time.
_MOST_LOST, _MOST_WON = 3.0, 2.0
_FIRST_BREAK, _LONGEST_BREAK = 16, 512
#: Of the time without guesses, the share that looking for some may take where none paid; and the longest pause.
_LOOKING, _LONGEST_PAUSE = 0.005, 64
_SMOOTHING = 0.1

#: Why there are guesses in a step, or none.
PAYS = "pays"
NOTHING, MEASURES, COSTS, PAUSED = "nothing to copy", "measures without", "would cost", "paused"


@dataclass(slots=True)
class _Costs:
    """What is known of steps with about the same number of rows.

    Attributes:
        plain, guessed: seconds of a step without guesses and with some.
        since_plain, since_guessed: steps since one was measured.
        looking: seconds of looking for guesses.
        gain: seconds won by looking, lately, the looking taken off.
        paid: steps that were sent with guesses because they pay.
        pause: steps left in which nothing is looked for.
        won: steps' worth of time that guesses have won in fact.
        next_pause: steps without a guess when they next have lost too much.
        stale: steps without guesses after which they get another chance.
    """

    plain: CostModel = field(default_factory=CostModel)
    guessed: CostModel = field(default_factory=CostModel)
    since_plain: int = 0
    since_guessed: int = 0
    looking: float = 0.0
    gain: float = 0.0
    paid: int = 0
    pause: int = 0
    won: float = 0.0
    next_pause: int = _FIRST_BREAK
    stale: int = _STALE


class _Work(NamedTuple):
    """Rows of about the same length.

    Attributes:
        rows: their number.
        context: tokens of each.
        beside: what makes the sums of the cost model's features right for all of them.
    """

    rows: int
    context: int
    beside: Others

    @classmethod
    def of(cls, lengths: Sequence[int]) -> _Work:
        """The work of rows with so many tokens."""
        rows, tokens = len(lengths), sum(lengths)
        context = tokens // max(rows, 1)
        return cls(rows, context, Others(segments=rows - 1, context=(rows - 1) * context))


class _Sent(NamedTuple):
    """The step that runs.

    Attributes:
        lengths: tokens of each row.
        work: what is computed in it, guesses apart.
        guesses: of all rows.
        plain: seconds that were expected of it without guesses; of use where it has some.
        moment: when the call returned.
    """

    lengths: Sequence[int]
    work: _Work
    guesses: int
    plain: float
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
        self._work = _Work.of(())
        self._plain = 0.0
        self.reason = NOTHING

    def arrive(self, sampled: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
        """A call has come: learn what the step took, if it held the rows that it was sent with and no others.

        Args:
            sampled: by row the tokens that the step gave.
            lengths: tokens of each row now.
        """
        self._began = self._clock()
        sent, self._sent = self._sent, None
        if sent is None or len(sampled) != len(sent.lengths):
            return
        rows, came = len(sampled), 0
        for new, now, before in zip(sampled, lengths, sent.lengths, strict=True):
            if not new or now - len(new) != before:
                return  # a prompt was read in it, or a row has come, gone or moved
            came += len(new)
        costs = self._of(rows)
        seconds = self._began - sent.moment
        if sent.guesses:
            _settle(costs, came / rows - seconds / sent.plain)
        kind = costs.guessed if sent.guesses else costs.plain
        kind.observe(rows + sent.guesses, sent.work.context, seconds, sent.work.beside)
        if sent.guesses:
            costs.since_guessed = 0
            costs.since_plain += 1
        else:
            costs.since_plain = 0
            costs.since_guessed += 1

    def pauses(self, rows: int) -> bool:
        """Whether nothing need be looked for: it has not paid lately, and looking takes time itself."""
        costs = self._of(rows)
        if not costs.pause:
            return False
        costs.pause -= 1
        self.reason = PAUSED
        return True

    def choose(self, chances: Sequence[Floats], lengths: Sequence[int]) -> list[int]:
        """The number of guesses of each row.

        Args:
            chances: by row, float64 ``[guesses]``: that a guess and all before it are accepted; never rising.
            lengths: tokens of each row.
        """
        rows, work = len(chances), _Work.of(lengths)
        costs = self._of(rows)
        looked = self._clock() - self._began
        costs.looking += (_SMOOTHING if costs.looking else 1.0) * (looked - costs.looking)
        self._work, self._plain = work, _plain(costs, work)
        all_chances = chances[0] if rows == 1 else np.concatenate(chances)
        choice = _choice(costs, all_chances, work, self._plain)
        self.reason = choice.reason
        if choice.reason != MEASURES:
            costs.gain += _SMOOTHING * (choice.gain - costs.looking - costs.gain)
        if choice.reason in (NOTHING, COSTS):
            costs.pause = _pause(costs, self._plain)
        if choice.least > 1.0:
            return [0] * rows
        return [_count_from(own, choice.least) for own in chances]

    def leave(self, lengths: Sequence[int], guesses: int) -> None:
        """The call returns; the step begins. Guesses are those that :meth:`choose` has just counted."""
        work = self._work if guesses else _Work.of(lengths)
        self._sent = _Sent(lengths, work, guesses, self._plain, self._clock())

    def seconds(self, rows: int, context: int, guesses: int) -> float:
        """Expected seconds of a step.

        Args:
            rows: that are written.
            context: tokens of each.
            guesses: of all of them.
        """
        costs, work = self._of(rows), _Work.of([context] * rows)
        if not guesses:
            return _plain(costs, work)
        line = _guessed(costs, work)
        return line.base + line.row * (rows + guesses)

    def _of(self, rows: int) -> _Costs:
        size = rows.bit_length()
        if size not in self._costs:
            self._costs[size] = _Costs()
        return self._costs[size]


class _Choice(NamedTuple):
    """Which guesses a step has.

    Attributes:
        reason: for it.
        least: the chance that a guess must have; above 1 for none.
        gain: seconds that they are expected to win, lost if negative.
    """

    reason: str
    least: float = 2.0
    gain: float = 0.0


def _choice(costs: _Costs, chances: Floats, work: _Work, plain: float) -> _Choice:
    """The guesses of all rows that promise the most tokens a second, or none."""
    if not len(chances):
        return _Choice(NOTHING)
    if not costs.plain.measured or costs.since_plain >= _FRESH:
        return _Choice(MEASURES)
    if costs.since_guessed >= costs.stale:
        costs.guessed, costs.since_guessed = CostModel(), 0
        costs.stale = min(2 * costs.stale, _LONGEST_STALE)
    rows, line = work.rows, _guessed(costs, work)
    share = 1.0
    if not costs.guessed.measured:
        share = 0.0  # what is not known may cost much
    elif (costs.paid + 1) % _HALF == 0:
        share = 0.5
    least, gain = _surest(chances, share, rows, plain, line.base + line.row * (rows + 1), line.row)
    if gain > 0:
        costs.paid += 1
        return _Choice(PAYS, least, gain)
    return _Choice(COSTS)


def _settle(costs: _Costs, won: float) -> None:
    """Add up what guesses win in fact, in steps without; what is known of their cost is forgotten where they lose."""
    costs.won = min(costs.won + won, _MOST_WON)
    if costs.won == _MOST_WON:
        costs.next_pause, costs.stale = _FIRST_BREAK, _STALE
    if costs.won < -_MOST_LOST:
        costs.guessed, costs.won = CostModel(), 0.0
        costs.pause, costs.next_pause = costs.next_pause, min(2 * costs.next_pause, _LONGEST_BREAK)


def _pause(costs: _Costs, plain: float) -> int:
    """Steps for which nothing is looked for, so that looking where nothing pays takes next to no time."""
    if costs.gain > 0 or not costs.plain.measured:
        return 0
    return min(int(costs.looking / (_LOOKING * plain)), _LONGEST_PAUSE)


@compiled
def _surest(
    chances: Floats, share: float, rows: int, plain: float, first: float, each: float
) -> tuple[float, float]:
    """Take as many of the surest guesses as give the most tokens a second.

    Args:
        chances: of all guesses.
        share: of those guesses that are really taken; one at least.
        rows: tokens that the step gives without guesses.
        plain, first, each: seconds of a step without guesses, of one with one guess, of each further guess.

    Returns:
        The chance of the last guess taken, and the seconds that all would win against steps without guesses.
    """
    surest = np.sort(chances)[::-1]
    tokens = float(rows)
    best_rate, best, gain = 0.0, 0, 0.0
    for count in range(len(surest)):
        tokens += surest[count]
        seconds = first + count * each
        if tokens / seconds > best_rate:
            best_rate, best = tokens / seconds, count
            gain = tokens * plain / rows - seconds
    return surest[int(best * share)], gain


@compiled
def _count_from(chances: Floats, least: float) -> int:
    """How many of the falling chances are at least so large."""
    count = 0
    while count < len(chances) and chances[count] >= least:
        count += 1
    return count


def _plain(costs: _Costs, work: _Work) -> float:
    line = costs.plain.line(work.context, work.beside)
    return line.base + line.row * work.rows


def _guessed(costs: _Costs, work: _Work) -> Line:
    """Seconds of steps with guesses by all their rows; by what steps without took, until one was measured."""
    model = costs.guessed if costs.guessed.measured else costs.plain
    return model.line(work.context, work.beside)
