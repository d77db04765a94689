"""Are RaLMSpec's tokens and passages those of sequential retrieval? Every retriever, every combination of its parts."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from benchmarks.passages.retrievers import Retrievers
from benchmarks.passages.subjects import (
    COMBINATIONS,
    COST_AWARE,
    REUSE,
    SEQUENTIAL,
    Models,
    fingerprint,
    make,
)
from specrag.bench.interleave import Row, Trial
from specrag.bench.measurement import Measurement
from specrag.bench.records import Outcome, Record
from specrag.bench.suite import BenchContext

if TYPE_CHECKING:
    from benchmarks.passages.data import Asked
    from specrag.language_model import LanguageModel
    from specrag.methods.ralmspec.iterative import IterativeMethod
    from specrag.methods.ralmspec.result import IterativeAnswer
    from specrag.methods.retriever import PassageRetriever
    from specrag.request import Options

SECTION = "exactness"
_TEMPERATURES = (0.0, 0.8)
_SEED = 7
#: Requests that share passes; with ``batch_invariant`` that changes no bit. All questions of a full run are one row.
_TOGETHER = 100
_METHODS = (REUSE, *COMBINATIONS, COST_AWARE)
#: Of a passage: shorter than elsewhere, since reading prompts is most of the time and not what is asked here.
_PASSAGE_TOKENS = 64


def measure(
    context: BenchContext, retrievers: Retrievers, names: Sequence[str], questions: Sequence[Asked], new: int
) -> Iterator[Measurement]:
    """The share of answers of ``new`` tokens that equal sequential retrieval's, in int8 and batch invariant.

    Passages are cut to 64 tokens.
    """
    models = Models(context.model, context.device, dtype="int8", batch_invariant=True)
    batches = [questions[start : start + _TOGETHER] for start in range(0, len(questions), _TOGETHER)]

    def prepare(name: str, batch: Sequence[Asked], temperature: float) -> Mapping[str, Trial]:
        request = _Request(
            models.get(), retrievers.get(name), [asked.text for asked in batch], temperature, new
        )
        return {label: _trial(request, label) for label in _METHODS}

    rows = [
        Row(
            name=f"batch {number}",
            task=f"{SECTION}/{name}, {'greedy' if temperature == 0 else f'temperature {temperature}'}",
            methods=_METHODS,
            prepare=lambda name=name, batch=batch, temperature=temperature: prepare(  # type: ignore[misc]
                name, batch, temperature
            ),
        )
        for name in names
        for temperature in _TEMPERATURES
        for number, batch in enumerate(batches)
    ]
    records = context.measure(SECTION, rows, context.plan(1, warmups=0))
    models.close()
    groups: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in records:
        groups[record.key.task, record.key.method].append(record)
    for (task, method), group in groups.items():
        made = [record.outcome.figures for record in group if record.outcome is not None]
        count = sum(int(figures["outputs"]) for figures in made)
        equal = sum(int(figures["equal"]) for figures in made)
        measurement = context.measurement(
            task=task,
            method=method,
            baseline=SEQUENTIAL,
            dtype="int8",
            n=count,
            extra={
                "equal": equal,
                "failed_batches": len(group) - len(made),
                "wrong_guesses": sum(int(figures["wrong"]) for figures in made),
            },
        )
        yield replace(measurement, identical=equal / count if count else None)


@dataclass(frozen=True)
class _Request:
    """Questions that are answered side by side, and what sequential retrieval answers."""

    llm: LanguageModel
    retriever: PassageRetriever
    questions: Sequence[str]
    temperature: float
    new: int

    @cached_property
    def sequential(self) -> list[str]:
        """Made once, by whichever method comes first: their order changes from row to row."""
        return [fingerprint(answer) for answer in self.answers(SEQUENTIAL)]

    def answers(self, label: str) -> list[IterativeAnswer]:
        method: IterativeMethod = make(label, self.llm, self.retriever, _PASSAGE_TOKENS)
        options: Options = {
            "max_tokens": self.new,
            "ignore_eos": True,
            "temperature": self.temperature,
            "seed": _SEED,
        }
        executor = self.llm.executor
        tasks = [executor.submit(method.answering(question, **options)) for question in self.questions]
        try:
            return [executor.run(task) for task in tasks]
        finally:
            for task in tasks:
                task.cancel()


def _trial(request: _Request, label: str) -> Trial:
    def run() -> Outcome:
        reference = request.sequential
        started = time.perf_counter()
        answers = request.answers(label)
        seconds = time.perf_counter() - started
        equal = sum(fingerprint(answer) == theirs for answer, theirs in zip(answers, reference, strict=True))
        wrong = sum(round.matched < round.stride for answer in answers for round in answer.rounds)
        return Outcome(
            tokens=sum(len(answer.tokens) for answer in answers),
            seconds=seconds,
            figures={"outputs": len(answers), "equal": equal, "wrong": wrong},
        )

    return run
