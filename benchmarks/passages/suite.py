"""``specrag bench passages``: RaLMSpec against iterative retrieval one search after the other.

Rows are questions, methods take turns on each. The sections are ordered so that every table has a figure early; a run
with ``--repeats 1`` gives all of them, and a later one without it adds the other repeats.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median

from benchmarks.passages import batches, exactness, pictures
from benchmarks.passages.data import Asked, Source
from benchmarks.passages.figures import summarise
from benchmarks.passages.pictures import (
    ACCURACY,
    COMPONENTS,
    DELAYED,
    SCALE,
    TIMELINE,
    TIMELINE_FILE,
)
from benchmarks.passages.retrievers import (
    EXACT,
    HNSW,
    REMOTE,
    SPARSE,
    Retrievers,
    Slowed,
    Spoiled,
    enlarged,
    sized,
)
from benchmarks.passages.subjects import (
    APART,
    BASELINES,
    COST_AWARE,
    PSA,
    RALMSPEC,
    REUSE,
    VARIANTS,
    Models,
    Subjects,
)
from specrag.bench.interleave import Row, Trial
from specrag.bench.machine import half_precision
from specrag.bench.measurement import OVERALL, Measurement
from specrag.bench.records import Record
from specrag.bench.suite import BenchContext
from specrag.methods.retriever import PassageRetriever


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


_CALIBRATION = "calibration"
_THREADS = "threads"
#: Sections in which methods learn anew.
_SECTIONS = (COMPONENTS, DELAYED, ACCURACY, SCALE, TIMELINE, _CALIBRATION, _THREADS)
_METHODS = (*BASELINES, RALMSPEC, PSA, COST_AWARE)
#: Simulated stores answer from the index whose own search is the fastest, so that the delay is what they cost.
_STORE = HNSW
_TIMELINE_METHOD = "ralmspec+A"
_SMALL_MODEL = "smollm2-135m"


class PassagesSuite:
    """Passage speculation.

    Args:
        size: how much is measured; None for the usual quick or full run.
    """

    name = "passages"
    summary = (
        "Iterative retrieval: before every 4 new tokens the best passage for the last 32 tokens of the text is looked "
        "for, and stands in front of the question (at most 512 tokens of prompt, greedy, bf16, end tokens ignored so "
        "that every answer is equally long). `sequential` encodes the prompt anew at every retrieval, as the paper "
        "runs it; `sequential-kv-reuse` keeps keys and values of the newest passages, as all of RaLMSpec does here. "
        "P is a prefetch of 20, S the scheduler OS3 (else a stride of 3), A asynchronous verification; `cost-aware` "
        "decides guess by guess, also whether to decode beside a search; `apart` gives half of the processors to "
        "searches and half to the model. `identical` is the share of answers whose "
        "tokens and passages are the baseline's; below 1 it is bf16 rounding, and the exactness section, in int8 and "
        "batch invariant, must show 1. R is `retrieval`: encoding queries and "
        "searching, as far as the model does not work meanwhile; G is `generation`; `step` is a, `search by queries` "
        "b(s), `match rate` the chance that a guess is right. `best stride speedup` is that of the best stride up to "
        "16, by brute force at  the measured a, b(s) and match rate (of a cost-aware one: the better of searching "
        "alone at its own a, b(s) and beside decoding at PSA's), relative to the baseline's measured seconds between "
        "two retrievals: the method's own steps, no ceiling. `ceiling` is 1 + R/G of `sequential-kv-reuse`. Corpora "
        "larger than the real one hold synthetic distractors, unit vectors of random direction; "
        "`distractors` would say how many an answer used. Stores with a delay are simulated: an HNSW search that "
        "sleeps as long as the R/G asked for needs. The accuracy section has such a store with R/G of 1, "
        "and turns the cache's ranking round at some of the look-ups: simulated too."
    )

    def __init__(self, size: Size | None = None) -> None:
        self.size = size

    def run(self, context: BenchContext) -> Iterator[Measurement]:
        usual = QUICK if context.quick else FULL if context.model == _SMALL_MODEL else LARGER_MODEL
        bench = _Bench(context, self.size or usual)
        try:
            early = [
                *bench.batches(),
                *bench.components(),
                *bench.delays(),
                *bench.accuracies(),
                *bench.corpora(),
                *bench.threads(),
                *bench.timelines(),
            ]
            exact = list(bench.exactness())
            yield from bench.main()
            yield from early
            yield from exact
        finally:
            bench.close()

    def pictures(self, measurements: Sequence[Measurement], folder: Path) -> Sequence[Path]:
        """R and G by method, speed-ups by delay and corpus, latency by batch, and the course of a request."""
        return pictures.draw(measurements, folder)


def suite() -> PassagesSuite:
    """The suite, for the registry."""
    return PassagesSuite()


class _Bench:
    """One run."""

    def __init__(self, context: BenchContext, size: Size) -> None:
        self.context = context
        self.size = size
        self.source = Source(context)
        self.retrievers = Retrievers(context, self.source)
        self.models = Models(context.model, context.device)
        self._subjects: dict[str, Subjects] = {}

    def close(self) -> None:
        self._subjects.clear()
        self.retrievers.close()
        self.source.close()
        self.models.close()

    # -- sections -------------------------------------------------------------------------------------------

    def main(self) -> Iterator[Measurement]:
        """Whole requests over every retriever, by set of questions; the last overall is over all retrievers."""
        every: list[Record] = []
        for name in self.size.retrievers:
            rows = [
                self._row(f"{name}/{asked.task}", asked, _METHODS, name)
                for asked in self.source.questions(self.size.main)
            ]
            records = self._measure(name, rows, self.size.repeats)
            every += records
            for entry in summarise(self.context, records, overall=True):
                yield replace(entry, task=f"{name}/{OVERALL}") if entry.task == OVERALL else entry
        for entry in self.context.summarise(
            every, baselines=BASELINES, dtype=half_precision(self.context.device)
        ):
            if entry.task == OVERALL:  # of stores so different only the ratio says something together
                yield replace(entry, extra={})

    def components(self) -> Iterator[Measurement]:
        """Each part of RaLMSpec alone and with the others, prefetches and strides (Tables 1, 2, 4 and 5)."""
        for name in self.size.retrievers:
            rows = [
                self._row(f"{COMPONENTS}/{name}", asked, self.size.part_methods, name)
                for asked in self.source.questions(self.size.parts)
            ]
            yield from summarise(self.context, self._measure(f"{COMPONENTS}, {name}", rows, 1))

    def batches(self) -> Iterator[Measurement]:
        """What a query costs in a larger search."""
        questions = [asked.text for asked in self.source.questions(batches.SIZES[-1])]
        yield from batches.measure(
            self.context, self.retrievers, self.size.retrievers, questions[: batches.SIZES[-1]]
        )

    def delays(self) -> Iterator[Measurement]:
        """Stores slowed so that R is a given part of G."""
        questions = self.source.questions(self.size.few)
        for ratio in self.size.delays:
            seconds = self._delay(ratio)
            if seconds is None:  # the calibration has failed, and the page says so
                return
            task = f"{DELAYED}/R to G {ratio:g}"
            rows = [self._row(task, asked, _METHODS, _STORE, seconds) for asked in questions]
            records = self._measure(task, rows, 1)
            for entry in summarise(self.context, records, simulated=True):
                yield replace(entry, extra={**entry.extra, "delay_ms": 1e3 * seconds})

    def accuracies(self) -> Iterator[Measurement]:
        """Guesses made wrong, over a store so slow that R is G."""
        seconds = self._delay(1.0) if self.size.spoiled else None
        for share in self.size.spoiled if seconds is not None else ():
            task = f"{ACCURACY}/spoiled {share:.0%}"
            rows = [
                self._row(task, asked, _METHODS[1:], _STORE, seconds, spoiled=share)
                for asked in self.source.questions(self.size.few)
            ]
            yield from summarise(self.context, self._measure(task, rows, 1), simulated=True)

    def corpora(self) -> Iterator[Measurement]:
        """Exact dense search over fewer and more passages."""
        for count in self.size.corpora:
            name = self._corpus(count)
            rows = [
                self._row(f"{SCALE}/{_passages(name)}", asked, _METHODS, name)
                for asked in self.source.questions(self.size.few)
            ]
            yield from summarise(self.context, self._measure(name, rows, 1))

    def threads(self) -> Iterator[Measurement]:
        """What it gains or loses to give searches processors of their own."""
        for count in self.size.corpora[-1:]:
            name = self._corpus(count)
            rows = [
                self._row(f"{_THREADS}/{_passages(name)}", asked, (REUSE, PSA, APART), name)
                for asked in self.source.questions(self.size.few)
            ]
            yield from summarise(self.context, self._measure(_THREADS, rows, 1))

    def timelines(self) -> Iterator[Measurement]:
        """When what ran in one asynchronous request; drawn from a file beside the page."""
        asked = self.source.questions(1)[0]
        stores: dict[str, float | None] = dict.fromkeys(self.size.timelines)
        drawn: dict[str, object] = {}
        seconds = self._delay(1.0)
        if seconds is not None:
            stores[_STORE] = seconds
        for name, delay in stores.items():
            title = name if delay is None else f"store delayed by {1e3 * delay:.0f} ms (simulated)"
            task = f"{TIMELINE}/{name}" if delay is None else f"{TIMELINE}/delayed store"
            row = self._row(task, asked, (_TIMELINE_METHOD,), name, delay, keep_timeline=True)
            records = self._measure(task, [row], 1)
            yield from summarise(self.context, records, simulated=delay is not None)
            drawn |= {
                f"{_TIMELINE_METHOD}, {title}": json.loads(record.outcome.output)
                for record in records[-1:]
                if record.outcome is not None and record.outcome.output is not None
            }
        path = self.context.out / TIMELINE_FILE
        path.write_text(json.dumps(drawn, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")

    def exactness(self) -> Iterator[Measurement]:
        """Equality with sequential retrieval."""
        yield from exactness.measure(
            self.context,
            self.retrievers,
            self.size.exact_retrievers,
            self.source.questions(self.size.exactness),
            self.size.exact_new,
        )

    def _corpus(self, passages: int) -> str:
        """The exact dense index of so many passages."""
        return enlarged(passages) if passages > len(self.source.knowledge_base) else sized(passages)

    # -- rows -----------------------------------------------------------------------------------------------

    def _row(
        self,
        task: str,
        asked: Asked,
        methods: Sequence[str],
        retriever: str,
        delay: float | None = None,
        *,
        spoiled: float = 0.0,
        keep_timeline: bool = False,
    ) -> Row:
        def prepare() -> Mapping[str, Trial]:
            subjects = self._subject(task, retriever, delay, spoiled)
            return subjects.trials(methods, asked.text, keep_timeline=keep_timeline)

        return Row(name=f"{asked.task} {asked.name}", task=task, methods=tuple(methods), prepare=prepare)

    def _subject(self, task: str, retriever: str, delay: float | None, spoiled: float) -> Subjects:
        """Methods that learn within one section, or within one retriever of the main table."""
        key = task if task.partition("/")[0] in _SECTIONS else retriever
        if key not in self._subjects:
            found: PassageRetriever = self.retrievers.get(retriever)
            if delay is not None:
                found = Slowed(found, delay)
            if spoiled:
                found = Spoiled(found, spoiled)
            self._subjects[key] = Subjects(self.models.get(), found, self.size.new)
        return self._subjects[key]

    def _measure(self, label: str, rows: Sequence[Row], repeats: int) -> list[Record]:
        return self.context.measure(label, rows, self.context.plan(repeats, warm_each_row=False))

    # -- how slow a store has to be -------------------------------------------------------------------------

    def _delay(self, ratio: float) -> float | None:
        """Seconds that make R this part of G, by what sequential retrieval with the index alone takes."""
        if not self._calibrated:
            return None
        return median(
            max(ratio * figures["generation_ms"] - figures["retrieval_ms"], 0.0) / figures["chunks"] / 1e3
            for figures in self._calibrated
        )

    @cached_property
    def _calibrated(self) -> list[Mapping[str, float]]:
        task = f"{_CALIBRATION}/{_STORE}"
        rows = [self._row(task, asked, (REUSE,), _STORE) for asked in self.source.questions(self.size.few)]
        records = self._measure(_CALIBRATION, rows, 1)
        return [record.outcome.figures for record in records if record.outcome is not None]


def _passages(name: str) -> str:
    """What an exact dense index holds."""
    return name.removeprefix(f"{EXACT}, ")
