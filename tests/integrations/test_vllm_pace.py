"""How much the proposer for vLLM guesses: never so much that a step yields fewer tokens a second than without."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from specrag.integrations.vllm.pace import MEASURES, NOTHING, PAUSED, PAYS, Pace
from tests.integrations.vllm_batches import Asked, Engine, config

Seconds = Callable[[int, int, int], float]


def cpu(rows: int, guesses: int, reading: int) -> float:
    """Of two cores: a row beyond the first costs a fifth of a step."""
    return 0.02 + 0.004 * (rows + guesses) + 0.1 * reading


def gpu(rows: int, guesses: int, reading: int) -> float:
    """A step with guesses leaves the captured graph; rows are nearly free up to many."""
    return 0.010 + 0.002 * (guesses > 0) + 0.00002 * max(rows + guesses - 64, 0) + 0.05 * reading


def dear(rows: int, guesses: int, reading: int) -> float:
    """Every guess costs a whole step."""
    return 0.02 * (rows + guesses) + 0.05 * reading


def _requests(kind: str, count: int, random: np.random.Generator) -> list[Asked]:
    """Answers that quote their prompt, that do so by chance for a token or two, or both in turns."""
    made = []
    for number in range(count):
        prompt = random.integers(0, 60, 300).tolist()
        quoted = prompt[100:160] * 3
        drawn = random.integers(0, 60, 180).tolist()
        mixed = [*quoted[:60], *drawn[:60], *quoted[60:120]]
        answer = {"quoting": quoted, "drawn": drawn, "mixed": mixed}[kind]
        made.append(Asked(str(number), prompt, answer))
    return made


class Silent(Engine):
    """vLLM without a proposer."""

    def _propose(self, sampled: object) -> list[list[int]]:
        return [[] for _ in self.rows]


def _run(engine: Engine, kind: str, clients: int) -> float:
    """Seconds of clients that ask one request after the other."""
    waiting = _requests(kind, 6 * clients, np.random.default_rng(3))
    while waiting or engine.rows:
        while waiting and len(engine.rows) < clients:
            engine.add(waiting.pop())
        engine.step()
    return engine.now


@pytest.mark.parametrize("seconds", [cpu, gpu, dear])
@pytest.mark.parametrize("clients", [1, 4, 16])
@pytest.mark.parametrize("kind", ["quoting", "drawn", "mixed"])
def test_never_slower(kind: str, clients: int, seconds: Seconds) -> None:
    plain = _run(Silent(config(max_length=1024), seconds), kind, clients)
    engine = Engine(config(max_length=1024), seconds, looking=50e-6)
    ours = _run(engine, kind, clients)
    assert ours < plain / 0.98, engine.drafter.stats.line()
    reasons = engine.drafter.stats.reasons
    if seconds is dear:
        assert reasons[PAYS] < 0.1 * engine.drafter.stats.calls
    elif kind == "quoting":
        # The more rows share a step, the less of a token a guess may cost.
        assert ours < plain / (2 if seconds is gpu else {1: 2.5, 4: 1.5, 16: 1.1}[clients])


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _steps(
    pace: Pace, clock: Clock, seconds: Seconds, chance: float, steps: int, right: float | None = None
) -> list[int]:
    """The guesses of each step, of two rows that are always offered eight; ``right`` is their real chance."""
    random = np.random.default_rng(5)
    rows, guesses = 2, 0
    sent: list[int] = []
    lengths = [100] * rows
    for _ in range(steps):
        each = [
            1 + int(np.cumprod(random.random(guesses // rows) < (chance if right is None else right)).sum())
            for _ in range(rows)
        ]
        lengths = [length + new for length, new in zip(lengths, each, strict=True)]
        pace.arrive([[1] * count for count in each], lengths)
        guesses = 0 if pace.pauses(rows) else sum(pace.choose([chance ** np.arange(1.0, 9)] * rows, lengths))
        pace.leave(lengths, guesses)
        clock.now += seconds(rows, guesses, 0)
        sent.append(guesses)
    return sent


def test_the_surest_guesses_are_kept_as_many_as_pay() -> None:
    clock = Clock()
    pace = Pace(clock)
    sent = _steps(pace, clock, cpu, 0.8, 60)
    # Two tokens in 28 ms; with n guesses of each row 2 (1 + 0.8 + ... + 0.8^n) in 28 + 8 n.
    rates = [(1 + sum(0.8**depth for depth in range(1, n + 1))) / (28 + 8 * n) for n in range(9)]
    assert sent[-1] == pytest.approx(2 * int(np.argmax(rates)), abs=2)
    assert pace.seconds(2, 100, 0) == pytest.approx(0.028, rel=0.03)
    assert pace.seconds(2, 100, sent[-1]) == pytest.approx(cpu(2, sent[-1], 0), rel=0.03)


def test_a_step_without_guesses_is_measured_now_and_then() -> None:
    clock = Clock()
    pace = Pace(clock)
    sent = _steps(pace, clock, cpu, 0.9, 600)
    assert sent[0] == 0
    assert 4 <= sent.count(0) <= 8
    # The machine gets so slow with guesses that none pays, then as quick with as without.
    sent = _steps(pace, clock, dear, 0.9, 1000)
    assert sum(guesses > 0 for guesses in sent) < 50
    assert sum(_steps(pace, clock, lambda *_: 0.02, 0.9, 1500)[-50:]) > 700


def test_guesses_that_lose_are_given_up_and_tried_again_for_little() -> None:
    clock = Clock()
    pace = Pace(clock)
    sent = _steps(pace, clock, dear, 0.5, 4000)
    assert sum(guesses > 0 for guesses in sent[2000:]) >= 1
    assert clock.now < 1.01 * 4000 * dear(2, 0, 0)


def test_guesses_that_promise_more_than_they_keep_are_given_up() -> None:
    clock = Clock()
    pace = Pace(clock)
    sent = _steps(pace, clock, cpu, 0.9, 3000, right=0.05)
    assert 0 < sum(guesses > 0 for guesses in sent) < 60


def test_steps_that_read_prompts_or_hold_other_rows_teach_nothing() -> None:
    clock = Clock()
    pace = Pace(clock)
    lengths = [100, 200]
    for sampled, new in (
        ([[1], []], [101, 200]),  # a prompt is being read
        ([[1]], [101]),  # a row has gone
        ([[1], [1]], [201, 101]),  # rows have moved
        ([[1], [1], [1]], [101, 201, 50]),  # a row has come
    ):
        pace.leave(lengths, 0)
        clock.now += 5.0
        pace.arrive(sampled, new)
        pace.choose([np.array([0.9])] * 2, lengths)
        assert pace.reason == MEASURES
    pace.leave(lengths, 0)
    clock.now += 0.02
    pace.arrive([[1], [1, 2]], [101, 202])
    pace.choose([np.array([0.9])] * 2, lengths)
    assert pace.reason == PAYS


def test_looking_where_nothing_is_found_takes_next_to_no_time() -> None:
    clock = Clock()
    pace = Pace(clock)
    looking = 0.0
    lengths = [100] * 4
    reasons = []
    for _ in range(500):
        lengths = [length + 1 for length in lengths]
        pace.arrive([[1]] * 4, lengths)
        if not pace.pauses(4):
            clock.now += 0.004
            looking += 0.004
            pace.choose([np.empty(0)] * 4, lengths)
        pace.leave(lengths, 0)
        clock.now += 0.02
        reasons.append(pace.reason)
    assert set(reasons) == {NOTHING, PAUSED}
    assert looking < 0.012 * clock.now
