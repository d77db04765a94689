"""Drafts from subsets of the passages, all in one batch (Speculative RAG, section 3.2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeAlias, get_args

from specrag.engine import Coroutine
from specrag.errors import ContextLengthError, InputError
from specrag.methods.events import map_events
from specrag.methods.generator import LocalGenerator
from specrag.methods.prompts import FEWEST_WORDS, cut_passage, most_that_fit
from specrag.methods.speculative_rag.cited import (
    RELUCTANCE,
    cited_lead,
    cited_prompt,
    is_trained,
    read_cited,
)
from specrag.methods.speculative_rag.form import (
    CUE,
    LEAD,
    MalformedDraft,
    ParsedDraft,
    draft_prompt,
    read_draft,
)
from specrag.methods.speculative_rag.result import Draft, DraftDelta, DraftDone
from specrag.methods.speculative_rag.scoring import Measured
from specrag.methods.speculative_rag.task import Task
from specrag.models import (
    AnswerFormat,
    GeneratedText,
    PartScore,
    Reluctance,
    TextDelta,
    TextDone,
    TextGenerator,
    TextPrompt,
    TextRequest,
    assign,
)
from specrag.retrieval import Passage

Form: TypeAlias = Literal["paper", "cited"]
FORMS: tuple[Form, ...] = get_args(Form)


@dataclass(frozen=True, slots=True)
class Drafting:
    """How drafts are written.

    Args:
        max_tokens: of a draft, rationale and answer together.
        rationale_tokens: maximum tokens of a rationale, if the drafter can be constrained to the form.
        example: show the form by an example in the prompt; ``None`` shows it to drafters that were not trained on it.
        steer: constrain a local drafter to the form (:class:`~specrag.models.roles.AnswerFormat`); an endpoint only
            gets the prompt.
        form: the paper's, a rationale and then the answer in a few words, or a sentence with citations
            (``speculative_rag/cited.py``). Choices and claims are answered in the paper's form.

    Raises:
        InputError: a rationale may take all of a draft.
    """

    max_tokens: int = 128
    rationale_tokens: int = 80
    example: bool | None = None
    steer: bool = True
    form: Form = "paper"

    def __post_init__(self) -> None:
        if self.steer and self.rationale_tokens >= self.max_tokens:
            remedy = f"give fewer than max_tokens, {self.max_tokens}, or no answer would fit"
            raise InputError("rationale_tokens", self.rationale_tokens, remedy)

    def shows_example(self, drafter: TextGenerator) -> bool:
        """Whether a drafter is shown the form."""
        if self.example is not None:
            return self.example
        return not (isinstance(drafter, LocalGenerator) and drafter.llm.loaded.drafter_form == "paper")

    def answer_format(self, task: Task) -> AnswerFormat | None:
        """The paper's form, for a drafter that is constrained to it; with the task's own answers, if it has any."""
        if not self.steer:
            return None
        return AnswerFormat(CUE, self.rationale_tokens, tuple(f" {choice}" for choice in task.choices))

    def form_of(self, task: Task, drafter: TextGenerator) -> DraftForm:
        """What this drafter is asked for this task."""
        if self.form == "cited" and task.kind == "free-form":
            lead = cited_lead(task, drafter)
            shy = RELUCTANCE if is_trained(drafter) else None
            read = partial(read_cited, task, lead=lead)
            return DraftForm(partial(cited_prompt, task), lead, None, read, shy)
        prompt = partial(draft_prompt, task, example=self.shows_example(drafter))
        return DraftForm(
            prompt, LEAD, self.answer_format(task), lambda text, _passages, _numbers: read_draft(task, text)
        )


@dataclass(frozen=True, slots=True)
class DraftForm:
    """What a drafter is asked, and how its text is read.

    Attributes:
        prompt: makes the prompt from the passages that it reads.
        lead: how its text begins.
        answer_format: what it is constrained to.
        read: reads a text, given the passages that it was written from and their numbers.
        reluctance: a beginning that it should choose more rarely.
    """

    prompt: Callable[[Sequence[Passage]], TextPrompt]
    lead: str
    answer_format: AnswerFormat | None
    read: Callable[[str, Sequence[Passage], Sequence[int]], ParsedDraft | MalformedDraft]
    reluctance: Reluctance | None = None


@dataclass(frozen=True, slots=True)
class Written:
    """A draft, and what it says if it follows the form."""

    draft: Draft
    parsed: ParsedDraft | None


def drafting(
    drafter: TextGenerator,
    task: Task,
    passages: Sequence[Passage],
    subsets: Sequence[Sequence[int]],
    settings: Drafting,
) -> Coroutine[list[Written]]:
    """Write a draft for each subset, greedily, in one batch.

    Emits :class:`DraftDelta` as drafts grow and :class:`DraftDone` when one has ended.

    Args:
        subsets: indices of passages.

    Raises:
        ContextLengthError: the question leaves no room for a passage.
    """
    form = settings.form_of(task, drafter)
    fitted = [
        _fit(drafter, task, form, [passages[index] for index in subset], settings.max_tokens)
        for subset in subsets
    ]
    quoted = tuple(passage.text for passage in passages)  # also those that a draft does not see
    requests = [
        TextRequest(
            form.prompt(fit.passages),
            lead=form.lead,
            max_tokens=settings.max_tokens,
            references=quoted,
            answer_format=form.answer_format,
            reluctance=form.reluctance,
        )
        for fit in fitted
    ]
    written: dict[int, Written] = {}

    def tell(event: object) -> Iterable[object]:
        if isinstance(event, TextDelta):
            yield DraftDelta(event.request + 1, event.text)
        elif isinstance(event, TextDone):
            done = _read(form, event.request, subsets[event.request], fitted[event.request], event.generated)
            written[event.request] = done
            yield DraftDone(done.draft)

    yield from map_events(drafter.generating(requests), tell)
    return [written[number] for number in range(len(requests))]


@dataclass(frozen=True, slots=True)
class _Fitted:
    """Passages that fit the drafter's context, and whether they were cut to fit."""

    passages: Sequence[Passage]
    shortened: bool


