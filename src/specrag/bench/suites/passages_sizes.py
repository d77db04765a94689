"""How much ``specrag bench passages`` measures."""

from __future__ import annotations

from dataclasses import dataclass, replace

from specrag.bench.suites.passages_retrievers import EXACT, HNSW, REMOTE, SPARSE, enlarged
from specrag.bench.suites.passages_subjects import (
    APART,
    BASELINES,
    COST_AWARE,
    PSA,
    REUSE,
    VARIANTS,
)


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured.

    Attributes:
        new: tokens of an answer.
        retrievers: of the main table, the parts and the batches.
        main: questions of each set in the main table.
        repeats: of the main table.
        parts: questions of each set for each part of RaLMSpec, and the methods.
        few: questions of each set for delays and corpora.
        delays: R/G of slowed stores.
        spoiled: shares of the look-ups that are spoiled.
        corpora: passages of the cut or enlarged knowledge base.
        timelines: retrievers of which one request is drawn, besides a slowed store.
        exactness: questions of each set, 0 for none, the retrievers, and the tokens of an answer.
    """

    new: int
    retrievers: tuple[str, ...]
    main: int
    repeats: int
    parts: int
    part_methods: tuple[str, ...]
    few: int
    delays: tuple[float, ...]
    spoiled: tuple[float, ...]
    corpora: tuple[int, ...]
    timelines: tuple[str, ...]
    exactness: int
    exact_retrievers: tuple[str, ...]
    exact_new: int


FULL = Size(
    new=128,
    retrievers=(EXACT, HNSW, SPARSE, REMOTE, enlarged(1_000_000)),
    main=3,
    repeats=5,
    parts=2,
    part_methods=(*BASELINES, *(name for name in VARIANTS if name != APART)),
    few=1,
    delays=(0.1, 0.5, 1.0, 2.0, 5.0),
    spoiled=(0.0, 0.25, 0.5, 0.75, 1.0),
    corpora=(10_000, 70_000, 300_000, 1_000_000),
    timelines=(REMOTE,),
    exactness=25,
    exact_retrievers=(EXACT, HNSW, SPARSE, REMOTE),
    exact_new=16,
)
#: Of a larger model what depends on it: the stores that cost something, each question minutes. Exactness and the parts
#: are those of the smaller one.
LARGER_MODEL = replace(
    FULL,
    new=48,
    retrievers=(REMOTE, enlarged(1_000_000)),
    main=1,
    repeats=3,
    parts=0,
    delays=(1.0,),
    spoiled=(),
    corpora=(),
    timelines=(),
    exactness=0,
)
QUICK = Size(
    new=16,
    retrievers=(EXACT, SPARSE),
    main=1,
    repeats=1,
    parts=1,
    part_methods=(REUSE, "ralmspec+P", "ralmspec+S", "ralmspec+A", PSA, COST_AWARE),
    few=1,
    delays=(1.0,),
    spoiled=(0.5,),
    corpora=(1000,),
    timelines=(),
    exactness=1,
    exact_retrievers=(EXACT,),
    exact_new=8,
)
