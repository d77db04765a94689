"""A cascade: a small model answers from the passages, and the model reads them itself only where it doubts the answer.

Ours, beyond the papers. The model is asked whether the passages that a small model's answer rests on show it to be
right, which takes one pass over these passages. How probable "Yes" is against "No" decides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from specrag.engine.passes import Coroutine, Emit
from specrag.errors import InputError
from specrag.methods.base import Method, Needs, Plan
from specrag.methods.citations import without_citations
from specrag.methods.events import map_events, suppress_events
from specrag.methods.generator import as_scorer
from specrag.methods.passages import PASSAGE_TOKENS
from specrag.methods.resources import NO_ADAPTER
from specrag.methods.standard_rag import StandardRAG
from specrag.methods.standard_rag.result import Answer
from specrag.models.roles import ScoringRequest, TextPart
from specrag.request import Details, Event, Result, Source, Sources
from specrag.retrieval.passage import passage_text
from specrag.speculation.decode import Step

if TYPE_CHECKING:
    from pathlib import Path

    from specrag.methods.base import LocalModel
    from specrag.methods.resources import Resources
    from specrag.models.roles import TextScorer
    from specrag.request import Request

#: Who answers first where nobody is named.
SMALL_MODEL = "smollm2-135m"

#: Passages that the model reads to judge an answer: those that hold it, the best ones first.
_EVIDENCE = 2

_ASKED = "Do the passages show that the proposed answer is right? Answer Yes or No."


class Cascade(Method):
    """Answers by a small model where the model agrees with it, else by the model.

    Args:
        options: :class:`Cascade.Options`.
    """

    name = "cascade"
    summary = "A small model answers; the model checks, and reads the passages itself where it doubts"
    needs = Needs.SESSIONS | Needs.SCORER | Needs.RETRIEVER

    class Options(StandardRAG.Options):
        """Of the cascade."""

        drafter: Annotated[str, Field(max_length=4096)] | None = Field(
            None,
            description=f"Who answers first: a local model's name; none: the host's, or {SMALL_MODEL}.",
            json_schema_extra={"resource": "writers"},
        )
        adapter: Annotated[str, Field(max_length=4096)] | None = Field(
            None,
            description="The small model's adapter; none: the model as it comes.",
            json_schema_extra={"resource": "writers"},
        )
        confidence: float = Field(
            0.8,
            ge=0,
            le=1,
            description="Least probability of Yes, against No, at which the small model's answer is taken.",
        )

    options: Options

    def plan(self, request: Request, given: Resources) -> Plan:
        """See :class:`~specrag.methods.base.Method`."""
        small = self._small(given)
        own = self.options.model_dump(exclude_unset=True, exclude={"drafter", "adapter", "confidence"})
        standard = StandardRAG(**own)
        alone = standard.plan(request, given)  # says what is wrong before anything runs
        # A follow-up must be made whole before the search, and a form kept to: neither is for a small model.
        if request.history or request.is_formed:
            return alone
        first = standard.plan(request, given.of(small))
        scorer = as_scorer(given.scorer())

        def begin() -> Coroutine[Result]:
            events: list[object] = []
            drafted = yield from map_events(first.begin(), _keep_steps(events))
            answer = drafted.details
            assert isinstance(answer, Answer)
            if answer.abstained or answer.generation is None:
                for event in events:
                    yield Emit(event)
                return drafted
            started = given.clock()
            likely = yield from suppress_events(_checking(scorer, request.question, answer))
            seconds = given.clock() - started
            verdict = Checked(answer.text, small.loaded.name, likely, likely >= self.options.confidence)
            yield Emit(verdict)
            if verdict.taken:
                for event in events:
                    yield Emit(event)
                return _told(drafted, answer, verdict, {"check": seconds})
            passages = [source.passage for source in answer.sources]
            passages += [hit.passage for hit in answer.left_out]
            plan = standard.plan(replace(request, passages=passages), given)
            read = yield from map_events(plan.begin(), _without_sources)
            spent = drafted.timing
            phases = {**spent.phases, "draft": spent.prefill + spent.decode, "check": seconds}
            return _told(read, answer, verdict, phases)

        return Plan(begin, alone.tokens + self._tokens(first.tokens, small, given))

    def _small(self, given: Resources) -> LocalModel:
        """Who answers first.

        Raises:
            InputError: nobody is smaller than the model, or it is not a model on this machine.
        """
        name, adapter = self.options.drafter, self.options.adapter
        small: Any = given.drafter if name is None and adapter is None else None
        if small is None:
            small = given.writer(name or SMALL_MODEL, adapter or NO_ADAPTER)
        if not hasattr(small, "loaded"):
            raise InputError("drafter", name, f"name a model on this machine, such as {SMALL_MODEL}")
        if _weights(small) == _weights(given.llm):
            raise InputError("drafter", small.loaded.name, "it is the model itself; take a smaller one")
        found: LocalModel = small
        return found

    def _tokens(self, first: int, small: LocalModel, given: Resources) -> int:
        """What the small model's session and the check take, in tokens of the model."""
        from specrag.engine.memory import keys_values_bytes

        each = max(first, 1)
        share = keys_values_bytes(small.loaded.model, each) / keys_values_bytes(given.llm.loaded.model, each)
        return math.ceil(share * first) + (_EVIDENCE + 1) * PASSAGE_TOKENS


