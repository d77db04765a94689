"""``specrag bench answers``: how many questions are answered rightly from passages, and how fast."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from specrag.bench.data import find_file
from specrag.bench.interleave import Row, Trial
from specrag.bench.measurement import Extra, Measurement
from specrag.bench.question_data import PassageQuestion, load_passage_questions
from specrag.bench.records import Outcome, Record
from specrag.bench.suite import BenchContext
from specrag.bench.suites.answers_sample import SAMPLE
from specrag.evaluation.metrics import contains_answer

if TYPE_CHECKING:
    from specrag.language_model import LanguageModel
    from specrag.methods.answer import Answer

STANDARD = "standard-rag"

#: The models of the full run; another ``--model`` takes their place.
MODELS = ("smollm2-135m", "qwen2.5-coder-1.5b")

_POPQA = "popqa_dev_500x5.jsonl"
_ROWS, _QUICK_ROWS = 100, 6
_MAX_TOKENS = 100

#: Figures that are means over the rows; all others are medians.
_SHARES = ("cites", "cites_no_source", "citations_supported")


class AnswersSuite:
    """Answers from each question's own passages."""

    name = "answers"
    summary = (
        "Questions answered from the passages that come with them, greedily, at most 100 tokens an answer. An answer "
        "is right if it contains a gold answer, both normalised as SQuAD's script does. Time is that of the whole "
        "answer, one question after the other. `cites` is the share of answers that cite a passage, `cites no source` "
        "the share that cites a number which no passage has, `citations supported` the mean share of an answer's "
        "citations whose passage holds half of the sentence's content words."
    )

    def run(self, context: BenchContext) -> Iterator[Measurement]:
        task, questions = _questions(context)
        for model in _models(context):
            llm = _Lazily(model, context.device)
            rows = [_row(model, task, question, llm) for question in questions]
            records = context.measure(model, rows, context.plan(1, warm_each_row=False))
            yield from context.summarise(
                records,
                baselines=[STANDARD],
                dtype="bf16",
                model=model,
                overall=False,
                extra=lambda _, records=records: _means(records),  # type: ignore[misc]
            )
            llm.close()


def suite() -> AnswersSuite:
    """The suite, for the registry."""
    return AnswersSuite()


class _Lazily:
    """A model, loaded when it is first needed: a run that only resumes loads nothing."""

    def __init__(self, name: str, device: str) -> None:
        self._name = name
        self._device = device
        self._loaded: LanguageModel | None = None

    def get(self) -> LanguageModel:
        if self._loaded is None:
            from specrag.language_model import load

            self._loaded = load(self._name, device=self._device)
        return self._loaded

    def close(self) -> None:
        """Make room for the next model."""
        if self._loaded is not None:
            self._loaded.close()
            self._loaded = None


def _models(context: BenchContext) -> Sequence[str]:
    return (context.model,) if context.quick or context.model != MODELS[0] else MODELS


def _questions(context: BenchContext) -> tuple[str, Sequence[PassageQuestion]]:
    """The task's name and its questions: the first answerable ones, or the built-in sample without data."""
    if context.data is None:
        return "sample", SAMPLE
    questions = load_passage_questions(find_file(context.data, _POPQA))
    answerable = [question for question in questions if question.answerable]
    return "popqa", answerable[: _QUICK_ROWS if context.quick else _ROWS]


def _row(model: str, task: str, question: PassageQuestion, llm: _Lazily) -> Row:
    return Row(
        name=f"{model} {question.identifier}",
        task=task,
        methods=(STANDARD,),
        prepare=lambda: {STANDARD: _trial(question, llm.get())},
    )


def _trial(question: PassageQuestion, llm: LanguageModel) -> Trial:
    from specrag.methods.retriever import GivenPassages
    from specrag.methods.standard_rag import StandardRAG

    passages = GivenPassages(question.passages)
    rag = StandardRAG(llm, passages, k=len(passages), min_score=None)
    return _outcome(lambda: rag.answer(question.question, max_tokens=_MAX_TOKENS), question.answers)


def _outcome(ask: Callable[[], Answer], gold: Sequence[str]) -> Trial:
    def trial() -> Outcome:
        answer = ask()
        citations, stats = answer.citations, answer.stats
        figures = {
            "prompt_tokens": float(stats.prompt_tokens),
            "prefill_ms": 1e3 * stats.prefill_seconds,
            "decode_ms": 1e3 * stats.decode_seconds,
            "cites": float(bool(citations.numbers)),
            "cites_no_source": float(bool(citations.invalid)),
        }
        valid = [citation for citation in citations.found if citation.valid]
        if valid:
            figures["citations_supported"] = fmean(citation.supported for citation in valid)
        return Outcome(
            tokens=stats.completion_tokens,
            seconds=stats.total_seconds,
            output=answer.text,
            passes=None if answer.generation is None else answer.generation.usage.passes,
            correct=float(contains_answer(answer.text, gold)),
            figures=figures,
        )

    return trial


def _means(records: Sequence[Record]) -> Mapping[str, Extra]:
    outcomes = [record.outcome for record in records if record.outcome is not None]
    values = {name: [o.figures[name] for o in outcomes if name in o.figures] for name in _SHARES}
    return {name: fmean(found) for name, found in values.items() if found}
