"""``specrag bench retrieval``: the knowledge base and its indexes.

Building (in a process of its own), opening, searching by number of questions, how often a passage with the answer is
found, and what the encoder loses with fewer bits. A method is the retrieval of standard RAG with one of the indexes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from benchmarks.retrieval.building import building_trial
from benchmarks.retrieval.data import (
    CORPUS,
    Questions,
    load_questions,
    part_of_corpus,
    spread,
    write_corpus,
)
from benchmarks.retrieval.encoders import (
    DEPTHS,
    METHOD,
    Encoders,
    depth_name,
    hit_shares,
    method_name,
)
from specrag.bench.data import find_file
from specrag.bench.interleave import Row, Trial
from specrag.bench.measurement import OVERALL, Extra, Measurement
from specrag.bench.plots import Axis, Series, line_plot
from specrag.bench.records import Outcome, Record
from specrag.bench.suite import BenchContext
from specrag.errors import InputError
from specrag.retrieval.build import DEFAULT_ENCODER
from specrag.retrieval.encoder.encoder import default_dtype
from specrag.retrieval.knowledge_base import INDEXES, KnowledgeBase

_BATCHES = (1, 8, 32)


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Attributes:
        passages: of the knowledge base; None for the whole corpus.
        questions: of each set; None for all.
        encoded: passages that every variant of the encoder encodes.
        rows: batches of questions for the times of a search.
    """

    passages: int | None
    questions: int | None
    encoded: int
    rows: int


_QUICK = Size(passages=1000, questions=13, encoded=96, rows=1)
_FULL = Size(passages=None, questions=None, encoded=4000, rows=10)


class RetrievalSuite:
    """The knowledge base and its indexes.

    Args:
        size: how much is measured; None for the usual quick or full run.
    """

    name = "retrieval"
    summary = (
        "The knowledge base: building it in a process of its own, opening it, searching it with each of its "
        "indexes, and the share of questions for which one of the first 1, 5 or 20 passages holds an answer "
        "(`top 1`, `top 5`, `top 20`; answers are matched as strings among BM25's first 20 of the whole corpus, "
        "which favours BM25). `standard-rag+flat` is standard RAG's retrieval with the exact dense index; "
        "`+hnsw`, `+bm25` and `+hybrid` with the others. Times of a search include encoding the questions; "
        "`index` is the search of the index alone. In the table of encoders `transformers+bf16` is "
        "sentence-transformers, the others are the lean forward; `same best` is the share of questions with "
        "the same best passage as in fp32, `largest cosine error` that of the passages' vectors against fp32's."
    )

    def __init__(self, size: Size | None = None) -> None:
        self.size = size

    def run(self, context: BenchContext) -> Iterator[Measurement]:
        if context.data is None:
            remedy = f"give a folder that holds {CORPUS} and corpus_questions_NAME_dev.jsonl"
            raise InputError("--data", None, remedy)
        size = self.size or (_QUICK if context.quick else _FULL)
        data = context.data
        bench = _Bench(context, data, size)
        try:
            yield from bench.building()
            yield from bench.opening()
            yield from bench.searching()
            yield from bench.hit_rates()
            yield from bench.encoders.run(data, bench.sets, size.encoded)
        finally:
            bench.close()

    def pictures(self, measurements: Sequence[Measurement], folder: Path) -> Sequence[Path]:
        """Hit rate over depth, and milliseconds of a search over the number of questions; a line an index."""
        rates = [_rates(measurements, index) for index in INDEXES]
        times = [_times(measurements, index) for index in INDEXES]
        made = []
        if any(rates):
            made.append(
                line_plot(
                    folder / "retrieval-hits.png",
                    [series for series in rates if series is not None],
                    title="Questions with an answer among the first passages, all sets",
                    x=Axis(label="passages looked at", log=True),
                    y=Axis(label="share of questions"),
                )
            )
        if any(times):
            made.append(
                line_plot(
                    folder / "retrieval-search.png",
                    [series for series in times if series is not None],
                    title="One search, warm, without encoding the questions",
                    x=Axis(label="questions in a batch", log=True),
                    y=Axis(label="milliseconds", log=True),
                )
            )
        return made


