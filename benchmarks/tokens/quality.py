"""What relaxed verification does to the text: right answers kept, and how near summaries stay to strict ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from benchmarks.questions import SAMPLE, PassageQuestion, load_passage_questions
from specrag.bench.data import find_file, load_spec_bench
from specrag.bench.interleave import Row, Trial
from specrag.bench.machine import half_precision
from specrag.bench.measurement import Measurement
from specrag.bench.metrics import contains_answer
from specrag.bench.records import Outcome, Record
from specrag.bench.suite import BenchContext
from specrag.methods.base import Decoder
from specrag.methods.retrieval_decoder import RetrievalDecoder

if TYPE_CHECKING:
    from specrag.language_model import LanguageModel
    from specrag.request import Result

_POPQA, _SPEC_BENCH = "popqa_dev_500x5.jsonl", "specbench_480.jsonl"
_QUESTIONS, _SUMMARIES = 40, 12
_NEW_TOKENS = 128

#: Strict first: the others are compared with it.
METHODS: Mapping[str, Callable[[], Decoder]] = {
    "adaptive": RetrievalDecoder,
    "adaptive+relaxed": lambda: RetrievalDecoder(relaxed=True),
    "adaptive+relaxed+tau=1": lambda: RetrievalDecoder(relaxed=True, tolerance=1.0),
    "adaptive+relaxed+tau=6": lambda: RetrievalDecoder(relaxed=True, tolerance=6.0),
    "adaptive+relaxed+m=1": lambda: RetrievalDecoder(relaxed=True, relax_matches=1),
    "adaptive+relaxed+m=6": lambda: RetrievalDecoder(relaxed=True, relax_matches=6),
}


def measure(context: BenchContext, llm: LanguageModel) -> Iterator[Measurement]:
    """Answers and summaries by every strictness; the ratio is tokens per second against strict ReSpec."""
    methods = {label: make() for label, make in METHODS.items()}
    rows = [*_answers(context, llm, methods), *_summaries(context, llm, methods)]
    records = context.measure("quality", rows, context.plan(1, warm_each_row=False))
    yield from context.summarise(
        records,
        baselines=["adaptive"],
        dtype=half_precision(context.device),
        overall=False,
        extra=lambda summary: _figures(records, summary.task, summary.method),
    )


def _figures(records: Sequence[Record], task: str, method: str) -> Mapping[str, float]:
    mine = [
        record.outcome
        for record in records
        if (record.key.task, record.key.method) == (task, method) and record.outcome is not None
    ]
    tokens = sum(outcome.tokens for outcome in mine)
    return {
        "relaxed_share_of_tokens": sum(outcome.figures["relaxed"] for outcome in mine) / max(tokens, 1),
        "rouge_l_with_strict": fmean(outcome.figures["rouge_l"] for outcome in mine),
    }


class _Strict:
    """What strict decoding makes of a row, made once, by whichever method comes first."""

    def __init__(self, make: Callable[[Decoder], Result], method: Decoder) -> None:
        self._make = make
        self._method = method
        self._text: str | None = None

    @property
    def text(self) -> str:
        if self._text is None:
            self._text = self._make(self._method).text
        return self._text


def _trials(
    make: Callable[[Decoder], Result],
    methods: Mapping[str, Decoder],
    right: Callable[[str], bool] | None,
) -> Mapping[str, Trial]:
    strict = _Strict(make, methods["adaptive"])

    def trial(method: Decoder) -> Trial:
        def run() -> Outcome:
            from rouge_score.rouge_scorer import RougeScorer

            reference = strict.text
            made = make(method)
            rouge = RougeScorer(["rougeL"]).score(reference, made.text)["rougeL"].fmeasure
            return Outcome(
                tokens=made.usage.completion_tokens,
                seconds=made.timing.prefill + made.timing.decode,
                output=made.text,
                passes=made.usage.passes,
                drafted=made.usage.drafted,
                accepted=made.usage.accepted,
                drafted_by=dict(made.usage.drafted_by),
                accepted_by=dict(made.usage.accepted_by),
                correct=None if right is None else float(right(made.text)),
                figures={"relaxed": float(made.usage.relaxed), "rouge_l": rouge},
            )

        return run

    return {label: trial(method) for label, method in methods.items()}


def _answers(context: BenchContext, llm: LanguageModel, methods: Mapping[str, Decoder]) -> Iterator[Row]:
    from specrag.methods.passages import retrieval
    from specrag.methods.standard_rag import StandardRAG
    from specrag.methods.standard_rag.pipeline import StandardPipeline
    from specrag.methods.wording import wording
    from specrag.request import Request

    questions: Sequence[PassageQuestion] = SAMPLE
    if context.data is not None:
        found = load_passage_questions(find_file(context.data, _POPQA))
        questions = [question for question in found if question.answerable][-_QUESTIONS:]

    def prepare(question: PassageQuestion) -> Mapping[str, Trial]:
        request = Request(question.question, passages=question.passages)
        options = StandardRAG.Options(lead=wording(question.question).lead)  # whatever the model's size
        rag = StandardPipeline(llm, retrieval(request, llm.resources, "standard-rag"), options)

        def make(method: Decoder) -> Result:
            answering = rag.answering(question.question, method=method, max_tokens=_NEW_TOKENS)
            generation = llm.executor.run(llm.executor.submit(answering)).generation
            assert generation is not None
            return generation

        return _trials(make, methods, lambda text: contains_answer(text, question.answers))

    for question in questions:
        yield Row(
            name=question.identifier,
            task="quality/popqa",
            methods=tuple(methods),
            prepare=lambda question=question: prepare(question),  # type: ignore[misc]
        )


def _summaries(context: BenchContext, llm: LanguageModel, methods: Mapping[str, Decoder]) -> Iterator[Row]:
    if context.data is None:
        return
    found = load_spec_bench(find_file(context.data, _SPEC_BENCH))
    even = [item for item in found if item.task == "summarization" and int(item.identifier) % 2 == 0]

    def prepare(prompt: str) -> Mapping[str, Trial]:
        def make(method: Decoder) -> Result:
            return llm.generate(prompt, method=method, max_tokens=_NEW_TOKENS)

        return _trials(make, methods, None)

    for question in even[:: max(len(even) // _SUMMARIES, 1)][:_SUMMARIES]:
        yield Row(
            name=f"summary {question.identifier}",
            task="quality/summarization",
            methods=tuple(methods),
            prepare=lambda question=question: prepare(question.turns[0]),  # type: ignore[misc]
        )
