"""A cascade: a small model answers from the passages; the model reads them itself only if it doubts the answer.

Our own method, beyond the papers. The model reads the passages as it would to answer, up to the last one that the small
model's answer cites, and is asked whether they show the answer to be right. The probability of "Yes" against "No"
decides. If it doubts the answer, it continues from there, so that nothing is read twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from specrag.engine import Coroutine, Emit, Outputs
from specrag.errors import InputError
from specrag.methods.base import Method, Needs, Plan
from specrag.methods.citations import without_citations
from specrag.methods.events import map_events
from specrag.methods.passages import PASSAGE_TOKENS
from specrag.methods.prompts import Message, build_prompt
from specrag.methods.resources import NO_ADAPTER
from specrag.methods.standard_rag import StandardRAG
from specrag.methods.standard_rag.result import Answer
from specrag.request import Details, Event, Result, SearchOptions, Source, Sources
from specrag.speculation import DraftTree, Step

if TYPE_CHECKING:
    from pathlib import Path

    from specrag.engine import Session
    from specrag.methods.base import LocalModel
    from specrag.methods.resources import Resources
    from specrag.request import Request

#: The default model that answers first.
SMALL_MODEL = "smollm2-135m"

_ASKED = "Do the passages above show that the proposed answer is right? Answer Yes or No."


class Cascade(Method):
    """Answers by a small model if the model agrees with it, otherwise by the model.

    Args:
        options: :class:`Cascade.Options`.
    """

    name = "cascade"
    summary = "A small model answers; the model checks, and reads the passages itself where it doubts"
    needs = Needs.SESSIONS | Needs.RETRIEVER | Needs.SMALL_MODEL

    class Options(StandardRAG.Options):
        """Options of the cascade."""

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
        draft_prompt_tokens: int = Field(
            1024,
            ge=1,
            le=1_000_000,
            description="Most tokens that the small model reads, of the best passages: more of them confuse it.",
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
        ours = Cascade.Options.model_fields.keys() - StandardRAG.Options.model_fields.keys()
        own = self.options.model_dump(exclude_unset=True, exclude=ours)
        standard = StandardRAG(**own)
        alone = standard.plan(request, given)  # reports errors before anything runs
        # A follow-up must be made complete before the search, and a form followed: neither is for a small model.
        if request.history or request.is_formed:
            return alone
        least = min(self.options.draft_prompt_tokens, self.options.prompt_tokens or 1_000_000)
        first = StandardRAG(**{**own, "prompt_tokens": least}).plan(request, given.of(small))

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
            check = _Check(given.llm, request.tenant)
            try:
                likely = yield from check.confidence(check_prompt(request, answer))
                seconds = given.clock() - started
                verdict = Checked(answer.text, small.loaded.name, likely, likely >= self.options.confidence)
                yield Emit(verdict)
                if verdict.taken:
                    for event in events:
                        yield Emit(event)
                    return _told(drafted, answer, verdict, {"check": seconds})
                passages = [source.passage for source in answer.sources]
                passages += [hit.passage for hit in answer.left_out]
                # They have been found and ordered: how to search is for passages that have not.
                plan = standard.plan(replace(request, passages=passages, search=SearchOptions()), given)
                read = yield from map_events(plan.begin(), lambda event: _found_anew(event, answer))
            finally:
                check.close()
            spent = drafted.timing
            phases = {**spent.phases, "draft": spent.prefill + spent.decode, "check": seconds}
            return _told(read, answer, verdict, phases)

        return Plan(begin, alone.tokens + self._tokens(first.tokens, small, given))

    def _small(self, given: Resources) -> LocalModel:
        """The model that answers first.

        Raises:
            InputError: the host lends none, it is the model itself, or it is not a model on this machine.
        """
        name, adapter = self.options.drafter, self.options.adapter
        unnamed = name is None and adapter is None
        small: Any = given.drafter if unnamed else None
        if small is None:
            if unnamed and not given.opens_by_name:
                remedy = f"there is no small model to answer first: serve with --rag-drafter {SMALL_MODEL}"
                raise InputError("method", self.name, remedy)
            small = given.writer(name or SMALL_MODEL, adapter or NO_ADAPTER)
        if not hasattr(small, "loaded"):
            raise InputError("drafter", name, f"name a model on this machine, such as {SMALL_MODEL}")
        if _weights(small) == _weights(given.llm):
            raise InputError("drafter", small.loaded.name, "it is the model itself; take a smaller one")
        found: LocalModel = small
        return found

    def _tokens(self, first: int, small: LocalModel, given: Resources) -> int:
        """What the small model's session and the check take, in tokens of the model."""
        from specrag.engine import keys_values_bytes

        each = max(first, 1)
        share = keys_values_bytes(small.loaded.model, each) / keys_values_bytes(given.llm.loaded.model, each)
        return math.ceil(share * first) + PASSAGE_TOKENS  # the question and the answer, once more


