"""``specrag bench tokens``: ReSpec and its rivals on Spec-Bench, beside transformers' own methods."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.tokens import quality, scale
from specrag.bench.data import SPEC_BENCH_TASKS, Question, find_file, load_spec_bench, load_text
from specrag.bench.interleave import Row, Trial
from specrag.bench.machine import half_precision
from specrag.bench.measurement import OVERALL, Extra, Measurement
from specrag.bench.plots import speedup_plot
from specrag.bench.records import Outcome, Record
from specrag.bench.statistics import geometric_mean
from specrag.bench.suite import BenchContext
from specrag.bench.summary import Summary

if TYPE_CHECKING:
    from benchmarks.tokens.subjects import Prompt

_DATA = "specbench_480.jsonl"
_TASKS = ("multi-turn", *SPEC_BENCH_TASKS)
#: Questions of each task; those with even ids, since the odd ones are for tuning.
_ABLATION_PER_TASK = 4


@dataclass(frozen=True)
class _Size:
    """How much the time allows.

    Args:
        per_task: questions of each task.
        new: most new tokens.
        parts: also measure the parts of ReSpec, relaxed text and the cost of a proposal.
    """

    per_task: int
    new: int
    parts: bool


_QUICK = _Size(per_task=1, new=24, parts=False)
_SMALL_MODEL = _Size(per_task=8, new=128, parts=True)
_LARGER_MODEL = _Size(per_task=4, new=64, parts=False)


class TokensSuite:
    """Token speculation."""

    name = "tokens"
    summary = (
        "Token speculation on Spec-Bench: first turns, the model's chat template, greedy, questions with even "
        "ids, at most 128 new tokens with SmolLM2 and 64 with a larger model. The ratio is tokens per second including "
        "the prefill, all methods interleaved prompt by prompt; `plain` and `transformers` are the two baselines. "
        "`steps speedup` is the speed-up if rounds cost only their guess and their check, at the measured tokens a "
        "pass and step times, behind the same prefill; `decode speedup` is that of decoding alone. Methods with "
        "`relaxed` change the text; all others of ours accept only what plain decoding would choose: with int8 weights "
        "and `batch_invariant` (`--dtype int8`) they write one text, in bf16 `identical` below 1 is rounding. "
        "transformers is in bf16 throughout. `adaptive` weighs all guesses by their cost; "
        "`respec` is the paper's own configuration; `ablation` leaves parts out. On a CPU it is `batch_invariant`, so "
        "that all but the relaxed methods write one text and differ in speed alone. `quality` compares answers to "
        "PopQA questions, from the passages that come "
        "with them, and summaries with those of strict decoding. `scale` is the cost of a proposal: ReSpec's whole "
        "tree, and of that the automaton's part (`lookup us`)."
    )

    def run(self, context: BenchContext) -> Iterator[Measurement]:
        from benchmarks.tokens import subjects

        larger = context.model != subjects.DRAFT_MODEL
        size = _size(context.rows, quick=context.quick, larger=larger)
        mine = {**subjects.OURS, **subjects.brought()} if context.quick else subjects.all_of(context.model)
        whole = context.dtype == "int8"
        ours = subjects.OurTokens(
            context.model, context.device, mine, dtype=context.dtype, batch_invariant=whole
        )
        assistant = subjects.DRAFT_MODEL if larger and not context.quick else None
        theirs = subjects.TheirTokens(context.model, context.device, ours.llm.tokenizer.eos_tokens, assistant)
        labels = (
            (subjects.PLAIN, subjects.ADAPTIVE, *subjects.brought(), subjects.TRANSFORMERS, subjects.LOOKUP)
            if context.quick
            else (*mine, *theirs.labels)
        )

        def trial(label: str, prompt: Prompt) -> Trial:
            subject = ours if label in ours.labels else theirs
            return subject.trial(label, prompt, size.new)

        def part(label: str, prompt: Prompt) -> Trial:
            return parts.trial(label, prompt, size.new)

        prompts = self._prompts(context, ours.llm.encode, size.per_task)
        yield from self._measure(context, "methods", prompts, labels, trial, dtype=ours.dtype)
        if size.parts:
            parts = subjects.OurTokens(
                context.model,
                context.device,
                subjects.ABLATION,
                dtype=context.dtype,
                batch_invariant=whole or (context.device == "cpu" and half_precision("cpu") == "bf16"),
            )
            few = self._prompts(context, ours.llm.encode, _ABLATION_PER_TASK)
            yield from self._measure(
                context, "ablation", few, tuple(subjects.ABLATION), part, "ablation/", ours.dtype
            )
            yield from quality.measure(context, ours.llm)
            yield from scale.measure(context)

    def pictures(self, measurements: Sequence[Measurement], folder: Path) -> Sequence[Path]:
        """The speed-ups over plain decoding by task, those of ReSpec's parts, and the cost of a proposal."""
        made = []
        for part, title in (
            ("", "Tokens per second against plain decoding"),
            ("ablation/", "ReSpec's parts"),
        ):
            shown = [
                replace(entry, task=entry.task.removeprefix(part))
                for entry in measurements
                if entry.baseline == "plain"
                and entry.task.startswith(part)
                and entry.task.count("/") == part.count("/")
            ]
            if part:
                shown = [entry for entry in shown if entry.task == OVERALL]
            name = f"tokens-{part.strip('/') or 'speedup'}.png"
            picture = speedup_plot(folder / name, shown, title=title)
            made += [picture] if picture is not None else []
        return [*made, *scale.pictures(measurements, folder)]

    def _prompts(
        self, context: BenchContext, encode: Callable[[str], list[int]], per_task: int
    ) -> list[Prompt]:
        from benchmarks.tokens.subjects import Prompt

        return [
            Prompt(question.task, question.identifier, tuple(encode(question.turns[0])))
            for question in questions(context, per_task)
        ]

    def _measure(
        self,
        context: BenchContext,
        label: str,
        prompts: Sequence[Prompt],
        labels: Sequence[str],
        trial: Callable[[str, Prompt], Trial],
        prefix: str = "",
        dtype: str = "bf16",
    ) -> Iterator[Measurement]:
        def prepare(prompt: Prompt) -> Mapping[str, Trial]:
            return {name: trial(name, prompt) for name in labels}

        rows = [
            Row(
                name=prompt.name,
                task=prefix + prompt.task,
                methods=tuple(labels),
                prepare=lambda prompt=prompt: prepare(prompt),  # type: ignore[misc]
            )
            for prompt in prompts
        ]
        records = context.measure(label, rows, context.plan(1, warm_each_row=False))
        figures = DecodeFigures(records)
        for entry in context.summarise(
            records,
            baselines=["plain", "transformers"],
            dtype=dtype,
            extra=lambda summary: figures.of(summary),
        ):
            task = prefix + entry.task if entry.task == OVERALL else entry.task
            theirs = entry.method.startswith("transformers")
            yield replace(entry, task=task, dtype=half_precision(context.device) if theirs else dtype)


