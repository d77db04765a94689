"""vLLM's side of a proposer, without vLLM: requests in rows that move, steps, and a clock that only they advance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from specrag.integrations.vllm import Drafter
from specrag.integrations.vllm.rows import Batch


def config(
    *, most: int = 8, max_length: int = 4096, model: str = "", vocabulary: int = 100_000, **additional: object
) -> Any:
    """What of a ``VllmConfig`` is read."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=most),
        model_config=SimpleNamespace(
            max_model_len=max_length, tokenizer=model, model=model, get_vocab_size=lambda: vocabulary
        ),
        additional_config={"specrag": additional} if additional else {},
    )


@dataclass
class Asked:
    """A request: what it is given and what the target writes."""

    name: str
    prompt: list[int]
    answer: list[int]
    extra: Mapping[str, Any] | None = None
    reading: int = 1  # steps that read the prompt
    written: int = 0
    guesses: list[int] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    steps: int = 0

    @property
    def text(self) -> list[int]:
        return self.prompt + self.answer[: self.written]


class Engine:
    """Runs steps as vLLM does: verify, write, move rows, propose.

    Args:
        seconds: of a step, by its rows, all guesses, and the prompts read in it.
        named: whether the drafter is shown the requests.
        looking: seconds that the proposal of a row takes.
    """

    def __init__(
        self,
        settings: Any,
        seconds: Callable[[int, int, int], float] = lambda *_: 0.02,
        *,
        named: bool = False,
        looking: float = 0.0,
    ) -> None:
        self.now = 0.0
        self.seconds = seconds
        self.named = named
        self.drafter = _Slow(settings, self, looking) if looking else Drafter(settings, clock=self._clock)
        self.width = settings.model_config.max_model_len
        self.rows: list[Asked] = []
        self.preempted: list[Asked] = []
        self.done: list[Asked] = []

    def _clock(self) -> float:
        return self.now

    def add(self, asked: Asked, place: int | None = None) -> Asked:
        self.rows.insert(len(self.rows) if place is None else place, asked)
        return asked

    def preempt(self, asked: Asked) -> None:
        self.rows.remove(asked)
        asked.guesses = []
        self.preempted.append(asked)

    def resume(self, asked: Asked, place: int | None = None) -> None:
        self.preempted.remove(asked)
        asked.reading = 2
        self.add(asked, place)

    def step(self) -> list[list[int]]:
        """One step; returns what was guessed for the next one."""
        reading = sum(asked.reading > 0 for asked in self.rows)
        self.now += self.seconds(len(self.rows), sum(len(asked.guesses) for asked in self.rows), reading)
        sampled = [self._write(asked) for asked in self.rows]
        guesses = self._propose(sampled)
        for asked, guessed in zip(self.rows, guesses, strict=True):
            asked.guesses = guessed
            asked.drafted += len(guessed)
        self._end()
        return guesses

    def run(self, steps: int = 10**6) -> None:
        """Steps until every request has ended."""
        for _ in range(steps):
            if not self.rows:
                return
            self.step()

    def _write(self, asked: Asked) -> list[int]:
        if asked.reading > 1:
            asked.reading -= 1
            return []
        asked.reading = 0
        asked.steps += 1
        right = 0
        left = asked.answer[asked.written :]
        while right < len(asked.guesses) and right < len(left) and asked.guesses[right] == left[right]:
            right += 1
        asked.accepted += right
        new = left[: right + 1]
        asked.written += len(new)
        return new

    def _propose(self, sampled: Sequence[list[int]]) -> list[list[int]]:
        tokens = np.full((len(self.rows) + 2, self.width), -7, dtype=np.int32)
        lengths = np.zeros(len(self.rows) + 2, dtype=np.int32)
        for place, asked in enumerate(self.rows):
            text = asked.text
            tokens[place, : len(text)] = text
            lengths[place] = len(text)
        if self.named:
            known = {
                asked.name: SimpleNamespace(sampling_params=SimpleNamespace(extra_args=asked.extra))
                for asked in [*self.rows, *self.preempted]
            }
            self.drafter.see_requests([asked.name for asked in self.rows], known)
        return self.drafter.propose(sampled, lengths, tokens)

    def _end(self) -> None:
        """As vLLM does, the last row takes the place of one that ended."""
        for place in reversed(range(len(self.rows))):
            if self.rows[place].written == len(self.rows[place].answer):
                self.done.append(self.rows[place])
                last = self.rows.pop()
                if place < len(self.rows):
                    self.rows[place] = last


class _Slow(Drafter):
    """A drafter for which the clock goes on while it looks for guesses."""

    def __init__(self, settings: Any, engine: Engine, looking: float) -> None:
        self._engine, self._looking = engine, looking
        super().__init__(settings, clock=engine._clock)

    def _guess(self, batch: Batch) -> list[list[int]]:
        self._engine.now += self._looking * len(batch.sampled)
        return super()._guess(batch)
