"""``specrag bench knnlm``: does kNN-LM help, is speculation on it exact, and how much faster is it?

The sections are ordered so that every table has a figure early: of each datastore the fastest rows come first, the
largest datastore comes last, and a later run with more repeats adds to them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.knnlm import perplexity, pictures
from benchmarks.knnlm.figures import summarise
from benchmarks.knnlm.pictures import EXACT, SLOWED, SPEED
from benchmarks.knnlm.stores import PASSAGES, VALID, SlowedKeys, Store, Stores, flat_keys
from benchmarks.knnlm.subjects import (
    ASYNCHRONOUS,
    BOTH,
    FIXED,
    SCHEDULED,
    SEQUENTIAL,
    UNCAPPED,
    VARIANTS,
    WEIGHED,
    Subjects,
)
from benchmarks.passages.subjects import Models
from specrag.bench.interleave import Row, Trial
from specrag.bench.machine import half_precision
from specrag.bench.measurement import Measurement
from specrag.bench.records import Record
from specrag.bench.suite import BenchContext
from specrag.methods.knn_lm.mixture import Mixture

if TYPE_CHECKING:
    from specrag.methods.knn_lm.store.index import KeyIndex
    from specrag.request import Options


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured.

    Attributes:
        helping: datastores of the perplexity section; tokens of the test text.
        exact: datastore of the exactness section, neighbours, prompts, tokens of a text, variants a prompt.
        fast: datastores of the speed section, the small ones first, neighbours, prompts, tokens, methods, repeats.
        slowed: R/G of an index slowed down, over the first of ``fast``.
        prompt: tokens of a prompt.
    """

    helping: tuple[Store, ...]
    helping_tokens: int
    exact: Store
    exact_k: tuple[int, ...]
    exact_prompts: int
    exact_new: int
    exact_variants: int
    fast: tuple[Store, ...]
    fast_k: tuple[int, ...]
    fast_prompts: int
    fast_new: int
    fast_methods: tuple[str, ...]
    repeats: int
    slowed: tuple[float, ...]
    prompt: int = 64


_VALID = Store("WikiText valid, 200,000 entries", VALID, 200_000, 200_000, hnsw=True)
_MILLION = Store("Wikipedia, 1,000,000 entries", PASSAGES, 1_000_000, 1_000_000, hnsw=True)
_FIVE = Store("Wikipedia and noisy copies, 5,000,000 entries", PASSAGES, 5_000_000, 1_000_000)
_SAMPLE = Store("sample", "", 2_000, 2_000, hnsw=True)
_ENLARGED = Store("sample and noisy copies, 8,000 entries", "", 8_000, 2_000)

FULL = Size(
    helping=(_VALID, _MILLION),
    helping_tokens=20_000,
    exact=_VALID,
    exact_k=(1, 8, 64, 256, 1024),
    exact_prompts=50,
    exact_new=24,
    exact_variants=1,
    fast=(_VALID, _MILLION, _FIVE),
    fast_k=(8, 1024, 1, 64, 256),
    fast_prompts=3,
    fast_new=48,
    fast_methods=tuple(name for name in VARIANTS if name not in ("knn-lm+A", "knn-lm+SA")),
    repeats=1,
    slowed=(1.0, 5.0, 20.0, 50.0),
)
QUICK = Size(
    helping=(_SAMPLE,),
    helping_tokens=200,
    exact=_SAMPLE,
    exact_k=(1, 64),
    exact_prompts=1,
    exact_new=8,
    exact_variants=2,
    fast=(_SAMPLE, _ENLARGED),
    fast_k=(64,),
    fast_prompts=1,
    fast_new=8,
    fast_methods=(SEQUENTIAL, FIXED, "knn-lm+stride=8", UNCAPPED, ASYNCHRONOUS),
    repeats=1,
    slowed=(5.0,),
    prompt=16,
)


#: The mixture of the speed and exactness sections.
WEIGHT, TEMPERATURE = 0.25, 3.0
_SEED = 7
_CALIBRATION = "calibration"