class _Bench:
    """One run. The knowledge base stays beside the records, so that a resumed run need not build it again."""

    def __init__(self, context: BenchContext, data: Path, size: Size) -> None:
        self.context = context
        self.data = data
        self.size = size
        self.sets = load_questions(data, most=size.questions)
        self._work = context.out / ".records"
        self.encoders = Encoders(context)
        self._opened: KnowledgeBase | None = None

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()

    # -- the knowledge base ---------------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        return self._work / f"knowledge-base-{self.size.passages or 'whole'}"

    @cached_property
    def documents(self) -> Path:
        if self.size.passages is None:
            return find_file(self.data, CORPUS)
        part = part_of_corpus(self.data, self.sets, self.size.passages)
        return write_corpus(self._work / f"corpus-{self.size.passages}.jsonl", part)

    @property
    def knowledge_base(self) -> KnowledgeBase:
        """Open, and ready to search: built without a record if that of an earlier run is gone."""
        if self._opened is None:
            if not (self.folder / "manifest.json").is_file():
                building_trial(self.documents, self.folder)()
            self._opened = KnowledgeBase.open(self.folder, encoder=self.encoders.get(default_dtype()))
        return self._opened

    def building(self) -> Iterator[Measurement]:
        def prepare() -> Mapping[str, Trial]:
            return {METHOD: building_trial(self.documents, self.folder)}

        row = Row(name="corpus", task="building/corpus", methods=(METHOD,), prepare=prepare)
        records = self.context.measure("building", [row], self.context.plan(1, warmups=0))
        yield from self._summarise(records)

    def opening(self) -> Iterator[Measurement]:
        def prepare() -> Mapping[str, Trial]:
            assert len(self.knowledge_base)
            return {method_name(index): self._opening(index) for index in INDEXES}

        row = Row(name="opening", task="opening/warm", methods=_methods(), prepare=prepare)
        yield from self._summarise(self.context.measure("opening", [row], self.context.plan(5)))

    def _opening(self, index: str) -> Trial:
        def trial() -> Outcome:
            started = time.perf_counter()
            with KnowledgeBase.open(self.folder) as opened:
                opened.index(index)
                return Outcome(seconds=time.perf_counter() - started)

        return trial

    # -- searching ------------------------------------------------------------------------------------------

    def searching(self) -> Iterator[Measurement]:
        texts = [question.text for entry in self.sets for question in entry.questions]
        rows = []
        for batch in _BATCHES:
            starts = spread(range(max(len(texts) - batch, 1)), self.size.rows)
            rows += [
                Row(
                    name=str(start),
                    task=f"search/questions {batch}",
                    methods=_methods(),
                    prepare=lambda chosen=texts[start : start + batch]: {  # type: ignore[misc]
                        method_name(index): self._searching(index, chosen) for index in INDEXES
                    },
                )
                for start in starts
            ]
        records = self.context.measure("searching", rows, self.context.plan(3))
        yield from self._summarise(records, baselines=[method_name("flat")])

    def _searching(self, index: str, texts: Sequence[str]) -> Trial:
        base = self.knowledge_base

        def trial() -> Outcome:
            started = time.perf_counter()
            queries = base.encode(texts, index)
            encoded = time.perf_counter()
            rankings = base.index(index).search(queries, min(5, len(base)))
            searched = time.perf_counter()
            for ranking in rankings:
                base.passages(ranking.ids.tolist())
            return Outcome(
                seconds=time.perf_counter() - started, figures={"index_ms": 1e3 * (searched - encoded)}
            )

        return trial

    def hit_rates(self) -> Iterator[Measurement]:
        rows = [
            Row(
                name=entry.name,
                task=f"hit rate/{entry.name}",
                methods=_methods(),
                prepare=lambda entry=entry: {  # type: ignore[misc]
                    method_name(index): self._hit_rate(index, entry) for index in INDEXES
                },
            )
            for entry in self.sets
        ]
        records = self.context.measure("hit rates", rows, self.context.plan(1, warmups=0))
        for record in records:
            yield from self._rate(record.key.task, record.key.method, [record])
        for method in _methods():
            mine = [record for record in records if record.key.method == method]
            yield from self._rate(f"hit rate/{OVERALL}", method, mine)

    def _hit_rate(self, index: str, entry: Questions) -> Trial:
        def trial() -> Outcome:
            base = self.knowledge_base
            firsts = []
            for start in range(0, len(entry.questions), _BATCHES[-1]):
                batch = entry.questions[start : start + _BATCHES[-1]]
                k = min(DEPTHS[-1], len(base))
                for question, hits in zip(
                    batch, base.search([question.text for question in batch], k, index=index), strict=True
                ):
                    found = [str(hit.passage.metadata.get("id")) in question.positives for hit in hits]
                    firsts.append(found.index(True) if True in found else DEPTHS[-1])
            return Outcome(figures={"questions": float(len(firsts)), **hit_shares(np.array(firsts))})

        return trial

    def _rate(self, task: str, method: str, records: Sequence[Record]) -> Iterator[Measurement]:
        """One line of hit rates, each set weighted by its questions."""
        outcomes = [record.outcome for record in records if record.outcome is not None]
        if outcomes:
            count = sum(outcome.figures["questions"] for outcome in outcomes)
            extra: dict[str, Extra] = {
                name: sum(outcome.figures[name] * outcome.figures["questions"] for outcome in outcomes)
                / count
                for name in map(depth_name, DEPTHS)
            }
            yield self.context.measurement(
                task=task,
                method=method,
                n=int(count),
                model=DEFAULT_ENCODER,
                dtype=default_dtype(),
                extra=extra,
            )

    def _summarise(
        self, records: Sequence[Record], baselines: Sequence[str] = (METHOD,)
    ) -> list[Measurement]:
        return self.context.summarise(
            records, baselines=baselines, dtype=default_dtype(), model=DEFAULT_ENCODER, overall=False
        )


def suite() -> RetrievalSuite:
    """The suite, for the registry."""
    return RetrievalSuite()


def _methods() -> tuple[str, ...]:
    return tuple(method_name(index) for index in INDEXES)


def _rates(measurements: Sequence[Measurement], index: str) -> Series | None:
    for entry in measurements:
        if entry.task == f"hit rate/{OVERALL}" and entry.method == method_name(index):
            shares = [entry.extra[depth_name(depth)] for depth in DEPTHS]
            return Series(label=index, x=DEPTHS, y=[float(share or 0) for share in shares])
    return None


def _times(measurements: Sequence[Measurement], index: str) -> Series | None:
    points = {
        int(entry.task.rsplit(" ", 1)[1]): float(value)
        for entry in measurements
        if entry.task.startswith("search/") and entry.method == method_name(index)
        if isinstance(value := entry.extra.get("index_ms"), int | float)
    }
    return Series(label=index, x=sorted(points), y=[points[x] for x in sorted(points)]) if points else None
