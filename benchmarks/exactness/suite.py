"""``specrag bench exactness``: is speculated text plain decoding's text?

With ``batch_invariant`` every output must be equal. Without it, a pass of many rows rounds differently from a
pass of one; then the share of equal outputs is reported, and how near the two candidate tokens were where an
output first differs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.tokens.suite import questions
from specrag.bench.data import find_file, load_spec_bench
from specrag.bench.interleave import Row, Trial
from specrag.bench.measurement import Measurement
from specrag.bench.records import Outcome, Record
from specrag.bench.suite import BenchContext
from specrag.request import Options

if TYPE_CHECKING:
    from specrag.language_model import LanguageModel
    from specrag.methods.base import Decoder
    from specrag.request import Result

_DATA = "specbench_480.jsonl"
_NEW_TOKENS = 128
#: Requests that share passes.
_TOGETHER = 16
_TEMPERATURES = (0.0, 0.8)
_SEED = 7
#: Alternatives told beside each token of plain decoding, among which the other token of a difference is found.
_ALTERNATIVES = 20


@dataclass(frozen=True)
class _Setting:
    """A way to compute."""

    label: str
    dtype: str
    batch_invariant: bool
    per_task: int | None
    """Questions of each task, ``None`` for all."""


_FULL = (
    _Setting("int8 invariant", "int8", batch_invariant=True, per_task=None),
    _Setting("bf16", "bf16", batch_invariant=False, per_task=8),
    _Setting("fp32", "fp32", batch_invariant=False, per_task=4),
)
_LARGER_MODEL = (_Setting("int8 invariant", "int8", batch_invariant=True, per_task=4),)
_QUICK = (_Setting("int8 invariant", "int8", batch_invariant=True, per_task=1),)


class ExactnessSuite:
    """Equality with plain decoding."""

    name = "exactness"
    summary = (
        "The share of Spec-Bench outputs (first turns, at most 128 new tokens, 16 requests at once) that equal "
        "plain decoding's token for token, greedy and sampled at temperature 0.8 with the same seed. With "
        "`batch_invariant` it must be 1. Elsewhere `margin_nats` is the median distance between the two tokens "
        "at the first difference, in nats of plain decoding's distribution, and `widest_nats` the largest one."
    )

    def run(self, context: BenchContext) -> Iterator[Measurement]:
        from benchmarks.tokens.subjects import DRAFT_MODEL

        larger = context.model != DRAFT_MODEL
        for setting in _QUICK if context.quick else _LARGER_MODEL if larger else _FULL:
            yield from self._setting(context, setting)

    def _setting(self, context: BenchContext, setting: _Setting) -> Iterator[Measurement]:
        from benchmarks.tokens.subjects import lossless
        from specrag.language_model import load

        methods = lossless(context.model)

        llm = load(
            context.model,
            dtype=setting.dtype,
            device=context.device,
            batch_invariant=setting.batch_invariant,
        )
        new = 16 if context.quick else _NEW_TOKENS
        prompts = [llm.encode(text) for text in _texts(context, setting)]
        count = -(-len(prompts) // _TOGETHER)
        batches = [prompts[number::count] for number in range(count)]  # each has questions of every task

        def prepare(batch: Sequence[list[int]], temperature: float) -> Mapping[str, Trial]:
            request = _Request(llm, batch, temperature, new)
            return {label: _trial(request, make()) for label, make in methods.items()}

        rows = [
            Row(
                name=f"batch {number}",
                task=f"{setting.label}/{'greedy' if temperature == 0 else f'temperature {temperature}'}",
                methods=tuple(methods),
                prepare=lambda batch=batch, temperature=temperature: prepare(batch, temperature),  # type: ignore[misc]
            )
            for temperature in _TEMPERATURES
            for number, batch in enumerate(batches)
        ]
        records = context.measure(setting.label, rows, context.plan(1, warmups=0))
        llm.close()
        groups: dict[tuple[str, str], list[Record]] = {}
        for record in records:
            groups.setdefault((record.key.task, record.key.method), []).append(record)
        for (task, method), group in groups.items():
            made = [record.outcome.figures for record in group if record.outcome is not None]
            count = sum(int(figures["outputs"]) for figures in made)
            margins = [value for figures in made for name, value in figures.items() if "margin" in name]
            equal = sum(int(figures["equal"]) for figures in made)
            measurement = context.measurement(
                task=task,
                method=method,
                baseline="plain",
                dtype=setting.dtype,
                n=count,
                extra={
                    "equal": equal,
                    "failed_batches": len(group) - len(made),
                    "margin_nats": median(margins) if margins else None,
                    "widest_nats": max(margins) if margins else None,
                },
            )
            yield replace(measurement, identical=equal / count if count else None)


def _texts(context: BenchContext, setting: _Setting) -> list[str]:
    if setting.per_task is None and context.data is not None:
        return [question.turns[0] for question in load_spec_bench(find_file(context.data, _DATA))]
    return [question.turns[0] for question in questions(context, setting.per_task or 1)]


@dataclass(frozen=True)
class _Request:
    """Prompts that share passes, and what plain decoding makes of them."""

    llm: LanguageModel
    batch: Sequence[list[int]]
    temperature: float
    new: int

    def made_by(self, method: Decoder) -> list[Result]:
        return self.llm.batch(self.batch, **self._options(method))

    @cached_property
    def plain(self) -> list[Result]:
        """Made once, by whichever method comes first: their order changes from row to row."""
        options: Options = {**self._options("plain"), "log_probs": _ALTERNATIVES}
        return self.llm.batch(self.batch, **options)

    def _options(self, method: Decoder | str) -> Options:
        return {"method": method, "max_tokens": self.new, "temperature": self.temperature, "seed": _SEED}


def _trial(request: _Request, method: Decoder) -> Callable[[], Outcome]:
    def run() -> Outcome:
        reference = request.plain
        started = time.perf_counter()
        made = request.made_by(method)
        seconds = time.perf_counter() - started
        figures: dict[str, float] = {"outputs": len(made), "equal": 0}
        for number, (mine, plain) in enumerate(zip(made, reference, strict=True)):
            place = _first_difference(mine, plain)
            if place is None:
                figures["equal"] += 1
            elif place < min(len(mine.tokens), len(plain.tokens)):
                figures[f"margin_{number}"] = _margin(mine, plain, place)
        tokens = sum(len(generation.tokens) for generation in made)
        passes = sum(generation.usage.passes for generation in made)
        return Outcome(tokens=tokens, seconds=seconds, passes=passes, figures=figures)

    return run


def _first_difference(mine: Result, plain: Result) -> int | None:
    ours = [token.token for token in mine.tokens]
    theirs = [token.token for token in plain.tokens]
    if ours == theirs:
        return None
    shorter = min(len(ours), len(theirs))
    return next((place for place in range(shorter) if ours[place] != theirs[place]), shorter)


def _margin(mine: Result, plain: Result, place: int) -> float:
    """Nats between the two tokens in plain decoding's distribution; the least it can be if one is unlisted."""
    chosen: Any = plain.tokens[place]
    other = mine.tokens[place].token
    known = {alternative.token: alternative.log_prob for alternative in chosen.alternatives}
    lowest = min(known.values())
    return float(abs(chosen.log_prob - known.get(other, lowest)))


def suite() -> ExactnessSuite:
    """The suite, as the registry finds it."""
    return ExactnessSuite()