@dataclass(frozen=True, slots=True)
class Checked(Event):
    """An event: the small model has answered, and the model has judged it.

    Attributes:
        text: the small model's answer.
        drafter: its name.
        confidence: how probable the model finds Yes, against No.
        taken: whether the answer is taken.
    """

    text: str
    drafter: str
    confidence: float
    taken: bool

    name = "checked"

    @property
    def status(self) -> str:
        """See :class:`~specrag.request.Event`."""
        return "" if self.taken else f"{self.drafter}'s answer is doubted ({self.confidence:.0%}): reading"

    def describe(self) -> dict[str, Any]:
        """See :class:`~specrag.request.Event`."""
        return {
            "draft": self.text,
            "drafter": self.drafter,
            "confidence": self.confidence,
            "taken": self.taken,
        }


@dataclass(frozen=True, slots=True)
class CascadeAnswer(Details):
    """An answer, and who gave it.

    Attributes:
        answer: as of standard RAG, of whoever gave it.
        draft: the small model's, taken or not.
        verdict: the model's.
    """

    answer: Answer
    draft: Answer
    verdict: Checked

    def summary(self) -> dict[str, Any]:
        """See :class:`~specrag.request.Details`."""
        told = {"drafter": self.verdict.drafter, "confidence": round(self.verdict.confidence, 4)}
        return {**self.answer.summary(), **told, "taken": self.verdict.taken}

    def record(self) -> dict[str, Any]:
        """See :class:`~specrag.request.Details`."""
        return {**self.answer.record(), **self.summary(), "draft": self.draft.text}

    def notes(self) -> list[str]:
        """See :class:`~specrag.request.Details`."""
        return self.answer.notes()

    def figures(self) -> list[str]:
        """See :class:`~specrag.request.Details`."""
        said = "taken" if self.verdict.taken else "doubted"
        return [f"{self.verdict.drafter}'s answer {said} ({self.verdict.confidence:.0%})"]


def _weights(llm: LocalModel) -> tuple[Path, Path | None]:
    return llm.loaded.files.folder, llm.loaded.adapter


def _checking(scorer: TextScorer, question: str, answer: Answer) -> Coroutine[float]:
    """How probable the model finds Yes, against No, when asked whether the passages show an answer to be right."""
    prompt = [{"role": "user", "content": check_prompt(question, answer)}]
    requests = [ScoringRequest(prompt, (TextPart(word, word),)) for word in ("Yes", "No")]
    yes, no = yield from scorer.scoring(requests)
    gap = no.parts["No"].total - yes.parts["Yes"].total
    return 1 / (1 + math.exp(min(gap, 700.0)))


def check_prompt(question: str, answer: Answer) -> str:
    """What the model is asked about an answer, with the passages that hold it."""
    cited = [source for source in answer.sources if source.cited] or answer.sources
    texts = [passage_text(source.passage.title, source.passage.text.strip()) for source in cited[:_EVIDENCE]]
    said = without_citations(answer.text).strip()
    return "\n\n".join([*texts, f"Question: {question}\nProposed answer: {said}", _ASKED])


def _keep_steps(kept: list[object]) -> Any:
    """Hold back the steps of an answer that may not be shown, and pass the rest on."""

    def tell(value: object) -> Sequence[object]:
        if isinstance(value, Step):
            kept.append(value)
            return ()
        return (value,)

    return tell


def _without_sources(value: object) -> tuple[object, ...]:
    return () if isinstance(value, Sources) else (value,)


def _told(result: Result, draft: Answer, verdict: Checked, phases: dict[str, float]) -> Result:
    """The result with what the search said of its sources, which passages that are given have not."""
    answer = result.details
    assert isinstance(answer, Answer)

    def found(source: Source) -> Source:
        known = draft.sources[source.number - 1] if source.number <= len(draft.sources) else source
        return replace(source, score=known.score, similarity=known.similarity)

    sources = tuple(found(source) for source in result.sources)
    details = CascadeAnswer(replace(answer, sources=sources, question=draft.question), draft, verdict)
    timing = replace(result.timing, phases={**result.timing.phases, **phases})
    return replace(result, sources=sources, details=details, timing=timing)
