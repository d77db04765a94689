"""The schedule that decides guess by guess, against fixed strides in a simulated process with two kinds of guesses."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from specrag.speculation.schedule.guesses import (
    MAX_FRESH,
    CostAwareGuesses,
    CountedGuesses,
    GuessSchedule,
    SharedGuesses,
)
from specrag.speculation.schedule.strides import MAX_STRIDE, ChunkTime, FixedStride, StrideRound

PASSAGES = 3000
#: Of a chunk behind a passage that is in front of the text already, and behind another one.
SECONDS = {False: 1.0, True: 3.0}


@dataclass(frozen=True)
class World:
    """A process in which a guess is fresh now and then, and then wrong more often.

    Attributes:
        search: seconds of a search for one query; every further one costs a tenth of it.
        right: the chance that a guess is right, by whether it is fresh.
        slowed: how much longer search and decoding take together than perfect overlap, as a part of the shorter one;
            1 is one after the other.
    """

    search: float
    right: tuple[float, float]
    slowed: float
    fresh: float = 0.2

    def searched(self, queries: int) -> float:
        return self.search * (0.9 + 0.1 * queries)

    def seconds(self, schedule: GuessSchedule, passages: int = PASSAGES) -> float:
        """How long the schedule takes for so many passages."""
        rng = random.Random(1)
        clock, done = 0.0, 0
        while done < passages:
            fresh: list[bool] = []
            right: list[bool] = []
            chunks: list[ChunkTime] = []
            while True:
                fresh.append(rng.random() < self.fresh)
                right.append(rng.random() < self.right[fresh[-1]])
                if not schedule.goes_on(fresh):
                    break
                chunks.append(ChunkTime(fresh[-1], SECONDS[fresh[-1]]))
            matched = right.index(False) if False in right else len(right)
            search, last = self.searched(len(fresh)), SECONDS[fresh[-1]]
            beside = None
            if schedule.beside(fresh):
                together = max(search, last) + self.slowed * min(search, last)
                # Cut off at a pass; a prompt is read in one.
                beside = together if matched == len(fresh) else search + (1.0 if fresh[-1] else 0.25)
            taken = sum(chunk.seconds for chunk in chunks) + (beside or search)
            if beside is None or matched < len(fresh):  # then with a passage known to be right
                kind = fresh[-1] if matched == len(fresh) else not fresh[matched]
                chunks.append(ChunkTime(kind, SECONDS[kind]))
                taken += SECONDS[kind]
            mean = sum(chunk.seconds for chunk in chunks) / len(chunks) if chunks else last
            schedule.observe(
                StrideRound(len(fresh), matched, mean, search, tuple(fresh), tuple(chunks), beside)
            )
            clock += taken
            done += min(matched + 1, len(fresh))
        return clock / done


WORLDS = [
    World(search, right, slowed)
    for search, right, slowed in itertools.product(
        (0.05, 0.5, 2.0, 10.0), ((0.95, 0.5), (0.99, 0.9), (0.6, 0.2)), (0.0, 1.2)
    )
]


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_it_is_near_the_best_of_all_strides_and_never_behind_retrieval_one_by_one(world: World) -> None:
    fixed = {
        (stride, asynchronous): world.seconds(CountedGuesses(FixedStride(stride), asynchronous))
        for stride in (1, 2, 3, 4, 6, 8)
        for asynchronous in (False, True)
    }
    mine = world.seconds(CostAwareGuesses())
    assert mine < 1.05 * min(fixed.values())
    assert mine < 1.02 * fixed[1, False]


def test_a_guess_behind_another_passage_is_not_worth_reading_its_prompt() -> None:
    """Where such guesses are mostly wrong, no number of guesses a round is as good as looking at each."""
    world = World(2.0, (0.97, 0.2), slowed=1.2)
    fixed = [world.seconds(CountedGuesses(FixedStride(stride), False)) for stride in range(1, 9)]
    assert world.seconds(CostAwareGuesses()) < 0.95 * min(fixed)


def learned(world: World) -> SharedGuesses:
    shared = SharedGuesses()
    world.seconds(CostAwareGuesses(shared), 300)
    return shared


def test_nothing_is_guessed_before_anything_was_seen() -> None:
    schedule = CostAwareGuesses()
    assert not schedule.goes_on([False])
    assert not schedule.beside([False])


def test_a_request_begins_with_what_others_saw() -> None:
    assert CostAwareGuesses(learned(World(5.0, (0.99, 0.9), slowed=0.0))).goes_on([False])


def test_decoding_beside_a_search_is_given_up_where_both_share_the_cores_and_tried_again() -> None:
    shared = learned(World(1.0, (0.97, 0.5), slowed=0.0))
    assert CostAwareGuesses(shared).beside([False])
    shared.gains.extend([-0.2] * 5)  # both together took longer than one after the other
    wanted = [CostAwareGuesses(shared).beside([False]) for _ in range(2000)]
    assert 500 < wanted.index(True) < 1600  # what was seen is forgotten bit by bit


@pytest.mark.parametrize(("kind", "most"), [(False, MAX_STRIDE), (True, MAX_FRESH + 1)])
def test_a_round_is_bounded(kind: bool, most: int) -> None:
    shared = SharedGuesses()
    for _ in range(20):  # a search that costs a thousand chunks, however many queries it is for
        chunk = ChunkTime(kind, 1.0)
        CostAwareGuesses(shared).observe(StrideRound(1, 1, 1.0, 1000.0, (kind,), (chunk,)))
    schedule = CostAwareGuesses(shared)
    guesses: list[bool] = [kind]
    while schedule.goes_on(guesses):
        guesses.append(kind)
    assert len(guesses) == most


def test_guesses_behind_the_first_wrong_one_teach_nothing() -> None:
    schedule = CostAwareGuesses(shared := SharedGuesses())
    kinds: Sequence[bool] = (False, False, True, True)
    schedule.observe(StrideRound(4, 1, 1.0, 1.0, tuple(kinds)))
    assert shared.matches[False].looked_up == pytest.approx(2, rel=0.01)
    assert shared.matches[True].looked_up == 0
    assert shared.matches[False].matched == pytest.approx(1, rel=0.01)