def _size(rows: int | None, *, quick: bool, larger: bool) -> _Size:
    """The usual size, with ``rows`` questions of each task if the user asks for a number of them."""
    size = _QUICK if quick else _LARGER_MODEL if larger else _SMALL_MODEL
    return replace(size, per_task=rows or size.per_task)


def questions(context: BenchContext, per_task: int, *, odd: bool = False) -> list[Question]:
    """An even sample of Spec-Bench's questions with even ids, or odd ones; without data a few of our own."""
    if context.data is None:
        return _own_questions(per_task)
    by_task: dict[str, list[Question]] = defaultdict(list)
    for question in load_spec_bench(find_file(context.data, _DATA)):
        if int(question.identifier) % 2 == odd:
            by_task[question.task].append(question)
    found = []
    for task in _TASKS:
        mine = by_task[task]
        count = min(per_task, len(mine))
        found += [mine[index * len(mine) // count] for index in range(count)]
    return found


def _own_questions(per_task: int) -> list[Question]:
    """Questions about the built-in text: enough to see that everything works, no benchmark."""
    parts = [part for part in load_text(None).content.split("\n\n") if part.strip()]
    asked = {"summarization": "Summarize this text:\n", "rag": "Who or what is this text about? Quote it.\n"}
    return [
        Question(identifier=str(number), category=task, turns=(instruction + part,))
        for task, instruction in asked.items()
        for number, part in enumerate(parts[: max(per_task, 2)])
    ]


class DecodeFigures:
    """What decoding alone reached, and what the measured times allow."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._outcomes: dict[tuple[str, str, str], Outcome] = {
            (record.key.task, record.key.row, record.key.method): record.outcome
            for record in records
            if record.outcome is not None and record.outcome.figures
        }

    def of(self, summary: Summary) -> dict[str, Extra]:
        """The speed-up of decoding, and what the step times of one of our methods add up to.

        The latter is the speed-up of a run whose rounds cost their guess and their check and nothing else, behind the
        prefill that it took; a geometric mean over the rows, as the speed-up is.
        """
        if summary.baseline != "plain" or summary.mat is None or summary.speedup is None:
            return {}
        decoding, allowed = [], []
        for (task, row, method), outcome in self._outcomes.items():
            if method != summary.method or summary.task not in (task, OVERALL):
                continue
            plain = self._outcomes.get((task, row, "plain"))
            if plain is None or outcome.passes is None or not outcome.tokens:
                continue
            mine, theirs = outcome.figures, plain.figures
            decoding.append(theirs["decode_ms_per_token"] / mine["decode_ms_per_token"])
            least = mine["prefill_ms"] + outcome.passes * (mine["verify_ms"] + mine["draft_ms"])
            taken = theirs["prefill_ms"] / plain.tokens + theirs["decode_ms_per_token"]
            allowed.append(taken / (least / outcome.tokens))
        if not decoding:
            return {}
        return {"decode_speedup": geometric_mean(decoding), "steps_speedup": geometric_mean(allowed)}


def suite() -> TokensSuite:
    """The suite, as the registry finds it."""
    return TokensSuite()