class KnnLmSuite:
    """kNN-LM, sequential and speculative.

    Args:
        size: how much is measured; None for the usual quick or full run.
    """

    name = "knnlm"
    summary = (
        "kNN-LM: before every token the neighbours of its hidden state (the input of the last feed-forward block) are "
        "searched in a datastore, and their next tokens count a quarter. `sequential` searches one token after the "
        "other; `knn-lm` guesses tokens from the entries that follow earlier neighbours and verifies a stride of them "
        "in one search (3, or as named); S is the scheduler OS3, `uncapped` without the paper's cap of 0.6, A "
        "asynchronous verification, P followers of 64 neighbours (else of k, at most 32). `cost-aware` guesses nothing "
        "where no stride pays. `respec` also reads what ReSpec guesses, so that a pass gives several tokens. "
        "Greedy, bf16, end tokens ignored. "
        "`identical` is the share of texts equal to the baseline's and must be 1, but for `respec` in the sections of "
        "speed: in bf16 several rows of a pass are rounded otherwise than one. For exactness the model is "
        "batch-invariant, and it must be 1 there too. R and G are `retrieval` and "
        "`generation`; `best stride speedup` is that of the best stride up to 16, by brute force at the measured a, "
        "b(s) and match rate, relative to the baseline's measured seconds a token: the method's own steps, no ceiling. "
        "`ceiling` is 1 + R/G, where a pass gives one token. Datastores with noisy copies and slowed indexes "
        "are simulated. Perplexities are of the second half of the test text, with weight and temperature chosen on "
        "the first."
    )

    def __init__(self, size: Size | None = None) -> None:
        self.size = size

    def run(self, context: BenchContext) -> Iterator[Measurement]:
        bench = _Bench(context, self.size or (QUICK if context.quick else FULL))
        try:
            first, others = bench.size.fast[:1], bench.size.fast[1:]
            yield from bench.perplexity(bench.size.helping[:1])
            yield from bench.speed(first)
            yield from bench.slowed()
            yield from bench.perplexity(bench.size.helping[1:])
            yield from bench.speed(others)
            yield from bench.exactness()
        finally:
            bench.close()

    def pictures(self, measurements: Sequence[Measurement], folder: Path) -> Sequence[Path]:
        """Speed-ups over k, stride and R/G, and perplexities over k."""
        return pictures.draw(measurements, folder)


def suite() -> KnnLmSuite:
    """The suite, for the registry."""
    return KnnLmSuite()


