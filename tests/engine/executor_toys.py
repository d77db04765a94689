"""A model that records its passes, and requests whose output is known, for tests of the executor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specrag.engine.outputs import ARGMAX, Row
from specrag.engine.passes import (
    Coroutine,
    Emit,
    Segment,
)
from specrag.engine.session import Session
from specrag.models.toy import ToyModel
from specrag.speculation.tree import EMPTY

#: For events that must come; long enough for a busy machine, and a failure when it passes.
SOON = 20.0


class Recorder(ToyModel):
    """The toy, with a record of the rows of each segment of each pass, and a hook before each pass."""

    def __init__(self, before: Callable[[int], None] = lambda _: None) -> None:
        super().__init__(vocab_size=7, order=2, seed=1, context_length=100_000)
        self.packed: list[list[int]] = []
        self.before = before

    def forward(self, segments: Sequence[Segment]) -> list[list[Row]]:
        self.before(self.passes)
        self.packed.append([len(segment.tokens) for segment in segments])
        return super().forward(segments)


def greedy(model: ToyModel, prompt: Sequence[int], steps: int, chunk: int = 512) -> Coroutine[list[int]]:
    """Prefill and decode; emits each token."""
    session = Session(model)
    yield from session.extend(prompt, chunk=chunk)
    for _ in range(steps):
        rows = yield from session.score(EMPTY, ARGMAX)
        session.commit((), rows[0].argmax)
        yield Emit(session.tokens[-1])
    return session.tokens


def truth(model: ToyModel, prompt: Sequence[int], steps: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(steps):
        tokens.append(int(model.logits(tokens).argmax()))
    return tokens
