"""``specrag bench engine``: plain decoding against transformers, and what a pass costs.

No method is faster than its baseline is good, so this suite comes first. It measures decoding behind short and
long contexts, one pass by rows and context beside the least time that the machine allows it, requests at once,
prefill, forks, memory, and what 8-bit weights, or keys and values, cost in perplexity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.engine import memory
from benchmarks.engine.subjects import Engine, Ours, Transformers
from specrag.bench.bounds import DecoderShape, decoder_work, pass_floor
from specrag.bench.data import load_text, token_prompts
from specrag.bench.interleave import Row, Trial
from specrag.bench.machine import Rates, measure_rates
from specrag.bench.measurement import Extra, Measurement
from specrag.bench.plots import Axis, Series, line_plot
from specrag.bench.records import Record
from specrag.bench.suite import BenchContext
from specrag.bench.summary import Summary

PLAIN, INT8, INVARIANT, TRANSFORMERS = "plain", "plain+int8", "plain+invariant", "transformers"
PACKED = "plain+packed"
#: Keys and values in 8 bits.
KV8 = "plain+kv8"

#: Variants of our engine: how each is loaded.
_OURS: Mapping[str, Mapping[str, Any]] = {
    PLAIN: {"dtype": "bf16"},
    INT8: {"dtype": "int8"},
    INVARIANT: {"dtype": "bf16", "batch_invariant": True},
    KV8: {"dtype": "bf16", "kv_dtype": "int8"},
}
_PASS_ROWS = (1, 2, 4, 8, 16, 32, 64)
_NEW_TOKENS = 32


class EngineSuite:
    """Plain decoding and its parts."""

    name = "engine"
    summary = (
        "Plain decoding of this engine against transformers' own `generate`, and the cost of one pass by rows and "
        "context. `plain` is bf16; `+int8` has 8-bit linear layers; `+invariant` gives every row the same bits "
        "whatever else is in its pass; `+kv8` keeps keys and values in 8 bits. Floors are the bytes to read and the "
        "operations to do at the bandwidth and "
        "rate measured in the same run."
    )

    def run(self, context: BenchContext) -> Iterator[Measurement]:
        engines = Engines(context)
        lengths = (100, 1000) if context.quick else (100, 1000, 4000, 7500)
        yield from self._decoding(context, engines, lengths)
        yield from self._passes(context, engines, lengths)
        yield from self._requests(context, engines)
        yield from self._prefill(context, engines, lengths)
        yield from self._forks(context, engines, lengths)
        if not context.quick:
            yield from self._memory(context)
        yield from self._perplexity(context, engines)

    def _decoding(
        self, context: BenchContext, engines: Engines, lengths: Sequence[int]
    ) -> Iterator[Measurement]:
        methods = (PLAIN, INT8, TRANSFORMERS) if context.quick else (*_OURS, TRANSFORMERS)
        new = 16 if context.quick else _NEW_TOKENS

        def prepare(length: int) -> Mapping[str, Trial]:
            prompt = _prompt(context, engines, length)
            return {name: engines.get(name).decoding(prompt, new) for name in methods}

        rows = [_row("decode/behind", length, methods, prepare) for length in lengths]
        records = context.measure("decoding", rows, context.plan(3 if context.quick else 7))
        yield from _summarise(context, records, [TRANSFORMERS, PLAIN])

    def _passes(
        self, context: BenchContext, engines: Engines, lengths: Sequence[int]
    ) -> Iterator[Measurement]:
        methods = (PLAIN, INT8, TRANSFORMERS)
        counts = (1, 16) if context.quick else _PASS_ROWS
        rates = measure_rates(context.device)

        def prepare(length: int, count: int) -> Mapping[str, Trial]:
            tokens = _prompt(context, engines, length + count)
            return {name: engines.get(name).passing(tokens[:length], tokens[length:]) for name in methods}

        for length in lengths:
            rows = [
                Row(
                    name=str(count),
                    task=f"pass behind {length}/rows {count}",
                    methods=methods,
                    prepare=lambda length=length, count=count: prepare(length, count),  # type: ignore[misc]
                )
                for count in counts
            ]
            records = context.measure(
                f"passes behind {length}", rows, context.plan(5 if context.quick else 7)
            )
            yield from _summarise(
                context,
                records,
                [TRANSFORMERS],
                lambda summary, length=length: _floor(  # type: ignore[misc]
                    summary, engines.ours(PLAIN).shape, length, rates
                ),
            )

    def _requests(self, context: BenchContext, engines: Engines) -> Iterator[Measurement]:
        methods = (PLAIN, PACKED)
        new = 16 if context.quick else _NEW_TOKENS

        def prepare(count: int) -> Mapping[str, Trial]:
            encode = engines.ours(PLAIN).encode
            prompts = token_prompts(load_text(context.data), encode, length=100, count=count)
            ours = engines.ours(PLAIN)
            return {
                PLAIN: ours.requests(prompts, new, packed=False),
                PACKED: ours.requests(prompts, new, packed=True),
            }

        counts = (8,) if context.quick else (2, 4, 8, 16)
        rows = [_row("requests/at once", count, methods, prepare) for count in counts]
        records = context.measure("requests", rows, context.plan(2 if context.quick else 3))
        yield from _summarise(context, records, [PLAIN])

    def _prefill(
        self, context: BenchContext, engines: Engines, lengths: Sequence[int]
    ) -> Iterator[Measurement]:
        methods = (PLAIN, INT8, TRANSFORMERS)

        def prepare(length: int) -> Mapping[str, Trial]:
            prompt = _prompt(context, engines, length)
            return {name: engines.get(name).prefilling(prompt) for name in methods}

        rows = [_row("prefill/tokens", length, methods, prepare) for length in lengths]
        plan = context.plan(2 if context.quick else 3, warm_each_row=False)
        records = context.measure("prefill", rows, plan)
        yield from _summarise(context, records, [TRANSFORMERS])

    def _forks(
        self, context: BenchContext, engines: Engines, lengths: Sequence[int]
    ) -> Iterator[Measurement]:
        def prepare(length: int) -> Mapping[str, Trial]:
            prompt = _prompt(context, engines, length)
            return {name: engines.ours(name).forking(prompt) for name in (PLAIN, KV8)}

        rows = [_row("fork and memory/behind", length, (PLAIN, KV8), prepare) for length in lengths]
        records = context.measure("forks", rows, context.plan(3))
        yield from _summarise(context, records, [PLAIN])

    def _memory(self, context: BenchContext) -> Iterator[Measurement]:
        dtypes = {PLAIN: "bf16", INT8: "int8", TRANSFORMERS: memory.TRANSFORMERS}

        def prepare(length: int) -> Mapping[str, Trial]:
            return {
                name: memory.memory_trial(
                    context.model, dtype, context.device, length=length, new=_NEW_TOKENS
                )
                for name, dtype in dtypes.items()
            }

        rows = [_row("a process of its own/reading", 4000, tuple(dtypes), prepare)]
        records = context.measure("memory", rows, context.plan(2))
        yield from _summarise(context, records, [TRANSFORMERS])

    def _perplexity(self, context: BenchContext, engines: Engines) -> Iterator[Measurement]:
        methods = (PLAIN, INT8, KV8)

        def prepare(length: int) -> Mapping[str, Trial]:
            encode = engines.ours(PLAIN).encode
            windows = token_prompts(
                load_text(context.data), encode, length=length, count=2 if context.quick else 24
            )
            return {name: engines.ours(name).perplexity(windows) for name in methods}

        rows = [_row("perplexity/window", 256 if context.quick else 1024, methods, prepare)]
        records = context.measure("perplexity", rows, context.plan(1, warmups=0))
        yield from _summarise(context, records, [PLAIN])

    def pictures(self, measurements: Sequence[Measurement], folder: Path) -> Sequence[Path]:
        """Milliseconds of a pass over rows, a picture for each context; milliseconds a token over the context."""
        made = []
        sections = sorted(
            {entry.task.split("/")[0] for entry in measurements if entry.task.startswith("pass behind")},
            key=lambda section: int(section.split()[-1]),
        )
        for section in sections:
            series = [
                _series(measurements, method, f"{section}/rows ", "milliseconds")
                for method in (TRANSFORMERS, PLAIN, INT8)
            ]
            series.append(_series(measurements, PLAIN, f"{section}/rows ", "floor_ms", label="floor, bf16"))
            made.append(
                line_plot(
                    folder / f"engine-{section.replace(' ', '-')}.png",
                    [entry for entry in series if entry is not None],
                    title=f"One pass {section.removeprefix('pass ')} tokens",
                    x=Axis(label="new rows", log=True),
                    y=Axis(label="milliseconds"),
                )
            )
        decoding = [
            _series(measurements, method, "decode/behind ", "milliseconds_a_token")
            for method in (TRANSFORMERS, *_OURS)
        ]
        if any(decoding):
            made.append(
                line_plot(
                    folder / "engine-decode.png",
                    [entry for entry in decoding if entry is not None],
                    title="Plain decoding",
                    x=Axis(label="tokens of context", log=True),
                    y=Axis(label="milliseconds a token"),
                )
            )
        return made


class Engines:
    """Each engine, loaded when it is first needed: a run that only resumes loads nothing."""

    def __init__(self, context: BenchContext) -> None:
        self._context = context
        self._loaded: dict[str, Ours] = {}
        self._transformers: Transformers | None = None

    def ours(self, name: str) -> Ours:
        """A variant of this engine, by its method name."""
        if name not in self._loaded:
            self._loaded[name] = Ours(self._context.model, self._context.device, **_OURS[name])
        return self._loaded[name]

    def get(self, name: str) -> Engine:
        """Any engine, by its method name."""
        if name != TRANSFORMERS:
            return self.ours(name)
        if self._transformers is None:
            self._transformers = Transformers(self._context.model, self._context.device)
        return self._transformers


def suite() -> EngineSuite:
    """The suite, for the registry."""
    return EngineSuite()


def _row(
    task: str, number: int, methods: tuple[str, ...], prepare: Callable[[int], Mapping[str, Trial]]
) -> Row:
    return Row(name=str(number), task=f"{task} {number}", methods=methods, prepare=lambda: prepare(number))


def _prompt(context: BenchContext, engines: Engines, length: int) -> list[int]:
    return token_prompts(load_text(context.data), engines.ours(PLAIN).encode, length=length, count=1)[0]


def _summarise(
    context: BenchContext,
    records: Sequence[Record],
    baselines: Sequence[str],
    extra: Callable[[Summary], Mapping[str, Extra]] = lambda _: {},
) -> Iterator[Measurement]:
    """Measurements with their milliseconds a token, and the dtype that each method's weights have."""

    def with_token_time(summary: Summary) -> Mapping[str, Extra]:
        speed = summary.tokens_per_second
        return {**({"milliseconds_a_token": 1000 / speed} if speed else {}), **extra(summary)}

    for entry in context.summarise(
        records, baselines=baselines, dtype="bf16", overall=False, extra=with_token_time
    ):
        yield replace(entry, dtype="int8") if INT8 in entry.method else entry


