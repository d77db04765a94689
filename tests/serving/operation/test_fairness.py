"""Which passes are packed together when there are more rows than one may have."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

from specrag.engine.executor import Executor
from specrag.engine.outputs import NOTHING, Row
from specrag.engine.passes import Coroutine, Pass, Segment


class Recorder:
    """A model that computes nothing and remembers the rows of every pass."""

    vocab_size, context_length = 10, 10_000

    def __init__(self) -> None:
        self.passes: list[list[int]] = []

    def new_cache(self) -> None:
        """None is needed."""

    def forward(self, segments: Sequence[Segment]) -> list[list[Row]]:
        self.passes.append([len(segment.tokens) for segment in segments])
        return [[Row() for _ in segment.tokens] for segment in segments]


def passes(model: Recorder, rows: int, count: int, *, reads: bool = False) -> Coroutine[None]:
    for left in range(count, 0, -1):
        segment = Segment(SimpleNamespace(length=0), [0] * rows, None, [NOTHING] * rows)
        yield Pass(model, segment, unread=rows * left if reads else 0)


def test_decoding_goes_on_in_every_second_pass_beside_several_long_prompts() -> None:
    model = Recorder()
    executor = Executor(max_rows=512)
    tasks = [executor.submit(passes(model, 256, 4, reads=True)) for _ in range(4)]
    tasks += [executor.submit(passes(model, 1, 6)) for _ in range(3)]
    for task in tasks:
        executor.run(task)
    executor.close()
    # With as much of the prompts as fits.
    assert [rows.count(1) for rows in model.passes[:6]] == [0, 3] * 3
    assert all(1 <= rows.count(256) <= 2 for rows in model.passes)
    assert all(sum(rows) <= 512 for rows in model.passes)
    assert sum(rows.count(256) for rows in model.passes) == 16


def test_a_long_segment_is_not_passed_for_ever() -> None:
    model = Recorder()
    executor = Executor(max_rows=64)
    short = [executor.submit(passes(model, 40, 8)) for _ in range(2)]
    long = executor.submit(passes(model, 60, 1))
    for task in [*short, long]:
        executor.run(task)
    executor.close()
    assert [60] in model.passes[:3]
