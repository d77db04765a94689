"""One run of each method on one question."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from benchmarks.answers.corrective_reading import CorrectiveReading
from benchmarks.answers.data import SIZES, Question
from benchmarks.answers.drafts import write_drafts
from benchmarks.answers.passage_reading import PassageReading, PromptForm, Reading
from benchmarks.answers.reflective_reading import ReflectiveReading
from specrag.bench.interleave import Trial
from specrag.bench.records import Outcome
from specrag.engine.passes import Coroutine
from specrag.language_model import LanguageModel
from specrag.methods.generator import LocalGenerator
from specrag.methods.passages import Retrieval, retrieval
from specrag.methods.resources import Resources
from specrag.methods.speculative_rag import SpeculativeRAG
from specrag.methods.speculative_rag.pipeline import SpeculativeRAGPipeline
from specrag.methods.speculative_rag.result import SpeculativeAnswer
from specrag.methods.standard_rag import StandardRAG
from specrag.methods.standard_rag.pipeline import StandardPipeline
from specrag.methods.standard_rag.result import Answer
from specrag.methods.wording import wording
from specrag.models.adapters import adapter_digest
from specrag.request import Request, SearchOptions
from specrag.retrieval.encoder.question_vectors import QuestionVectors

if TYPE_CHECKING:
    from specrag.language_model import LanguageModel
    from specrag.models.scoring import LocalScorer

#: Of a standard answer. A letter or a label needs fewer; behind a plain prompt a model goes on until it is stopped.
_MAX_TOKENS, _MAX_PLAIN_TOKENS, _MAX_CHOICE_TOKENS = 100, 48, 24


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A configuration.

    Args:
        adapter: folder of the drafter's LoRA adapter; ``None`` for the model as it comes.
    """

    drafter: str
    verifier: str
    adapter: Path | None = None

    @cached_property
    def label(self) -> str:
        """For tables and records; an adapter that is trained anew has another one."""
        if self.adapter is None:
            return f"{self.drafter} + {self.verifier}"
        return f"{self.drafter} ({self.adapter.name} {adapter_digest(self.adapter)[:6]}) + {self.verifier}"


_PAPER = SpeculativeRAG.Options(form="paper")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How Speculative RAG runs where it is not as the paper's settings for the set have it.

    Args:
        m, k: ``None`` for the set's; they may be more than a request can ask for.
        options: the others.
    """

    m: int | None = None
    k: int | None = None
    options: SpeculativeRAG.Options = _PAPER


def changed(**values: Any) -> Setting:
    """The paper's options but for these."""
    return Setting(options=SpeculativeRAG.Options(**{"form": "paper", **values}))


#: One draft from all passages: the drafter as a reader (Table 6).
ONE_DRAFT = replace(changed(strategy="random", without=("self-contain", "self-reflect")), m=1, k=1000)


def standard(question: Question, model: str, models: Models, form: PromptForm) -> Trial:
    """Standard RAG; questions in free form with citations, as :class:`~specrag.StandardRAG` asks for them."""
    if question.task.kind == "free-form" and form == "instruction":
        return lambda: _cited(question, models.get(model))
    reading = _reading(question, model, models, form)
    return _timed(question, models.get(model), lambda: reading.answering(question.task, question.passages))


def corrective(question: Question, pair: Pair, models: Models) -> Trial:
    """The drafter's model grades, the verifier's reads."""
    reading = _reading(question, pair.verifier, models)
    method = CorrectiveReading(models.scorer(pair.drafter), reading)
    return _timed(
        question, models.get(pair.verifier), lambda: method.answering(question.task, question.passages)
    )


def reflective(question: Question, model: str, models: Models) -> Trial:
    """One model answers and judges."""
    method = ReflectiveReading(models.scorer(model), _reading(question, model, models))
    return _timed(question, models.get(model), lambda: method.answering(question.task, question.passages))


def speculative(question: Question, pair: Pair, models: Models, setting: Setting | None = None) -> Trial:
    """Speculative RAG; what it measured of each draft goes into the record."""
    chosen = setting or Setting()
    size = SIZES[question.set]
    options = chosen.options.model_copy(
        update={"drafts": chosen.m or size.m, "passages_per_draft": chosen.k or size.k}
    )
    method = SpeculativeRAGPipeline(
        models.generator(pair.drafter, options.decoder, adapter=pair.adapter),
        models.scorer(pair.verifier) if options.scoring().verifies else None,
        found_in(question, size.passages),
        options,
        vectors=models.vectors,
    )

    def trial() -> Outcome:
        answer = method.executor.run(method.executor.submit(method.answering(question.task)))
        usage, timing = answer.usage, answer.timing
        seen = [question.is_in(draft.sources) for draft in answer.drafts]
        known = [float(one) for one in seen if one is not None]
        return Outcome(
            tokens=usage.drafter_completion_tokens,
            seconds=timing.total,
            output=write_drafts(question, answer),
            correct=float(question.is_right(answer.text)),
            figures={
                "drafter_tokens_read": float(usage.drafter_read_tokens),
                "verifier_tokens_read": float(usage.verifier_read_tokens),
                "embedding_ms": 1e3 * timing.embedding,
                "drafting_ms": 1e3 * timing.drafting,
                "verification_ms": 1e3 * timing.verification,
                "malformed": answer.malformed / max(len(answer.drafts), 1),
                "drafts": float(len(answer.drafts)),
                **({"drafts_that_saw_the_answer": fmean(known)} if known else {}),
                **_with_rationale(question, answer),
            },
        )

    return trial