@dataclass(frozen=True, slots=True)
class Checked(Event):
    """An event: the small model has answered, and the model has judged the answer.

    Attributes:
        text: the small model's answer.
        drafter: its name.
        confidence: the model's probability of Yes, against No.
        taken: whether the answer is taken.
    """

    text: str
    drafter: str
    confidence: float
    taken: bool

    name = "checked"

    @property
    def status(self) -> str:
        return "" if self.taken else f"{self.drafter}'s answer is doubted ({self.confidence:.0%}): reading"

    def describe(self) -> dict[str, Any]:
        return {
            "draft": self.text,
            "drafter": self.drafter,
            "confidence": self.confidence,
            "taken": self.taken,
        }


@dataclass(frozen=True, slots=True)
class CascadeAnswer(Details):
    """An answer, and which model gave it.

    Attributes:
        answer: as in standard RAG, from the model that gave it.
        draft: the small model's, taken or not.
        verdict: the model's.
    """

    answer: Answer
    draft: Answer
    verdict: Checked

    def summary(self) -> dict[str, Any]:
        told = {"drafter": self.verdict.drafter, "confidence": round(self.verdict.confidence, 4)}
        return {**self.answer.summary(), **told, "taken": self.verdict.taken}

    def record(self) -> dict[str, Any]:
        return {**self.answer.record(), **self.summary(), "draft": self.draft.text}

    def notes(self) -> list[str]:
        return self.answer.notes()

    def figures(self) -> list[str]:
        said = "taken" if self.verdict.taken else "doubted"
        return [f"{self.verdict.drafter}'s answer {said} ({self.verdict.confidence:.0%})"]


def _weights(llm: LocalModel) -> tuple[Path, Path | None]:
    return llm.loaded.files.folder, llm.loaded.adapter


class _Check:
    """What the model reads to judge an answer; until it is closed, the model's own answer can continue from there.

    Args:
        llm: the model.
        tenant: the tenant that asks.
    """

    def __init__(self, llm: LocalModel, tenant: str) -> None:
        self._llm = llm
        self._tenant = tenant
        self._session: Session | None = None

    def confidence(self, prompt: Sequence[Message]) -> Coroutine[float]:
        """The model's probability of Yes, against No, after a prompt."""
        llm = self._llm
        tokens = llm.encode(prompt)
        session = self._session = llm.prefixes.start(llm.loaded.model, tokens, self._tenant)
        yield from session.extend(tokens[len(session) :])
        yes, no = (llm.tokenizer.encode(word, special=False)[0] for word in ("Yes", "No"))
        (row,) = yield from session.score(DraftTree(), Outputs(log_probs_of=(yes, no)))
        llm.prefixes.hold(session, self._tenant)
        assert row.log_probs is not None
        return 1 / (1 + math.exp(min(float(row.log_probs[1] - row.log_probs[0]), 700.0)))

    def close(self) -> None:
        """Release what was read."""
        if self._session is not None:
            self._llm.prefixes.release(self._session)
            self._session.close()


def check_prompt(request: Request, answer: Answer) -> tuple[Message, ...]:
    """The prompt that asks the model about an answer, after the passages up to the last one that it cites.

    The passages stand as in the prompt of standard RAG, so that both prompts begin alike.
    """
    last = max((source.number for source in answer.sources if source.cited), default=len(answer.sources))
    passages = [source.passage for source in answer.sources[:last]]
    said = f"{without_citations(answer.text).strip()}\n\n{_ASKED}"
    question = f"Question: {request.question}"
    return build_prompt(said, passages, system=request.system, instruction=question, label="Proposed answer")


def _keep_steps(kept: list[object]) -> Any:
    """Hold back the steps of an answer that may not be shown, and pass the rest on."""

    def tell(value: object) -> Sequence[object]:
        if isinstance(value, Step):
            kept.append(value)
            return ()
        return (value,)

    return tell


def _found_anew(value: object, draft: Answer) -> Sequence[object]:
    """Report sources once; again only if the model reads some that the small model had no room for."""
    if not isinstance(value, Sources):
        return (value,)
    if len(value.sources) <= len(draft.sources):
        return ()
    return (replace(value, question=draft.question, sources=_as_found(value.sources, draft)),)


def _as_found(sources: Sequence[Source], draft: Answer) -> tuple[Source, ...]:
    """Sources with the search's scores, which given passages lack."""
    found = [(source.score, source.similarity) for source in draft.sources]
    found += [(hit.score, None) for hit in draft.left_out]
    both = zip(sources, found, strict=False)
    return tuple(replace(source, score=score, similarity=similarity) for source, (score, similarity) in both)


def _told(result: Result, draft: Answer, verdict: Checked, phases: dict[str, float]) -> Result:
    """The result with the search's scores for its sources."""
    answer = result.details
    assert isinstance(answer, Answer)
    sources = _as_found(result.sources, draft)
    details = CascadeAnswer(replace(answer, sources=sources, question=draft.question), draft, verdict)
    timing = replace(result.timing, phases={**result.timing.phases, **phases})
    return replace(result, sources=sources, details=details, timing=timing)
