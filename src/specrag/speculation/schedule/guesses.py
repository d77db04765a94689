"""Schedules for guesses of passages, one by one: whether to decode after a guess, and beside which search."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

from specrag.speculation.schedule.cost_model import StrideCosts, passages_per_second
from specrag.speculation.schedule.strides import (
    MAX_STRIDE,
    SHARED_WEIGHT,
    Matches,
    StrideRound,
    StrideSchedule,
    wilson_lower_bound,
)

#: Maximum number of prompts read for guesses in a round, since each is kept until the round's search has decided.
MAX_FRESH = 4
_RECENT = 5
#: Number of times that decoding beside a search is declined before the oldest experience with it is forgotten. With
#: none left it is tried again: the machine's other load may be gone.
_PATIENCE = 256


class GuessSchedule(Protocol):
    """One request's decisions about guesses. They change the time an output takes, never the output.

    Both questions are about the newest guess of a round. ``fresh`` has an entry for each guess so far: whether its
    passage is not in front of the text yet, so that a prompt has to be read before anything is decoded after it.
    """

    def goes_on(self, fresh: Sequence[bool]) -> bool:
        """Whether to decode after the newest guess and to guess again; otherwise the round's search begins."""

    def beside(self, fresh: Sequence[bool]) -> bool:
        """Whether to decode after the newest guess while the search runs."""

    def observe(self, round: StrideRound) -> None:
        """Learn what the last round gained and cost."""


class CountedGuesses:
    """A stride schedule as a guess schedule: a given number of guesses per round, whatever they are.

    Args:
        strides: how many.
        asynchronous: decode after the last one while the search runs.
    """

    def __init__(self, strides: StrideSchedule, asynchronous: bool) -> None:
        self._strides = strides
        self._asynchronous = asynchronous
        self._stride = 1

    def goes_on(self, fresh: Sequence[bool]) -> bool:
        if len(fresh) == 1:
            self._stride = self._strides.next()
        return len(fresh) < self._stride

    def beside(self, fresh: Sequence[bool]) -> bool:
        del fresh
        return self._asynchronous

    def observe(self, round: StrideRound) -> None:
        self._strides.observe(round)


def _recent_by_kind() -> dict[bool, deque[float]]:
    return {True: deque(maxlen=_RECENT), False: deque(maxlen=_RECENT)}


@dataclass
class SharedGuesses:
    """Costs and match rates that all requests of a method learn together; they change no output.

    Attributes:
        costs: of steps and searches.
        matches: of fresh guesses and of the others.
        chunks: seconds of look-up and decoding after a fresh guess and after another, newest last.
        gains: from decoding beside a search, as a share of perfect overlap; below 0 if both slow each other down.
        losses: seconds by which a wrong guess decoded beside the search prolonged its round, by whether it was fresh.
        declined: how often decoding beside a search was declined.
    """

    costs: StrideCosts = field(default_factory=StrideCosts)
    matches: dict[bool, Matches] = field(default_factory=lambda: {True: Matches(), False: Matches()})
    chunks: dict[bool, deque[float]] = field(default_factory=_recent_by_kind)
    gains: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    losses: dict[bool, deque[float]] = field(default_factory=_recent_by_kind)
    declined: int = 0


