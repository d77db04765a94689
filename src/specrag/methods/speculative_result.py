"""What Speculative RAG gives back: drafts with their scores, the verdict, where the time went; and its events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from specrag.engine.stopping import FinishReason
from specrag.methods.answer import Source
from specrag.methods.draft_scores import Measured, Scores, Scoring
from specrag.methods.perspectives import Strategy

#: The answer where no draft holds any text.
NO_DRAFT = "No draft holds an answer."


@dataclass(frozen=True, slots=True)
class Draft:
    """An answer from a few passages.

    Attributes:
        number: from 1, in the order of the subsets.
        sources: numbers of the passages that it was written from.
        text: as the drafter wrote it.
        rationale, answer: what it says; empty where the draft is malformed.
        malformed: why the text is no draft; ``None`` if it is one.
        measured: log-probabilities by drafter and verifier; ``None`` where malformed.
        scores: the factors of its score; ``None`` until it is scored, and where malformed.
        shortened: whether its passages were cut to fit the drafter's context.
        finish_reason: ``"stop"`` or ``"length"``.
        prompt_tokens: of the drafter's prompt.
        read_tokens: those of them that were read for this draft alone; what drafts share is counted once.
        completion_tokens: of the text.
        passes: passes of the drafter; 0 where it does not tell.
        seconds: from the beginning of drafting to the text's end.
        drafted_by, accepted_by: tokens by the drafter that guessed them for this one.
    """

    number: int
    sources: tuple[int, ...]
    text: str
    rationale: str
    answer: str
    malformed: str | None
    measured: Measured | None
    scores: Scores | None
    shortened: bool
    finish_reason: FinishReason
    prompt_tokens: int
    read_tokens: int
    completion_tokens: int
    passes: int
    seconds: float
    drafted_by: Mapping[str, int] = field(default_factory=dict)
    accepted_by: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the passages were dealt out.

    Attributes:
        strategy: as asked for.
        encoder: what embedded the passages; ``None`` where nothing was clustered.
        clusters: the cluster of each passage, in their order; ``None`` where nothing was clustered.
        possible: how many distinct subsets there were.
        notes: what was asked for and could not be had, for people.
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
        embedding: of the passages' vectors in the light of the question.
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
        """The answer's time as the paper counts it: as if the vectors had been there already."""
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
        drafted_by, accepted_by: tokens by what guessed them for the drafter.
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
class SpeculativeAnswer:
    """The verdict, and all that led to it.

    Attributes:
        text: the best draft's answer; where no draft could be scored what `fallback` says.
        best: the number of the draft that it is; ``None`` where there is none.
        drafts: in the order of the subsets.
        sources: the passages, best first; ``cited`` is said of those that the best draft was written from.
        question: as it was asked.
        abstained: nothing relevant was found, and nothing was drafted.
        fallback: why the answer is no scored draft, for people; ``None`` where it is one.
        scoring: how drafts were scored.
        sampling: how the passages were dealt out; ``None`` where nothing was drafted.
        drafter, verifier: the models' names; no verifier where only the drafter's confidence counts.
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
    drafter: str
    verifier: str | None
    timing: SpeculativeTiming
    usage: SpeculativeUsage

    @property
    def verifies_itself(self) -> bool:
        """Whether one model drafted and verified, with an adapter or without."""
        return self.verifier == self.drafter

    @property
    def malformed(self) -> int:
        """Drafts that do not keep to the form."""
        return sum(draft.malformed is not None for draft in self.drafts)

    @property
    def ranked(self) -> tuple[Draft, ...]:
        """The drafts, best first; malformed ones last."""
        return tuple(sorted(self.drafts, key=lambda d: -d.scores.total if d.scores else float("inf")))


@dataclass(frozen=True, slots=True)
class SubsetsDrawn:
    """An event: which passages each draft will be written from.

    Attributes:
        subsets: numbers of sources, a tuple for each draft.
    """

    subsets: tuple[tuple[int, ...], ...]
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class DraftDelta:
    """An event: characters that a draft has gained.

    Attributes:
        draft: its number.
    """

    draft: int
    text: str


@dataclass(frozen=True, slots=True)
class DraftDone:
    """An event: a draft is written and read; its scores are still to come."""

    draft: Draft


@dataclass(frozen=True, slots=True)
class DraftsScored:
    """An event: the drafts with their scores."""

    drafts: tuple[Draft, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """An event, the last one: the answer.

    Attributes:
        best: the draft's number; ``None`` for a fallback.
    """

    text: str
    best: int | None
    fallback: str | None
