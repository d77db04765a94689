"""Speculative RAG: drafts from different perspectives on the passages, one verification, the best draft (Wang et al.).

A drafter writes m drafts side by side, each from a subset of k passages; a verifier scores them all in one pass,
in the paper without reading a passage; the best one is the answer. Drafter and verifier are each a local model or an
endpoint, and may be the same.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from specrag.engine.executor import Executor
from specrag.engine.passes import Coroutine, Emit, Search
from specrag.errors import InputError
from specrag.methods.evidence import check_min_score, is_about_nothing, least_similarity
from specrag.methods.generator import SharingModel, as_generator, as_scorer
from specrag.methods.retriever import GivenPassages, Retriever, check_retriever, is_remote
from specrag.methods.speculative_rag import steps
from specrag.methods.speculative_rag.drafting import Drafting, drafting
from specrag.methods.speculative_rag.perspectives import (
    Strategy,
    check_count,
    check_sampling,
    cluster,
    needs_clusters,
)
from specrag.methods.speculative_rag.result import (
    DraftDelta,
    DraftDone,
    DraftsScored,
    Sampling,
    SpeculativeAnswer,
    SpeculativeTiming,
    SpeculativeUsage,
    SubsetsDrawn,
    Verdict,
)
from specrag.methods.speculative_rag.scoring import Scoring
from specrag.methods.speculative_rag.task import Task
from specrag.models.roles import TextGenerator, TextScorer
from specrag.request import ABSTENTION, Source, Sources
from specrag.retrieval.encoder.question_vectors import HasEncoder, QuestionVectors
from specrag.retrieval.passage import Passage

if TYPE_CHECKING:
    from specrag.retrieval.encoder.reranker import Reranker
    from specrag.retrieval.index.filters import Where

Event: TypeAlias = Sources | SubsetsDrawn | DraftDelta | DraftDone | DraftsScored | Verdict


class SpeculativeRAGPipeline:
    """Answers questions with a drafter and a verifier.

    Args:
        drafter: writes drafts: a loaded language model, a :class:`~specrag.methods.generator.LocalGenerator`
            that says how its tokens are decoded (such as by ReSpec), or an endpoint.
        verifier: scores them: a loaded language model or an endpoint, or the drafter again; ``None`` if
            ``scoring`` counts only the drafter's confidence.
        knowledge_base: where passages are found; ``None`` if every call brings its own.
        m: number of drafts.
        k: passages per draft.
        passages: how many to find for a question (n).
        strategy: how passages are dealt out (:data:`~specrag.methods.speculative_rag.perspectives.STRATEGIES`).
        scoring: how drafts are scored.
        drafting: how drafts are written.
        vectors: embed passages for clustering; by default with the knowledge base's encoder, else the default one.
        seed: of clusters and subsets.
        index: which index of the knowledge base finds passages.
        where: conditions on their metadata.
        reranker: a cross-encoder that reorders them.
        min_score, abstain: as in :class:`~specrag.StandardPipeline`: when nothing relevant was found.
        executor: runs the coroutines; by default the drafter's own, or a new one.
        clock: seconds, the executor's.

    Raises:
        InputError: a value cannot be used.
    """

    name = "speculative-rag"

    def __init__(  # noqa: PLR0913 - settings, each with a name of its own; methods give them as options
        self,
        drafter: TextGenerator | SharingModel,
        verifier: TextScorer | SharingModel | None,
        knowledge_base: Retriever | None = None,
        *,
        m: int = 5,
        k: int = 2,
        passages: int = 10,
        strategy: Strategy = "multi-perspective",
        scoring: Scoring | None = None,
        drafting: Drafting | None = None,
        vectors: QuestionVectors | None = None,
        seed: int = 0,
        index: str = "hybrid",
        where: Where | None = None,
        reranker: Reranker | None = None,
        min_score: float | None = None,
        abstain: bool = True,
        executor: Executor | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if knowledge_base is not None:
            check_retriever(knowledge_base)
        check_sampling(m, k, strategy)
        check_count("passages", passages)
        self.scoring = scoring or Scoring()
        if verifier is None and self.scoring.verifies:
            remedy = "give a model, or a scoring of the drafter's confidence alone"
            raise InputError("verifier", None, remedy)
        check_min_score(min_score, knowledge_base)
        self.drafter = as_generator(drafter)
        self.verifier = as_scorer(verifier) if verifier is not None and self.scoring.verifies else None
        self.knowledge_base = knowledge_base
        self.m = m
        self.k = k
        self.passages = passages
        self.strategy: Strategy = strategy
        self.drafting = drafting or Drafting()
        self.seed = seed
        self.index = index
        self.where = where
        self.reranker = reranker
        self.min_score = min_score
        self.abstain = abstain
        # The knowledge base's encoder is often loaded already.
        known = knowledge_base.encoder if isinstance(knowledge_base, HasEncoder) else None
        self.vectors = vectors or QuestionVectors(known)
        self._executor = executor
        self._clock = clock

    @property
    def executor(self) -> Executor:
        """Runs the coroutines."""
        if self._executor is None:
            for model in (self.drafter, self.verifier):
                found = getattr(model, "executor", None)
                if isinstance(found, Executor):
                    self._executor = found
                    break
            else:
                self._executor = Executor(clock=self._clock)
        return self._executor

    def answering(
        self, question: str | Task, *, passages: Sequence[Passage] | None = None
    ) -> Coroutine[SpeculativeAnswer]:
        """A coroutine for :attr:`executor` that answers a question.

        Emits sources, subsets, drafts as they grow and end, scores, the verdict. Whatever can be checked without
        calling a model is checked by the call itself.

        Args:
            question: in words, or a task of another kind.
            passages: those to answer from, best first, instead of a search; at most the first n are used.

        Raises:
            InputError: a value cannot be used, there are no passages, or the verifier cannot score.
            ContextLengthError: the question leaves no room for a passage.
            SpecragError: an endpoint does not answer.
        """
        task = question if isinstance(question, Task) else Task(question)
        retriever = self.knowledge_base
        if passages is not None:
            if not passages:
                raise InputError("passages", list(passages), "give at least one passage")
            retriever = GivenPassages(passages)
        if retriever is None:
            raise InputError("passages", None, "give passages, or a knowledge base to find them in")
        return self._answering(task, retriever)

    def prepare(self) -> None:
        """Load what the first answer would otherwise wait for, and make sure that the verifier can score.

        Raises:
            InputError: the verifier cannot score.
            SpecragError: an endpoint does not answer.
        """
        if self.verifier is not None:
            self.verifier.check_scoring()
        if needs_clusters(self.strategy, self.passages, self.k):
            cluster(self.vectors.embed("?", [Passage(0, "", "", "", "?", {})]), 1, self.seed)

    # -- the steps ------------------------------------------------------------------------------------------

    def _answering(self, task: Task, retriever: Retriever) -> Coroutine[SpeculativeAnswer]:
        started = self._clock()
        if self.verifier is not None:
            yield Search(self.verifier.check_scoring, remote=True)
        searching = self._clock()
        search = steps.Search(self.passages, self.index, self.where, self.reranker, self.abstain)
        found: steps.Found = yield Search(
            lambda: steps.find(task.text, retriever, search, self._clock), is_remote(retriever)
        )
        sources = tuple(
            Source(number, hit.passage, hit.score, similarity)
            for number, (hit, similarity) in enumerate(zip(found.hits, found.similarities, strict=True), 1)
        )
        nothing = not sources or (
            self.abstain
            and is_about_nothing(retriever, task.text, found.hits, found.similarities, self.min_score)
        )
        least = least_similarity(retriever, self.min_score)
        retrieval = self._clock() - searching
        yield Emit(Sources(task.text, sources, (), False, nothing, 0.0, retrieval, least))
        if nothing:
            yield Emit(Verdict(ABSTENTION, None, None))
            total = self._clock() - started
            return self._sum_up(task, sources, SpeculativeTiming(retrieval, 0.0, 0.0, 0.0, 0.0, total))
        read = [source.passage for source in sources]
        dealing = steps.Dealing(self.m, self.k, self.strategy, self.vectors, self.seed)
        dealt: steps.Dealt = yield Search(
            lambda: steps.deal(task.text, read, dealing, found.duplicates, self._clock)
        )
        numbers = tuple(tuple(index + 1 for index in subset) for subset in dealt.subsets)
        yield Emit(SubsetsDrawn(numbers, dealt.sampling))
        dealt_at = self._clock()
        written = yield from drafting(self.drafter, task, read, dealt.subsets, self.drafting)
        drafted = self._clock()
        scored = yield from steps.scoring_drafts(self.verifier, task, read, written, self.scoring)
        yield Emit(DraftsScored(scored.drafts))
        judged = steps.judge(scored.drafts)
        yield Emit(Verdict(judged.text, judged.best, judged.fallback))
        ended = self._clock()
        timing = SpeculativeTiming(
            retrieval, dealt.embedding, dealt.clustering, drafted - dealt_at, ended - drafted, ended - started
        )
        return self._sum_up(task, sources, timing, scored, judged, dealt.sampling)

    def _sum_up(
        self,
        task: Task,
        sources: tuple[Source, ...],
        timing: SpeculativeTiming,
        scored: steps.ScoredDrafts | None = None,
        judged: steps.Judged | None = None,
        sampling: Sampling | None = None,
    ) -> SpeculativeAnswer:
        drafts = () if scored is None else scored.drafts
        best = None if judged is None else judged.best
        used = () if best is None else drafts[best - 1].used
        return SpeculativeAnswer(
            text=ABSTENTION if judged is None else judged.text,
            best=best,
            drafts=drafts,
            sources=tuple(replace(source, cited=source.number in used) for source in sources),
            question=task.text,
            abstained=judged is None or judged.abstained,
            fallback=None if judged is None else judged.fallback,
            scoring=self.scoring,
            sampling=sampling,
            drafter=self.drafter.name,
            verifier=None if self.verifier is None else self.verifier.name,
            timing=timing,
            usage=SpeculativeUsage(
                drafter_prompt_tokens=sum(draft.prompt_tokens for draft in drafts),
                drafter_read_tokens=sum(draft.read_tokens for draft in drafts),
                drafter_completion_tokens=sum(draft.completion_tokens for draft in drafts),
                drafter_passes=sum(draft.passes for draft in drafts),
                verifier_tokens=0 if scored is None else scored.tokens,
                verifier_read_tokens=0 if scored is None else scored.read_tokens,
                drafted_by=_summed(draft.drafted_by for draft in drafts),
                accepted_by=_summed(draft.accepted_by for draft in drafts),
            ),
        )


def _summed(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return dict(total)