def _fit(
    drafter: TextGenerator, task: Task, form: DraftForm, passages: Sequence[Passage], max_tokens: int
) -> _Fitted:
    """The passages, each cut to the same number of words if they do not fit otherwise."""
    limit = drafter.context_length
    if limit is None:
        return _Fitted(passages, False)
    room = limit - max_tokens

    def count(kept: Sequence[Passage]) -> int:
        return drafter.count(form.prompt(kept), form.lead)

    if count(passages) <= room:
        return _Fitted(passages, False)

    def cut(words: int) -> list[Passage]:
        return [cut_passage(passage, words) for passage in passages]

    longest = max(len(passage.text.split()) for passage in passages)
    words = most_that_fit(longest, lambda words: count(cut(words)) <= room)
    if words < FEWEST_WORDS:
        bare = count(())
        remedy = (
            f"the drafter's prompt has {bare:,} tokens before any passage and room for {max(room, 0):,}; "
            "shorten the question, ask for fewer tokens or passages a draft, or take another drafter"
        )
        raise ContextLengthError("question", task.text, remedy)
    return _Fitted(cut(words), True)


def _read(form: DraftForm, number: int, subset: Sequence[int], fit: _Fitted, text: GeneratedText) -> Written:
    sources = tuple(index + 1 for index in subset)
    found = form.read(text.text, fit.passages, sources)
    draft = Draft(
        number=number + 1,
        sources=sources,
        text=text.text,
        rationale="",
        answer="",
        shortened=fit.shortened,
        finish_reason=text.finish_reason,
        prompt_tokens=text.prompt_tokens,
        read_tokens=text.read_tokens,
        completion_tokens=len(text.tokens),
        passes=text.passes,
        seconds=text.seconds,
        drafted_by=text.drafted_by,
        accepted_by=text.accepted_by,
    )
    if isinstance(found, MalformedDraft):
        return Written(replace(draft, malformed=found.reason), None)
    read = replace(
        draft,
        rationale=found.rationale,
        answer=found.answer,
        measured=measure(text, found),
        cited=found.cited,
        held=found.held,
    )
    return Written(read, found)


def measure(text: GeneratedText, parsed: ParsedDraft) -> Measured:
    """How probable rationale and answer were, from the generation's own log-probabilities.

    A token belongs to the part in which it starts; the end of the text belongs to none.
    """
    starts, end = [], 0
    for token in text.tokens:
        starts.append(end)
        end += len(token.text)
    rationale, answer = parsed.rationale_span, parsed.answer_span
    places = assign(starts, [rationale.start, rationale.end, answer.start, answer.end])
    return Measured(_part(text, places, 0), _part(text, places, 2))


def _part(text: GeneratedText, places: Sequence[int], part: int) -> PartScore | None:
    values = [token.log_prob for token, place in zip(text.tokens, places, strict=True) if place == part]
    known = [value for value in values if value is not None]
    return PartScore(tuple(known)) if known and len(known) == len(values) else None