class _Bench:
    """One run."""

    def __init__(self, context: BenchContext, size: Size) -> None:
        self.context = context
        self.size = size
        self.models = Models(context.model, context.device)
        # Elsewhere no pass has equal bits, and texts with a decoder may part.
        # In fp32 a row has the same neighbours whatever else is in its pass.
        invariant = context.device == "cpu" and half_precision("cpu") == "bf16"
        self.exact_models = Models(context.model, context.device, batch_invariant=invariant)
        self.stores = Stores(context, self.models)
        self._subjects: dict[tuple[str, int], Subjects] = {}

    def close(self) -> None:
        self._subjects.clear()
        self.stores.close()
        self.models.close()
        self.exact_models.close()

    @cached_property
    def prompts(self) -> list[list[int]]:
        return self.stores.prompts(max(self.size.exact_prompts, self.size.fast_prompts), self.size.prompt)

    # -- sections -------------------------------------------------------------------------------------------

    def perplexity(self, stores: Sequence[Store]) -> Iterator[Measurement]:
        """With and without neighbours, by datastore and k."""
        for store in stores:
            yield from perplexity.measure(
                self.context, self.models, self.stores, store, self.size.exact_k, self.size.helping_tokens
            )

    def speed(self, stores: Sequence[Store]) -> Iterator[Measurement]:
        """Whole texts by datastore, index and k."""
        for store in stores:
            for index in ("flat", "hnsw") if store.hnsw else ("flat",):
                for k in self.size.fast_k:
                    task = f"{SPEED}/{store.title}, {index}, k={k}"
                    records = self._measure(task, store, index, k, self.size.fast_methods)
                    yield from summarise(
                        self.context,
                        records,
                        dtype=half_precision(self.context.device),
                        simulated=store.simulated,
                    )

    def slowed(self) -> Iterator[Measurement]:
        """An index slowed so that R is a given multiple of G."""
        if not self.size.slowed:
            return
        store, k = self.size.fast[0], self.size.fast_k[0]
        calibration = self._measure(_CALIBRATION, store, "flat", k, (SEQUENTIAL,))
        seen = [record.outcome.figures for record in calibration if record.outcome is not None]
        if not seen:  # the calibration has failed, and the page says so
            return
        for ratio in self.size.slowed:
            seconds = median(
                max(ratio * each["generation_ms"] - each["retrieval_ms"], 0.0) / each["chunks"] / 1e3
                for each in seen
            )
            task = f"{SLOWED}/R to G {ratio:g}"
            methods = (SEQUENTIAL, BOTH, FIXED, SCHEDULED, UNCAPPED, WEIGHED, ASYNCHRONOUS)
            records = self._measure(task, store, "flat", k, methods, delay=seconds)
            for entry in summarise(
                self.context, records, dtype=half_precision(self.context.device), simulated=True
            ):
                yield replace(entry, extra={**entry.extra, "delay_ms": 1e3 * seconds})

    def exactness(self) -> Iterator[Measurement]:
        """Equality with one search after the other: every k, index and way of drawing; the variants take turns."""
        variants = [name for name in VARIANTS if name != SEQUENTIAL]
        store = self.size.exact
        # `--rows` is for what is timed: that one text is equal says little.
        context = replace(self.context, rows=None)
        for k in self.size.exact_k:
            for index in ("flat", "hnsw"):
                for temperature in (0.0, 0.8):
                    drawn = "greedy" if temperature == 0 else f"temperature {temperature}"
                    task = f"{EXACT}/k={k}, {index}, {drawn}"
                    options: Options = {
                        "max_tokens": self.size.exact_new,
                        "temperature": temperature,
                        "seed": _SEED,
                    }
                    rows = []
                    for number in range(self.size.exact_prompts):
                        turn = number * self.size.exact_variants
                        chosen = [
                            variants[(turn + place) % len(variants)]
                            for place in range(self.size.exact_variants)
                        ]
                        methods = (SEQUENTIAL, *chosen)
                        rows.append(self._row(task, number, store, index, k, methods, options))
                    records = context.measure(task, rows, context.plan(1, warmups=0))
                    for entry in summarise(context, records, dtype=half_precision(context.device)):
                        if entry.method != SEQUENTIAL:
                            yield replace(entry, speedup=None, speedup_low=None, speedup_high=None, extra={})

    # -- rows -----------------------------------------------------------------------------------------------

    def _measure(
        self,
        task: str,
        store: Store,
        index: str,
        k: int,
        methods: Sequence[str],
        delay: float | None = None,
    ) -> list[Record]:
        options: Options = {"max_tokens": self.size.fast_new}
        rows = [
            self._row(task, number, store, index, k, methods, options, delay)
            for number in range(self.size.fast_prompts)
        ]
        return self.context.measure(task, rows, self.context.plan(self.size.repeats, warm_each_row=False))

    def _row(
        self,
        task: str,
        number: int,
        store: Store,
        index: str,
        k: int,
        methods: Sequence[str],
        options: Options,
        delay: float | None = None,
    ) -> Row:
        def prepare() -> Mapping[str, Trial]:
            subjects = self._subject(task, store, index, k, delay)
            return subjects.trials(methods, self.prompts[number], options)

        return Row(name=f"prompt {number}", task=task, methods=tuple(methods), prepare=prepare)

    def _subject(self, task: str, store: Store, index: str, k: int, delay: float | None) -> Subjects:
        """Methods that learn within one task."""
        if (task, k) not in self._subjects:
            self._subjects.clear()
            datastore = self.stores.get(store)
            keys: KeyIndex = (
                datastore.index(index) if delay is None else SlowedKeys(flat_keys(datastore), delay)
            )
            mixture = Mixture(min(k, len(datastore)), WEIGHT, TEMPERATURE)
            models = self.exact_models if task.startswith(EXACT) else self.models
            self._subjects[task, k] = Subjects(models.get(), datastore, keys, mixture)
        return self._subjects[task, k]
