"""The result of Speculative RAG: drafts with their scores, the verdict, where the time went; and its events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from specrag.engine import FinishReason
from specrag.methods.speculative_rag.perspectives import Strategy
from specrag.methods.speculative_rag.scoring import Measured, Scores, Scoring
from specrag.request import Details, Event, Result, Source, Table, Timing, Usage, nothing_relevant

#: The answer if no draft holds any text.
NO_DRAFT = "No draft holds an answer."

#: Characters shown of a draft that does not follow the form.
_SHOWN_CHARACTERS = 120


@dataclass(frozen=True, slots=True)
class Draft:
    """An answer from a few passages.

    Attributes:
        number: from 1, in the order of the subsets, or of the choices if nobody drafted.
        sources: numbers of the passages that it was written from, or that the verifier read.
        cited: those of them that its answer cites; ``None`` in a form without citations.
        text: as the drafter wrote it.
        rationale, answer: what it says; empty if the draft is malformed.
        malformed: why the text is not a draft; ``None`` if it is one.
        measured: log-probabilities by drafter and verifier; ``None`` if malformed.
        scores: the factors of its score; ``None`` until it is scored, and if malformed.
        shortened: whether its passages were cut to fit the drafter's context.
        finish_reason: ``"stop"`` or ``"length"``.
        prompt_tokens: of the drafter's prompt.
        read_tokens: those of them that were read for this draft alone; what drafts share is counted once.
        completion_tokens: of the text.
        passes: passes of the drafter; 0 if it does not report them.
        seconds: from the beginning of drafting to the text's end.
        drafted_by, accepted_by: tokens by the token drafter that guessed them for this draft.
        held: whether a passage that its answer cites holds it; true in a form without citations.
    """

    number: int
    sources: tuple[int, ...]
    text: str
    rationale: str
    answer: str
    malformed: str | None = None
    measured: Measured | None = None
    scores: Scores | None = None
    shortened: bool = False
    finish_reason: FinishReason = "stop"
    prompt_tokens: int = 0
    read_tokens: int = 0
    completion_tokens: int = 0
    passes: int = 0
    seconds: float = 0.0
    drafted_by: Mapping[str, int] = field(default_factory=dict)
    accepted_by: Mapping[str, int] = field(default_factory=dict)
    cited: tuple[int, ...] | None = None
    held: bool = True

    @property
    def standing(self) -> tuple[bool, float]:
        """What drafts are compared by: whether their citations hold them, then scores; malformed ones come last."""
        return (False, float("-inf")) if self.scores is None else (self.held, self.scores.total)

    @property
    def used(self) -> tuple[int, ...]:
        """Numbers of the passages that its answer rests on: those that it cites, or all that it was written from."""
        return self.sources if self.cited is None else self.cited


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the passages were dealt out.

    Attributes:
        strategy: as requested.
        encoder: what embedded the passages; ``None`` if nothing was clustered.
        clusters: the cluster of each passage, in their order; ``None`` if nothing was clustered.
        possible: how many distinct subsets there were.
        notes: what was requested but not possible, for people.
        shared: numbers of the passages that every one of several drafts read.
    """

    strategy: Strategy
    encoder: str | None
    clusters: tuple[int, ...] | None
    possible: int
    notes: tuple[str, ...]
    shared: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SpeculativeTiming:
    """Wall-clock seconds of an answer.

    Attributes:
        retrieval: of the search.
        embedding: of the passages' vectors, conditioned on the question.
        clustering: of K-means and the drawing of subsets.
        drafting: of all drafts.
        verification: of the scoring pass.
        total: of all, from the question to the verdict.
    """

    retrieval: float
    embedding: float
    clustering: float
    drafting: float
    verification: float
    total: float

    @property
    def without_embedding(self) -> float:
        """The answer's time as the paper counts it: as if the vectors had existed already."""
        return self.total - self.embedding


