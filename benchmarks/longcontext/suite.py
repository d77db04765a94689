"""``specrag bench longcontext``: RAPID behind long prompts, against the long context alone and its other rivals.

Every table gets its first rows within the first part of a run; what is in the records is not run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from benchmarks.longcontext import data, memory, prefills, simulated
from benchmarks.longcontext.data import LongRow
from benchmarks.longcontext.figures import (
    CONVERSATION,
    QUALITY,
    SPEED,
    SWEEP,
    UNRELATED,
    UPWARD,
    Figures,
    pictures,
)
from benchmarks.longcontext.judge import Judge
from benchmarks.longcontext.labels import (
    ADAPTIVE,
    ETAS,
    GUARD_METHODS,
    LC,
    LOSSLESS,
    NAIVE,
    RAG,
    SMALL,
    STREAMING,
    with_eta,
)
from benchmarks.longcontext.subjects import Prepared, Subjects
from benchmarks.longcontext.upward import without_layers
from specrag.bench.interleave import Row, Trial
from specrag.bench.machine import half_precision
from specrag.bench.measurement import OVERALL, Measurement
from specrag.bench.records import Record
from specrag.bench.suite import BenchContext
from specrag.methods.rapid.context.scores import Scoring
from specrag.retrieval.documents.contexts import ContextChunk


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


#: The models of the full run; another ``--model`` takes their place.
MODELS = (SMALL, "qwen2.5-coder-1.5b")
_EXACT, _GUARDS = "exactness", "guard and residual"
_PUBLISHED = "rapid+eta=10+published"
_SPEED_METHODS = (
    LC,
    LOSSLESS,
    NAIVE,
    "rapid+eta=10",
    "rapid+eta=20",
    _PUBLISHED,
    ADAPTIVE,
    STREAMING,
    RAG,
)
_ACROSS = (f"rapid+{SMALL}", f"naive-sd+{SMALL}")
#: The paper bounds the part by 4,096 tokens and 1/24 of 128K; here it has this share of the context.
_PART = 8
_SWEEP_PARTS = (32, 16, 8, 4, 2)


class LongContextSuite:
    """Speculation behind long prompts.

    Args:
        size: how much is measured; None for the usual quick or full run.
    """

    name = "longcontext"
    summary = (
        "RAPID: a drafter that reads the relevant part of a long context guesses for a target that reads all of it. "
        "Every row's prompt is read once, then all methods decode behind it in turns, bf16, greedy, with eta > 0 at "
        "temperature 0.1. The ratio is that of decoding alone against the long context decoded plainly (`long-"
        "context`), and against naive speculative decoding; `end to end speedup` counts retrieval and all prefills, "
        "the shared one for everybody who reads it. `rapid` is lossless (eta = 0) and weighs its guesses; `published` "
        "are the paper's 10 guesses a round. `steps speedup` is what the tokens a round and the method's own times of "
        "drafting and verification add up to. `rag` reads the part alone and answers another question. In `quality`, "
        "`gold nats` is the mean log-probability of a token of the right answer at temperature 1, and its differences "
        "stand with their paired 95 % intervals; `gained` and `lost` are shares of rows that the method alone, or long"
        " context alone, gets right, `only this` those that neither long context nor rag does. `exactness` is fp32. "
        "`simulated` replays the tokens a round of `published` "
        "at the measured passes of a small model of random weights, whose keys and values soon outweigh them. `guard "
        "and residual` is sampled at temperature 1. `both prefills` reads both prompts one after the other or packed "
        "in the same passes. `chat history` asks the last question of a dialogue of MT-Bench-101 "
        "whose turns are spread among those of others; `rating` is the judge's mean rating from 1 to 5 of the reply, "
        "read with the dialogue's own turns. `memory` is of a process each. `upward` takes the model without some of "
        "its layers as the target and the whole one as the drafter."
    )

    def __init__(self, size: Size | None = None) -> None:
        self.size = size

    def run(self, context: BenchContext) -> Iterator[Measurement]:
        models = (context.model,) if context.quick or context.model != SMALL else MODELS
        for model in models:
            usual = QUICK if context.quick else SMALL_MODEL if model == SMALL else LARGER_MODEL
            bench = _Bench(context, model, self.size or usual)
            try:
                yield from bench.run()
            finally:
                bench.close()

    def pictures(self, measurements: Sequence[Measurement], folder: Path) -> Sequence[Path]:
        """Speed-up over the lengths of context and part."""
        return list(pictures(measurements, folder))


def suite() -> LongContextSuite:
    """The suite, for the registry."""
    return LongContextSuite()


@dataclass(frozen=True, kw_only=True)
class _How:
    """How a table's rows are run where it is not as in the others.

    Args:
        part_tokens: length of the part that the drafter reads; None for the usual share of the context.
        part: gives the part that all rows read; None for each row's own.
        subjects: runs the methods; None for the model in bf16.
        new: tokens of an answer; None for the size's own.
        ends: stop where the model ends its answer, and score the gold answer.
        temperature: of sampling.
        drafter: another model of the same vocabulary that reads the part too, to score the gold answer; empty for the
            target alone.
    """

    part_tokens: int | None = None
    part: Callable[[], Sequence[ContextChunk]] | None = None
    subjects: Subjects | None = None
    new: int | None = None
    ends: bool = False
    temperature: float = 0.0
    drafter: str = ""


class _Bench:
    """One model's part of a run."""

    def __init__(self, context: BenchContext, model: str, size: Size) -> None:
        self.context = context
        self.model = model
        self.size = size
        scoring: Scoring = "bm25" if context.quick else "dense"
        self.judge = Judge(size.judge or model, context.device)
        self.subjects = Subjects(
            model,
            context.device,
            scoring=scoring,
            window=size.window,
            judge=self.judge,
        )
        self._exact: Subjects | None = None
        self.rows = cache(self._rows)  # cutting and encoding take seconds

    def close(self) -> None:
        self.subjects.close()
        self.judge.close()
        if self._exact is not None:
            self._exact.close()

    def run(self) -> Iterator[Measurement]:
        yield from self.speed()
        lengths = [length for length, _ in self.size.lengths[:2]]
        yield from prefills.measure(self.context, self.subjects, lengths, _PART)
        rows = {length: self.rows(length, 1)[0] for length in self.size.memory}
        yield from memory.measure(self.context, self.subjects, rows, _PART)
        yield from self.exactness()
        if self.size.guards is not None:
            yield from self._section(_GUARDS, *self.size.guards, GUARD_METHODS, temperature=1.0)
        if self.size.unrelated is not None:
            yield from self.unrelated(*self.size.unrelated)
        yield from self.quality()
        if self.size.conversation is not None:
            yield from self.conversations(*self.size.conversation)
        if self.size.upward is not None and self.model == SMALL:
            yield from self.upward(*self.size.upward)
        if self.size.sweep is not None:
            yield from self.sweep(*self.size.sweep)

    # -- sections -------------------------------------------------------------------------------------------

    def speed(self) -> Iterator[Measurement]:
        """Every method at every length (Table 1)."""
        methods: tuple[str, ...] = _SPEED_METHODS if self.model == SMALL else (*_SPEED_METHODS, *_ACROSS)
        if self.context.quick:
            methods = (LC, LOSSLESS, NAIVE, "rapid+eta=10", STREAMING, RAG)
        records: list[Record] = []
        for length, count in self.size.lengths:
            records += self._measure(f"{SPEED}/{length:,} tokens", length, count, methods)
        yield from self._summarise(records, SPEED, baselines=(LC, NAIVE))
        if self.size.simulated:
            yield from simulated.measure(
                self.context, self.size.simulated, records, method=_PUBLISHED, baseline=LC
            )

    def sweep(self, length: int, count: int) -> Iterator[Measurement]:
        """The part's length (Figure 3)."""
        records: list[Record] = []
        for share in _SWEEP_PARTS:
            task = f"{SWEEP}/{length // share:,} tokens of {length:,}"
            methods = (LC, LOSSLESS, NAIVE, "rapid+eta=10")
            records += self._measure(task, length, count, methods, how=_How(part_tokens=length // share))
        yield from self._summarise(records, SWEEP, overall=False, baselines=(LC, NAIVE))

    def unrelated(self, length: int, count: int) -> Iterator[Measurement]:
        """The first row's part for all rows (Table 3)."""
        methods = (LC, *(with_eta(eta) for eta in (0, *ETAS)))
        first, *rows = self.rows(length, count + 1)
        other = cache(lambda: self.subjects.part(first, length // _PART))
        task = f"{UNRELATED}/{length:,} tokens"
        records = self._measure(
            task, length, count, methods, rows=rows, how=_How(part=other, ends=True, new=32)
        )
        yield from self._summarise(records, UNRELATED, overall=False)

    def quality(self) -> Iterator[Measurement]:
        """Right answers and the gold answer's log-probability (Table 1, Figure 2)."""
        methods = (LC, LOSSLESS, NAIVE, *(with_eta(eta) for eta in self.size.etas), RAG)
        encode, folder = self.subjects.encode, self.context.data
        sets: dict[str, list[LongRow]] = {}
        for length, count in self.size.quality:
            sets[f"needle, {length:,} tokens"] = list(data.needles(folder, encode, length - 200, count))
            sets[f"key-value, {length:,} tokens"] = list(data.key_values(encode, length - 200, count))
        most, tokens = self.size.long_bench
        if most:
            found = data.long_bench(folder, data.ANSWERED, encode, 1000, tokens)
            sets["LongBench v1"] = found[:: max(len(found) // most, 1)][:most]
            sets["LongBench v2"] = data.long_bench_v2(folder, encode, tokens)[:most]
        records: list[Record] = []
        for task, rows in sets.items():
            length = max((len(encode(row.document)) for row in rows), default=0)
            if rows:
                records += self._measure(
                    f"{QUALITY}/{task}", length, len(rows), methods, rows=rows, how=_How(ends=True, new=32)
                )
        yield from self._summarise(records, QUALITY)

    def upward(self, length: int, count: int) -> Iterator[Measurement]:
        """The whole model drafts for itself without some of its layers (the paper's upward speculation)."""
        left_out = self.size.left_out
        label = f"{self.model} without layers {left_out[0]} to {left_out[-1]}"
        folder = without_layers(self.model, left_out, self.context.out / ".records")
        subjects = Subjects(
            str(folder), self.context.device, scoring=self.subjects.scoring, window=self.size.window
        )
        etas = (0, *self.size.etas)
        methods = (LC, *(with_eta(eta) for eta in etas), *(with_eta(eta, self.model) for eta in etas), RAG)
        encode, data_folder = self.subjects.encode, self.context.data
        room = length - 200
        sets = {
            "needle": list(data.needles(data_folder, encode, room, count)),
            "key-value": list(data.key_values(encode, room, count)),
            "LongBench v1": data.long_bench(data_folder, data.ANSWERED, encode, 1000, length)[:count],
        }
        records: list[Record] = []
        for name, rows in sets.items():
            task = f"{UPWARD}/{name}, {length:,} tokens"
            if rows:
                records += self._measure(
                    task,
                    length,
                    len(rows),
                    methods,
                    rows=rows,
                    how=_How(subjects=subjects, ends=True, new=32, drafter=self.model),
                )
        subjects.close()
        yield from self._summarise(records, UPWARD, model=label)

    def conversations(self, length: int, count: int) -> Iterator[Measurement]:
        """Dialogues spread in a long chat history: speed, and replies rated by a judge (Table 2)."""
        rows = data.conversations(self.context.data, self.subjects.encode, length, count)
        if not rows:
            return
        methods = (LC, LOSSLESS, NAIVE, "rapid+eta=10", "rapid+eta=20", RAG)
        task = f"{CONVERSATION}/{length:,} tokens"
        records = self._measure(task, length, count, methods, rows=rows, how=_How(ends=True))
        for entry in self._summarise(records, CONVERSATION, overall=False):
            yield replace(entry, extra={**entry.extra, "judge": self.judge.name})

    def exactness(self) -> Iterator[Measurement]:
        """The plain text in fp32, token for token."""
        if not self.size.exact:
            return
        self._exact = Subjects(
            self.model, self.context.device, "fp32", scoring=self.subjects.scoring, window=self.size.window
        )
        methods = (LC, LOSSLESS, NAIVE, STREAMING)
        records: list[Record] = []
        for length in self.size.exact:
            task = f"{_EXACT}/{length:,} tokens"
            records += self._measure(task, length, 2, methods, how=_How(subjects=self._exact))
        yield from self._summarise(records, _EXACT, dtype="fp32")
        self._exact.close()

    # -- rows -----------------------------------------------------------------------------------------------

    def _section(
        self, name: str, length: int, count: int, methods: Sequence[str], *, temperature: float
    ) -> Iterator[Measurement]:
        records = self._measure(
            f"{name}/{length:,} tokens", length, count, methods, how=_How(temperature=temperature)
        )
        yield from self._summarise(records, name, overall=False)

    def _measure(
        self,
        task: str,
        length: int,
        count: int,
        methods: Sequence[str],
        *,
        rows: Sequence[LongRow] | None = None,
        how: _How | None = None,
    ) -> list[Record]:
        how = how or _How()
        mine = how.subjects or self.subjects
        wanted = self.size.new if how.new is None else how.new

        def prepare(row: LongRow) -> Mapping[str, Trial]:
            prepared: Prepared = mine.prepare(
                row, how.part_tokens or max(length // _PART, 128), None if how.part is None else how.part()
            )
            if how.ends:
                mine.score_gold(prepared, how.drafter)
            return {
                label: mine.trial(label, prepared, wanted, ends=how.ends, temperature=how.temperature)
                for label in methods
            }

        made = [
            Row(
                name=f"{self.model} {row.name}",
                task=task,
                methods=tuple(methods),
                prepare=lambda row=row: prepare(row),  # type: ignore[misc]
            )
            for row in (self.rows(length, count) if rows is None else rows)
        ]
        plan = self.context.plan(1, warmups=0 if mine.warm else 1, warm_each_row=False)
        mine.warm = True
        return self.context.measure(f"{self.model}, {task}", made, plan)

    def _rows(self, length: int, count: int) -> list[LongRow]:
        decode = self.subjects.tokenizer.decode
        return data.mixed(self.context.data, self.subjects.encode, decode, length, count)

    def _summarise(
        self,
        records: Sequence[Record],
        section: str,
        *,
        baselines: Sequence[str] = (LC,),
        overall: bool = True,
        dtype: str | None = None,
        model: str | None = None,
    ) -> Iterator[Measurement]:
        figures = Figures(records)
        for entry in self.context.summarise(
            records,
            baselines=baselines,
            dtype=dtype or half_precision(self.context.device),
            model=model or self.model,
            overall=overall,
            extra=figures.of,
        ):
            yield replace(entry, task=f"{section}/{OVERALL}") if entry.task == OVERALL else entry