class CostAwareGuesses:
    """Decodes after a guess only if that is expected to save time, given the cost of guesses, prompts and searches.

    OS3 treats all guesses of a request as equally likely and equally expensive. They are not. If the passage already
    stands in front of the text, decoding costs a few tokens; for another passage the prompt is read first, which costs
    several times as much, and such a guess is wrong more often.

    Sequential retrieval spends ``c + b(1)`` seconds on a passage: a chunk and a search. A right guess saves that
    much; decoding after it takes ``c``, and its query ``b(s + 1) - b(s)`` more. So a round continues as long as the
    chance that all of its guesses are right, times what another one saves, exceeds what it costs, times the speed-up
    that the best stride promises: that is what the time could achieve otherwise.

    Decoding beside the search saves ``b + c`` minus the time that both take together if all guesses are right, and
    prolongs the round otherwise. The joint time is measured: on cores that search and model share it can exceed the
    sum.

    Each chance is the lower end of Wilson's interval at one standard error, as in
    :class:`~specrag.speculation.schedule.strides.OS3` without a cap; a new request begins with what earlier ones saw.

    Args:
        shared: what requests learn together; by default a request learns alone.
    """

    def __init__(self, shared: SharedGuesses | None = None) -> None:
        self._shared = shared or SharedGuesses()
        self._own = {fresh: before.diluted(SHARED_WEIGHT) for fresh, before in self._shared.matches.items()}

    def goes_on(self, fresh: Sequence[bool]) -> bool:
        costs = self._shared.costs
        chunk = self._chunk(fresh[-1])
        if len(fresh) >= MAX_STRIDE or sum(fresh) > MAX_FRESH or chunk is None or not costs.measured:
            return False
        search = costs.verification(len(fresh) + 1)
        earned = self._all_right(fresh) * (chunk + search[0])
        taken = chunk + search[-1] - search[-2]
        return bool(earned > taken * self._promised())

    def beside(self, fresh: Sequence[bool]) -> bool:
        shared, kind = self._shared, fresh[-1]
        chunk = self._chunk(kind)
        if chunk is None or sum(fresh) > MAX_FRESH or not shared.costs.measured:
            return False
        search = float(shared.costs.verification(len(fresh))[-1])
        gain = (median(shared.gains) if shared.gains else 1.0) * min(chunk, search)
        # Before any was seen: half of the chunk has been decoded when the search is done, and is wasted.
        loss = median(shared.losses[kind]) if shared.losses[kind] else chunk / 2
        chance = self._all_right(fresh)
        worth = chance * gain > (1.0 - chance) * loss
        if not worth:
            shared.declined += 1
            if shared.declined % _PATIENCE == 0:
                for seen in (shared.gains, *shared.losses.values()):
                    if seen:
                        seen.popleft()
        return worth

    def observe(self, round: StrideRound) -> None:
        shared = self._shared
        for place, fresh in enumerate(round.fresh[: round.matched + 1]):
            for matches in (shared.matches[fresh], self._own[fresh]):
                matches.add(1, int(place < round.matched))
        for chunk in round.chunks:
            shared.chunks[chunk.fresh].append(chunk.seconds)
        if round.beside_seconds is None:
            # A search beside decoding tells what both take together, not what it takes alone.
            shared.costs.observe(round.stride, round.speculation_seconds, round.verification_seconds)
        elif shared.costs.measured:
            self._learn_beside(round, round.beside_seconds)

    def _learn_beside(self, round: StrideRound, seconds: float) -> None:
        shared, kind = self._shared, round.fresh[-1]
        search = float(shared.costs.verification(round.stride)[-1])
        chunk = self._chunk(kind)
        if round.matched < round.stride:
            shared.losses[kind].append(max(seconds - search, 0.0))
        elif chunk is not None:
            shared.gains.append((search + chunk - seconds) / min(search, chunk))

    def _chunk(self, fresh: bool) -> float | None:
        """Seconds of a chunk of this kind, or of the other kind if none was seen; ``None`` before any was seen."""
        seen = self._shared.chunks[fresh] or self._shared.chunks[not fresh]
        return median(seen) if seen else None

    def _all_right(self, fresh: Sequence[bool]) -> float:
        chance = 1.0
        for kind in fresh:
            own = self._own[kind]
            chance *= wilson_lower_bound(own.matched, own.looked_up) if own.looked_up else 0.0
        return chance

    def _promised(self) -> float:
        """The speed-up of the best stride over sequential retrieval if all guesses were alike; at least 1."""
        costs, own = self._shared.costs, self._own.values()
        looked_up = sum(matches.looked_up for matches in own)
        match = wilson_lower_bound(sum(matches.matched for matches in own), looked_up) if looked_up else 0.0
        step, search = costs.step(), costs.verification(MAX_STRIDE)
        rates = passages_per_second(match, step, search, asynchronous=False)
        return float(rates.max()) * (step + float(search[0]))