def _floor(summary: Summary, shape: DecoderShape, length: int, rates: Rates) -> Mapping[str, Extra]:
    """The least time of this pass on this machine, and the share of it that was reached."""
    int8 = INT8 in summary.method
    rate = rates.int8_gop_s if int8 else rates.bf16_gflop_s
    milliseconds = summary.extra.get("milliseconds")
    if rate is None or not isinstance(milliseconds, float):
        return {}
    work = decoder_work(
        shape,
        rows=int(summary.task.rsplit(" ", 1)[1]),
        context=length,
        weight_bytes=1.0 if int8 else 2.0,
        cache_bytes=2.0,
    )
    floor = pass_floor(work, read_gb_s=rates.read_gb_s, rate_gop_s=rate)
    return {
        "floor_ms": 1000 * floor.seconds,
        "floor_by": floor.bound_by,
        "floor_share": 1000 * floor.seconds / milliseconds,
    }


def _series(
    measurements: Sequence[Measurement], method: str, prefix: str, figure: str, *, label: str | None = None
) -> Series | None:
    points: dict[float, float] = {}
    for entry in measurements:
        value = entry.extra.get(figure)
        if entry.method == method and entry.task.startswith(prefix) and isinstance(value, int | float):
            points[float(entry.task.removeprefix(prefix))] = float(value)
    if not points:
        return None
    return Series(
        label=label or method,
        x=sorted(points),
        y=[points[x] for x in sorted(points)],
        reference=label is not None,
    )
