"""``specrag bench tokens``: ReSpec and its rivals on Spec-Bench, beside transformers' own methods."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

from specrag.bench.bounds import share_reached, token_bound
from specrag.bench.data import SPEC_BENCH_TASKS, Question, find_file, load_spec_bench, load_text
from specrag.bench.interleave import Row, Trial
from specrag.bench.measurement import Extra, Measurement
from specrag.bench.records import Record
from specrag.bench.suite import BenchContext
from specrag.bench.summary import Summary

if TYPE_CHECKING:
    from specrag.bench.suites.token_subjects import Prompt

_DATA = "specbench_480.jsonl"
_TASKS = ("multi-turn", *SPEC_BENCH_TASKS)
_NEW_TOKENS = 128
#: Questions of each task; those with even ids, since the odd ones are for tuning.
_PER_TASK = 8
_ABLATION_PER_TASK = 3
#: Assists transformers' own assisted generation where it is not the target itself.
_ASSISTANT = "smollm2-135m"


class TokensSuite:
    """Token speculation."""

    name = "tokens"
    summary = (
        "Token speculation on Spec-Bench (first turns, the model's chat template, greedy, at most 128 new tokens, "
        "bf16, questions with even ids). The ratio is tokens per second including the prefill, all methods "
        "interleaved prompt by prompt. `bound` is what the measured tokens a pass, verification and drafting "
        "times allow decoding at best, `decode_speedup` what decoding alone reached. `plain` and `transformers` "
        "are the two baselines. `respec+relaxed` changes the text; all other methods of ours are exact."
    )

    def run(self, context: BenchContext) -> Iterator[Measurement]:
        from specrag.bench.suites import token_subjects as subjects

        ours = subjects.OurTokens(context.model, context.device, {**subjects.OURS, **subjects.ABLATION})
        assistant = _ASSISTANT if context.model != _ASSISTANT and not context.quick else None
        theirs = subjects.TheirTokens(context.model, context.device, ours.llm.tokenizer.eos_tokens, assistant)
        new = 48 if context.quick else _NEW_TOKENS
        labels = (
            (subjects.PLAIN, subjects.RESPEC, subjects.TRANSFORMERS, subjects.LOOKUP)
            if context.quick
            else (*subjects.OURS, *theirs.labels)
        )

        def trial(label: str, prompt: Prompt) -> Trial:
            subject = ours if label in subjects.OURS or label in subjects.ABLATION else theirs
            return subject.trial(label, prompt, new)

        prompts = self._prompts(context, ours.llm.encode, 1 if context.quick else _PER_TASK)
        yield from self._measure(context, "methods", prompts, labels, trial)
        if not context.quick:
            few = self._prompts(context, ours.llm.encode, _ABLATION_PER_TASK)
            yield from self._measure(context, "ablation", few, tuple(subjects.ABLATION), trial, "ablation/")

    def _prompts(
        self, context: BenchContext, encode: Callable[[str], list[int]], per_task: int
    ) -> list[Prompt]:
        from specrag.bench.suites.token_subjects import Prompt

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
        yield from context.summarise(
            records,
            baselines=["plain", "transformers"],
            dtype="bf16",
            extra=lambda summary: figures.of(summary),
        )


def questions(context: BenchContext, per_task: int) -> list[Question]:
    """An even sample of Spec-Bench's questions with even ids; without data a few of our own."""
    if context.data is None:
        return _own_questions(per_task)
    by_task: dict[str, list[Question]] = defaultdict(list)
    for question in load_spec_bench(find_file(context.data, _DATA)):
        if int(question.identifier) % 2 == 0:
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
    """What decoding alone reached, and what the measured times allow it."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._figures: dict[tuple[str, str, str], Mapping[str, float]] = {
            (record.key.task, record.key.row, record.key.method): record.outcome.figures
            for record in records
            if record.outcome is not None and record.outcome.figures
        }

    def of(self, summary: Summary) -> dict[str, Extra]:
        """The bound, the speed-up of decoding, and the share of the bound, for one of our methods."""
        if summary.baseline != "plain" or summary.mat is None:
            return {}
        ratios, verify, draft, single = [], [], [], []
        for (task, row, method), figures in self._figures.items():
            if method != summary.method or summary.task not in (task, "overall"):
                continue
            plain = self._figures.get((task, row, "plain"))
            if plain is None:
                continue
            ratios.append(plain["decode_ms_per_token"] / figures["decode_ms_per_token"])
            verify.append(figures["verify_ms"])
            draft.append(figures["draft_ms"])
            single.append(plain["verify_ms"])
        if not ratios:
            return {}
        bound = token_bound(
            tokens_per_round=summary.mat,
            plain_seconds=median(single) / 1e3,
            verify_seconds=median(verify) / 1e3,
            draft_seconds=median(draft) / 1e3,
        )
        reached = median(ratios)
        return {"decode_speedup": reached, "bound": bound, "share_of_bound": share_reached(reached, bound)}


def suite() -> TokensSuite:
    """The suite, as the registry finds it."""
    return TokensSuite()
