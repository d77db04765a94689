"""The steps of Speculative RAG that run no model coroutine: finding passages, dealing them out, the verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from specrag.engine import Coroutine
from specrag.errors import InputError
from specrag.methods.retriever import VectorRetriever, similarities
from specrag.methods.speculative_rag.cited import NOT_HERE
from specrag.methods.speculative_rag.drafting import Written
from specrag.methods.speculative_rag.form import ParsedDraft, Span
from specrag.methods.speculative_rag.perspectives import (
    Sampled,
    Strategy,
    cluster_for,
    needs_clusters,
    sample_subsets,
)
from specrag.methods.speculative_rag.result import NO_DRAFT, Draft, Sampling
from specrag.methods.speculative_rag.scoring import BEST, Claim, Measured, Scoring, score, verifying
from specrag.methods.speculative_rag.task import Task
from specrag.models import TextScorer
from specrag.request import ABSTENTION
from specrag.retrieval import Hit, Passage

if TYPE_CHECKING:
    from specrag.methods.passages import Retrieval
    from specrag.retrieval.encoder import QuestionVectors


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search, with every text once.

    Attributes:
        similarities: cosine of each passage and the question; ``None`` if it does not count.
        duplicates: number of passages left out because a better one has the same text.
    """

    hits: Sequence[Hit]
    similarities: Sequence[float | None]
    duplicates: int
    seconds: float


def find(question: str, retrieval: Retrieval, clock: Callable[[], float]) -> Found:
    """Search; passages of equal text count once."""
    started, retriever = clock(), retrieval.retriever
    if not len(retriever):
        return Found((), (), 0, clock() - started)
    # Passages may have been removed since the request was checked.
    hits = replace(retrieval, k=min(retrieval.k, len(retriever))).search(question)
    texts: dict[str, Hit] = {}
    for hit in hits:
        texts.setdefault(" ".join(hit.passage.text.split()), hit)
    kept = list(texts.values())
    similar: Sequence[float | None] = [None] * len(kept)
    if retrieval.abstain and kept and isinstance(retriever, VectorRetriever):
        similar = similarities(retriever, question, kept)
    return Found(kept, similar, len(hits) - len(kept), clock() - started)


@dataclass(frozen=True, slots=True)
class Dealing:
    """How passages are dealt out to drafts.

    Args:
        m: drafts.
        k: passages that each is written from.
        vectors: embed passages for clustering.
        seed: of clusters and subsets.
    """

    m: int
    k: int
    strategy: Strategy
    vectors: QuestionVectors
    seed: int


@dataclass(frozen=True, slots=True)
class Dealt:
    """The subsets, as indices of passages, and the seconds that they took."""

    subsets: Sequence[tuple[int, ...]]
    sampling: Sampling
    embedding: float
    clustering: float


def deal(
    question: str, passages: Sequence[Passage], dealing: Dealing, duplicates: int, clock: Callable[[], float]
) -> Dealt:
    """Embed, cluster and draw, as far as the strategy needs it.

    Args:
        duplicates: passages that were left out, for the notes.
    """
    started = clock()
    clusters = encoder = None
    vectors = None
    if needs_clusters(dealing.strategy, len(passages), dealing.k):
        vectors = dealing.vectors.embed(question, passages)
        encoder = dealing.vectors.name
    embedded = clock()
    if vectors is not None:
        clusters = cluster_for(dealing.strategy, vectors, dealing.k, dealing.seed)
    sampled: Sampled = sample_subsets(
        len(passages), dealing.m, dealing.k, dealing.strategy, clusters, dealing.seed
    )
    notes = sampled.notes
    if duplicates:
        notes = (f"{duplicates} of the passages found say the same as others and were left out", *notes)
    shared = tuple(index + 1 for index in sampled.shared)
    sampling = Sampling(dealing.strategy, encoder, sampled.clusters, sampled.possible, notes, shared)
    return Dealt(sampled.subsets, sampling, embedded - started, clock() - embedded)


def each_choice(task: Task, passages: int) -> list[Written]:
    """A draft of each choice, which nobody has to write.

    Args:
        passages: how many there are; the verifier reads the first few.
    """
    read = tuple(range(1, min(passages, BEST) + 1))
    nothing = Measured(None, None)
    return [
        Written(
            Draft(number, read, choice, "", choice, measured=nothing),
            ParsedDraft("", choice, Span(0, 0), Span(0, len(choice))),
        )
        for number, choice in enumerate(task.choices, 1)
    ]


@dataclass(frozen=True, slots=True)
class ScoredDrafts:
    """The drafts with their scores, and the tokens of the verifier."""

    drafts: tuple[Draft, ...]
    tokens: int = 0
    read_tokens: int = 0


def scoring_drafts(
    verifier: TextScorer | None,
    task: Task,
    passages: Sequence[Passage],
    written: Sequence[Written],
    scoring: Scoring,
) -> Coroutine[ScoredDrafts]:
    """Verify and score every draft that follows the form.

    Raises:
        InputError: the drafter's confidence counts but it gave no log-probabilities.
    """
    drafts = [one.draft for one in written]
    claims = {
        place: Claim(one.parsed, [passages[number - 1] for number in one.draft.sources])
        for place, one in enumerate(written)
        if one.parsed is not None
    }
    for place in claims:
        measured = drafts[place].measured
        assert measured is not None
        if scoring.draft and measured.answer is None:
            remedy = "its model gives no log-probabilities: leave the draft's factor out of the scoring"
            raise InputError("drafter", f"draft {place + 1}", remedy)
    tokens = read = 0
    if verifier is not None and claims:
        verified = yield from verifying(verifier, task, list(claims.values()), scoring, passages)
        for place, one in zip(claims, verified, strict=True):
            measured = drafts[place].measured
            assert measured is not None
            measured = replace(measured, self_contain=one.self_contain, self_reflect=one.self_reflect)
            drafts[place] = replace(drafts[place], measured=measured)
            tokens, read = tokens + one.tokens, read + one.read_tokens
    for place in claims:
        measured = drafts[place].measured
        assert measured is not None
        drafts[place] = replace(drafts[place], scores=score(measured, scoring))
    return ScoredDrafts(tuple(drafts), tokens, read)


@dataclass(frozen=True, slots=True)
class Judged:
    """The answer's text, the number of its draft, and why there is none."""

    text: str
    best: int | None
    fallback: str | None = None
    abstained: bool = False


def judge(drafts: Sequence[Draft]) -> Judged:
    """The best draft's answer, the first among equals; if none follows the form, the first that holds any text.

    One that its own citations do not hold is the answer only if there is no other.
    If all of them say that their passages do not hold the answer, there is none.
    """
    scored = [draft for draft in drafts if draft.scores is not None]
    if scored:
        best = max(scored, key=lambda draft: draft.standing)
        return Judged(best.answer, best.number)
    if drafts and all(draft.malformed == NOT_HERE for draft in drafts):
        reason = "every draft says that its passages do not hold the answer"
        return Judged(ABSTENTION, None, reason, abstained=True)
    for draft in drafts:
        if draft.text.strip():
            reason = f"no draft keeps to the form; this is draft {draft.number} as it was written"
            return Judged(" ".join(draft.text.split()), None, reason)
    return Judged(NO_DRAFT, None, "all drafts are empty")