def _with_rationale(question: Question, answer: SpeculativeAnswer) -> dict[str, float]:
    """Whether free text is right if its rationale counts too, which makes it about as long as a standard answer."""
    if question.task.kind != "free-form":
        return {}
    shown = {
        draft.number: f"{draft.answer} {draft.rationale}" for draft in answer.drafts if not draft.malformed
    }
    text = (
        answer.text if answer.best is None else shown[answer.best]
    )  # the answer first: a yes or no is one word
    return {
        "right_with_rationale": float(question.is_right(text)),
        "words_with_rationale": float(len(text.split())),
        "oracle_with_rationale": float(any(question.is_right(one) for one in shown.values())),
    }


def found_in(question: Question, most: int | None = None) -> Retrieval:
    """The question's own passages, the first of them if there are more than ``most``."""
    request = Request(question.task.text, search=SearchOptions(k=most), passages=question.passages)
    return retrieval(request, Resources(), "answers")


def _reading(
    question: Question, model: str, models: Models, form: PromptForm = "instruction"
) -> PassageReading:
    most = _MAX_PLAIN_TOKENS if form == "plain" else _MAX_TOKENS
    if question.task.kind != "free-form":
        most = _MAX_CHOICE_TOKENS
    return PassageReading(models.generator(model), form=form, max_tokens=most)


def _timed(question: Question, llm: LanguageModel, ask: Callable[[], Coroutine[Reading]]) -> Trial:
    def trial() -> Outcome:
        started = time.perf_counter()
        reading = llm.executor.run(llm.executor.submit(ask()))
        return Outcome(
            tokens=reading.completion_tokens,
            seconds=time.perf_counter() - started,
            output=reading.text,
            correct=float(question.is_right(reading.text)),
            figures={
                "prompt_tokens": float(reading.read_tokens),
                "passages_read": float(len(reading.kept)),
                **({"judged_tokens": float(reading.judged_tokens)} if reading.judged_tokens else {}),
            },
        )

    return trial


def _cited(question: Question, llm: LanguageModel) -> Outcome:
    rag = StandardPipeline(
        llm, found_in(question), StandardRAG.Options(lead=wording(question.task.text).lead)
    )
    answering = rag.answering(question.task.text, max_tokens=_MAX_TOKENS)
    answer: Answer = llm.executor.run(llm.executor.submit(answering))
    citations, stats = answer.citations, answer.stats
    figures = {
        "prompt_tokens": float(stats.prompt_tokens),
        "prefill_ms": 1e3 * stats.prefill_seconds,
        "decode_ms": 1e3 * stats.decode_seconds,
        "passages_read": float(len(answer.sources)),
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
        correct=float(question.is_right(answer.text)),
        figures=figures,
    )


class Models:
    """Language models by name, and the vectors for clustering.

    Args:
        device: torch's name of it.
        dtype: how all of them hold their weights.
    """

    def __init__(self, device: str, dtype: str) -> None:
        self._device = device
        self._dtype = dtype
        self._loaded: dict[tuple[str, Path | None], LanguageModel] = {}
        self._vectors: QuestionVectors | None = None

    @property
    def vectors(self) -> QuestionVectors:
        """The default encoder, warm."""
        if self._vectors is None:
            from specrag.methods.speculative_rag.perspectives import cluster
            from specrag.retrieval.passage import Passage

            self._vectors = QuestionVectors()
            # What a server pays once is no part of an answer's time.
            cluster(self._vectors.embed("?", [Passage(0, "", "", "", "?", {})]), 1, 0)
        return self._vectors

    def get(self, name: str, adapter: Path | None = None) -> LanguageModel:
        """The model, loaded and warm."""
        if (name, adapter) not in self._loaded:
            from specrag.language_model import load

            llm = load(name, device=self._device, dtype=self._dtype, adapter=adapter)
            llm.generate("Hello", max_tokens=2)
            self._loaded[name, adapter] = llm
        return self._loaded[name, adapter]

    def generator(self, name: str, method: str = "plain", *, adapter: Path | None = None) -> LocalGenerator:
        """The model as a writer."""
        return LocalGenerator(self.get(name, adapter), method=method)

    def scorer(self, name: str) -> LocalScorer:
        """The model as a scorer."""
        from specrag.models.scoring import LocalScorer

        return LocalScorer(self.get(name).loaded)

    def close(self) -> None:
        """Give the memory back."""
        for llm in self._loaded.values():
            llm.close()
        self._loaded.clear()
