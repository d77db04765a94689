"""How much ``specrag bench longcontext`` measures."""

from __future__ import annotations

from dataclasses import dataclass

from specrag.bench.suites.longcontext_labels import ETAS


@dataclass(frozen=True)
class Size:
    """How much is measured of one model.

    Args:
        lengths: tokens of context for speed, and rows of each.
        new: tokens of an answer where speed is measured.
        sweep: tokens of context where the part's length varies, and rows; none for no sweep.
        unrelated: tokens of context where all rows read the first row's part, and rows.
        guards: tokens of context of the sampled comparison of guards and residuals, and rows.
        quality: tokens of context of the made-up questions, and rows of each kind; then most tokens of LongBench's.
        long_bench: most rows of LongBench v1 and v2 each.
        exact: tokens of context of the comparison in fp32.
        window: entries of the streaming drafter's cache.
        simulated: tokens of context of the model of random weights.
        etas: strengths of transfer whose quality is measured.
        conversation: tokens of chat histories, and how many; none for no such section.
        upward: tokens of context of the questions for upward speculation, and rows of each kind; none for no such
            section. The target is the model without the layers of ``left_out``.
        judge: the model that rates replies in them; empty for the target itself.
        memory: tokens of context of the processes whose memory is measured.
    """

    lengths: tuple[tuple[int, int], ...]
    new: int = 64
    sweep: tuple[int, int] | None = None
    unrelated: tuple[int, int] | None = None
    guards: tuple[int, int] | None = None
    quality: tuple[tuple[int, int], ...] = ()
    long_bench: tuple[int, int] = (0, 0)
    exact: tuple[int, ...] = ()
    window: int = 4096
    simulated: tuple[int, ...] = ()
    etas: tuple[int, ...] = ETAS
    conversation: tuple[int, int] | None = None
    upward: tuple[int, int] | None = None
    left_out: tuple[int, ...] = (20, 21, 22, 23)
    judge: str = ""
    memory: tuple[int, ...] = ()


SMALL_MODEL = Size(
    lengths=((2048, 4), (4096, 4), (7680, 4)),
    sweep=(7680, 2),
    unrelated=(4096, 3),
    guards=(4096, 3),
    quality=((2048, 10), (4096, 10), (7168, 5)),
    long_bench=(24, 7600),
    exact=(2048, 4096, 7680),
    window=1024,
    simulated=(1024, 2048, 4096, 8192, 16384),
    conversation=(7168, 20),
    upward=(4096, 10),
    judge="qwen2.5-coder-1.5b",
    memory=(2048, 4096, 7680),
)
LARGER_MODEL = Size(
    lengths=((4096, 2), (8192, 2), (16384, 1), (32000, 1)),
    new=48,
    sweep=None,
    quality=((4096, 10),),
    long_bench=(12, 16384),
    window=4096,
    conversation=(12000, 10),
    memory=(4096, 8192, 16384),
)
QUICK = Size(
    lengths=((1024, 1),),
    new=24,
    guards=None,
    quality=((1024, 1),),
    exact=(),
    window=256,
    etas=(10,),
)