@dataclass(frozen=True, slots=True)
class SpeculativeUsage:
    """Tokens that each model has read and written.

    Attributes:
        drafter_prompt_tokens: of all drafts' prompts.
        drafter_read_tokens: those of them that were read: what drafts share is read once.
        drafter_completion_tokens: written.
        drafter_passes: of all drafts; drafts share passes.
        verifier_tokens: of all texts scored.
        verifier_read_tokens: those of them that were read.
        drafted_by, accepted_by: tokens by the token drafter that guessed them for the drafter.
    """

    drafter_prompt_tokens: int
    drafter_read_tokens: int
    drafter_completion_tokens: int
    drafter_passes: int
    verifier_tokens: int
    verifier_read_tokens: int
    drafted_by: Mapping[str, int] = field(default_factory=dict)
    accepted_by: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SpeculativeAnswer(Details):
    """The verdict, and everything that led to it.

    Attributes:
        text: the best draft's answer; if no draft could be scored, what `fallback` says.
        best: the number of the best draft; ``None`` if there is none.
        drafts: in the order of the subsets.
        sources: the passages, best first; ``cited`` is set for those that the best draft cites or, in the paper's form,
            was written from.
        question: as it was asked.
        abstained: nothing relevant was found and nothing was drafted, or every draft says that there is no answer.
        fallback: why the answer is not a scored draft, for people; ``None`` if it is one.
        scoring: how drafts were scored.
        sampling: how the passages were dealt out; ``None`` if nobody drafted.
        drafter, verifier: the models' names; no drafter if choices were weighed and none was named, no verifier if only
            the drafter's confidence counts.
    """

    text: str
    best: int | None
    drafts: tuple[Draft, ...]
    sources: tuple[Source, ...]
    question: str
    abstained: bool
    fallback: str | None
    scoring: Scoring
    sampling: Sampling | None
    drafter: str | None
    verifier: str | None
    timing: SpeculativeTiming
    usage: SpeculativeUsage

    @property
    def verifies_itself(self) -> bool:
        """Whether one model drafted and verified, with or without an adapter."""
        return self.verifier == self.drafter

    @property
    def malformed(self) -> int:
        """Number of drafts that do not follow the form."""
        return sum(draft.malformed is not None for draft in self.drafts)

    def result(self) -> Result:
        """The answer in the form common to all methods: the tokens of all drafts; the verifier's count as read."""
        timing, usage = self.timing, self.usage
        best = None if self.best is None else self.drafts[self.best - 1]
        return Result(
            text=self.text,
            tokens=(),
            finish_reason="stop" if best is None else best.finish_reason,
            usage=Usage(
                prompt_tokens=usage.drafter_prompt_tokens + usage.verifier_tokens,
                cached_tokens=0,
                completion_tokens=usage.drafter_completion_tokens,
                passes=usage.drafter_passes,
                drafted_by=usage.drafted_by,
                accepted_by=usage.accepted_by,
            ),
            timing=Timing(
                0.0,
                timing.drafting,
                phases={
                    "retrieval": timing.retrieval,
                    "embedding": timing.embedding,
                    "clustering": timing.clustering,
                    "verification": timing.verification,
                },
            ),
            sources=self.sources,
            retrieved=len(self.sources),
            details=self,
        )

    def summary(self) -> dict[str, Any]:
        return {
            "abstained": self.abstained,
            "fallback": self.fallback,
            "best": self.best,
            "malformed": self.malformed,
        }

    def record(self) -> dict[str, Any]:
        return {
            **self.summary(),
            "question": self.question,
            "drafts": [_describe(draft) for draft in self.drafts],
            "sampling": None if self.sampling is None else asdict(self.sampling),
            "scoring": asdict(self.scoring),
            "drafter": self.drafter,
            "verifier": self.verifier,
            "verifies_itself": self.verifies_itself,
            "tokens_by_role": asdict(self.usage),
            "seconds": {**asdict(self.timing), "without_embedding": self.timing.without_embedding},
        }

    def notes(self) -> list[str]:
        notes = [*(self.sampling.notes if self.sampling is not None else ())]
        if self.drafts and self.sampling is None:
            notes.append(f"{self.verifier} weighed each choice; nobody had to draft")
        elif self.drafts and self.verifies_itself:
            notes.append(
                f"one model, {self.drafter}, drafted and verified; a larger verifier (--model) chooses better"
            )
        if self.fallback is not None:
            notes.append(self.fallback)
        elif self.malformed:
            notes.append(f"{self.malformed} of {len(self.drafts)} drafts do not keep to the form")
        shortened = sum(draft.shortened for draft in self.drafts)
        if shortened:
            notes.append(f"the passages of {shortened} drafts were shortened to fit the drafter's context")
        if self.abstained and self.sources and not self.drafts:
            notes.append(nothing_relevant(self.sources, None))
        return notes

    def figures(self) -> list[str]:
        if not self.drafts:
            return []
        usage = self.usage
        return [
            f"{len(self.drafts)} draft{'s' if len(self.drafts) != 1 else ''}, {self.timing.total:.2f} s",
            f"the drafter read {usage.drafter_read_tokens:,} tokens and wrote "
            f"{usage.drafter_completion_tokens:,}, the verifier read {usage.verifier_read_tokens:,}",
        ]

    def tables(self) -> list[Table]:
        """See :class:`~specrag.request.Details`: the drafts, best first; factors are log-probabilities in nats."""
        if not self.drafts:
            return []
        factors = [
            (name, attribute)
            for name, attribute in (
                ("drafter", "draft"),
                ("contain", "self_contain"),
                ("reflect", "self_reflect"),
            )
            if getattr(self.scoring, attribute)
        ]
        rows = []
        for draft in self.ranked:
            figures = [""] * (len(factors) + 1)
            if draft.scores is not None:
                figures = [f"{getattr(draft.scores, attribute):.2f}" for _, attribute in factors]
                figures.append(f"{draft.scores.total:.2f}")
            said = f"{draft.answer}\n{draft.rationale}" if draft.rationale else draft.answer
            if draft.malformed:
                said = f"malformed: {draft.malformed}\n{draft.text[:_SHOWN_CHARACTERS]}"
            numbers = " ".join(str(number) for number in draft.sources)
            rows.append((str(draft.number), numbers, said, *figures))
        names = ("#", "from", "answer, and its rationale", *(name for name, _ in factors), "score")
        best = next((place for place, draft in enumerate(self.ranked) if draft.number == self.best), None)
        return [Table("drafts", names, tuple(rows), best)]

    @property
    def ranked(self) -> tuple[Draft, ...]:
        """The drafts, best first; malformed ones last."""
        return tuple(sorted(self.drafts, key=lambda draft: draft.standing, reverse=True))


def _describe(draft: Draft) -> dict[str, Any]:
    described = asdict(draft)
    measured = draft.measured
    if measured is not None:
        parts = {
            "rationale": measured.rationale,
            "answer": measured.answer,
            "self_contain": measured.self_contain,
            "self_reflect": measured.self_reflect,
        }
        described["measured"] = {
            name: None if part is None else {"log_prob": part.total, "tokens": part.count}
            for name, part in parts.items()
        }
    return described


@dataclass(frozen=True, slots=True)
class SubsetsDrawn(Event):
    """An event: which passages each draft will be written from.

    Attributes:
        subsets: numbers of sources, one tuple for each draft.
    """

    subsets: tuple[tuple[int, ...], ...]
    sampling: Sampling

    name = "subsets"

    @property
    def status(self) -> str:
        return f"drafting {len(self.subsets)} answers"

    def describe(self) -> dict[str, Any]:
        return {"subsets": [list(subset) for subset in self.subsets]}


@dataclass(frozen=True, slots=True)
class DraftDelta(Event):
    """An event: characters that a draft has gained.

    Attributes:
        draft: its number.
    """

    draft: int
    text: str

    name = "delta"


@dataclass(frozen=True, slots=True)
class DraftDone(Event):
    """An event: a draft is written and has been parsed; its scores are still to come."""

    draft: Draft

    name = "draft"

    @property
    def status(self) -> str:
        return f"draft {self.draft.number} is written"

    def describe(self) -> dict[str, Any]:
        draft = self.draft
        return {
            "index": draft.number - 1,
            "passages": list(draft.sources),
            "rationale": draft.rationale,
            "answer": draft.answer,
            "malformed": draft.malformed,
            "tokens": draft.completion_tokens,
            "seconds": draft.seconds,
        }


@dataclass(frozen=True, slots=True)
class DraftsScored(Event):
    """An event: the drafts with their scores."""

    drafts: tuple[Draft, ...]

    name = "scores"

    def describe(self) -> dict[str, Any]:
        scored = [(draft, draft.scores) for draft in self.drafts if draft.scores is not None]
        best = max(scored, key=lambda pair: pair[0].standing, default=None)
        return {
            "winner": None if best is None else best[0].number - 1,
            "scores": [
                {
                    "index": draft.number - 1,
                    "draft": scores.draft,
                    "self_consistency": scores.self_contain,
                    "self_reflection": scores.self_reflect,
                    "total": scores.total,
                }
                for draft, scores in scored
            ],
        }


@dataclass(frozen=True, slots=True)
class Verdict(Event):
    """An event, the last one: the answer.

    Attributes:
        best: the draft's number; ``None`` for a fallback.
    """

    text: str
    best: int | None
    fallback: str | None

    name = "verdict"

    @property
    def text_gained(self) -> str:
        return self.text

    def describe(self) -> dict[str, Any]:
        return {"winner": None if self.best is None else self.best - 1, "fallback": self.fallback}
