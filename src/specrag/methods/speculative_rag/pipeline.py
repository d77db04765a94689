"""Speculative RAG: drafts from different perspectives on the passages, one verification, the best draft (Wang et al.).

A drafter writes m drafts side by side, each from a subset of k passages; a verifier scores them all in one pass,
in the paper without reading a passage; the best one is the answer. Drafter and verifier are each a local model or an
endpoint, and may be the same.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from specrag.engine import Coroutine, Emit, Executor, Search
from specrag.errors import InputError
from specrag.methods.evidence import is_about_nothing, least_similarity
from specrag.methods.generator import SharingModel, as_generator, as_scorer
from specrag.methods.retriever import is_remote
from specrag.methods.speculative_rag import steps
from specrag.methods.speculative_rag.drafting import Written, drafting
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
from specrag.methods.speculative_rag.task import Task
from specrag.models import TextGenerator, TextScorer
from specrag.request import ABSTENTION, Source, Sources
from specrag.retrieval.encoder import HasEncoder, QuestionVectors

if TYPE_CHECKING:
    from specrag.methods.passages import Retrieval
    from specrag.methods.speculative_rag import SpeculativeRAG
    from specrag.retrieval import Passage

Event: TypeAlias = Sources | SubsetsDrawn | DraftDelta | DraftDone | DraftsScored | Verdict


@dataclass(frozen=True, slots=True)
class _Drafted:
    """Drafts, how their passages were dealt out, and seconds; nothing is dealt out to choices."""

    written: Sequence[Written]
    sampling: Sampling | None = None
    embedding: float = 0.0
    clustering: float = 0.0
    seconds: float = 0.0


class SpeculativeRAGPipeline:
    """Answers questions with a drafter and a verifier.

    Args:
        drafter: writes drafts: a loaded language model, a :class:`~specrag.methods.generator.LocalGenerator`
            that says how its tokens are decoded (such as by ReSpec), or an endpoint; ``None`` if only choices are
            weighed.
        verifier: scores them: a loaded language model or an endpoint, or the drafter again; ``None`` if only the
            drafter's confidence counts.
        retrieval: how the passages are found.
        options: of the method, but for the models and the decoder.
        seed: of clusters and subsets.
        vectors: embed passages for clustering; by default with the knowledge base's encoder, else the default one.
        executor: runs the coroutines; by default the drafter's own, or a new one.
        clock: seconds, the executor's.

    Raises:
        InputError: options do not go together, or there is no verifier.
    """

    name = "speculative-rag"

    def __init__(
        self,
        drafter: TextGenerator | SharingModel | None,
        verifier: TextScorer | SharingModel | None,
        retrieval: Retrieval,
        options: SpeculativeRAG.Options,
        *,
        seed: int = 0,
        vectors: QuestionVectors | None = None,
        executor: Executor | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        own = options.settled()
        self.scoring = own.scoring()
        if verifier is None and self.scoring.verifies:
            remedy = "give a model, or a scoring of the drafter's confidence alone"
            raise InputError("verifier", None, remedy)
        self.drafter = None if drafter is None else as_generator(drafter)
        self.verifier = as_scorer(verifier) if verifier is not None and self.scoring.verifies else None
        self.retrieval = retrieval
        self.drafting = own.drafting()
        retriever = retrieval.retriever
        # The knowledge base's encoder is often loaded already.
        known = retriever.encoder if isinstance(retriever, HasEncoder) else None
        self.vectors = vectors or QuestionVectors(known)
        self._dealing = steps.Dealing(
            own.drafts,
            min(own.passages_per_draft, retrieval.k),
            own.strategy or "ranked",
            self.vectors,
            seed,
        )
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

    def answering(self, question: str | Task) -> Coroutine[SpeculativeAnswer]:
        """A coroutine for :attr:`executor` that answers a question.

        Emits sources, subsets, drafts as they grow and end, scores, the verdict; of choices no subsets.

        Args:
            question: in words, or a task of another kind.

        Raises:
            InputError: there is no question, which the call itself says, or the verifier cannot score.
            ContextLengthError: the question leaves no room for a passage.
            SpecragError: an endpoint does not answer.
        """
        return self._answering(question if isinstance(question, Task) else Task(question))

    # -- the steps ------------------------------------------------------------------------------------------

    def _answering(self, task: Task) -> Coroutine[SpeculativeAnswer]:
        started = self._clock()
        how, retriever = self.retrieval, self.retrieval.retriever
        if self.verifier is not None:
            yield Search(self.verifier.check_scoring, remote=True)
        searching = self._clock()
        found: steps.Found = yield Search(
            lambda: steps.find(task.text, how, self._clock), is_remote(retriever)
        )
        sources = tuple(
            Source(number, hit.passage, hit.score, similarity)
            for number, (hit, similarity) in enumerate(zip(found.hits, found.similarities, strict=True), 1)
        )
        nothing = not sources or (
            how.abstain
            and is_about_nothing(retriever, task.text, found.hits, found.similarities, how.min_score)
        )
        least = least_similarity(retriever, how.min_score)
        retrieval = self._clock() - searching
        yield Emit(Sources(task.text, sources, (), False, nothing, 0.0, retrieval, least))
        if nothing:
            yield Emit(Verdict(ABSTENTION, None, None))
            total = self._clock() - started
            return self._sum_up(task, sources, SpeculativeTiming(retrieval, 0.0, 0.0, 0.0, 0.0, total))
        read = [source.passage for source in sources]
        drafted: _Drafted = yield from self._drafting(task, read, found.duplicates)
        verifying = self._clock()
        scored = yield from steps.scoring_drafts(self.verifier, task, read, drafted.written, self.scoring)
        yield Emit(DraftsScored(scored.drafts))
        judged = steps.judge(scored.drafts)
        yield Emit(Verdict(judged.text, judged.best, judged.fallback))
        ended = self._clock()
        timing = SpeculativeTiming(
            retrieval,
            drafted.embedding,
            drafted.clustering,
            drafted.seconds,
            ended - verifying,
            ended - started,
        )
        return self._sum_up(task, sources, timing, scored, judged, drafted.sampling)

    def _drafting(self, task: Task, read: Sequence[Passage], duplicates: int) -> Coroutine[_Drafted]:
        """Drafts of the drafter; of choices that the verifier weighs, each as it is."""
        if task.choices and self.scoring.weighs_choices:
            choices = steps.each_choice(task, len(read))
            for one in choices:
                yield Emit(DraftDone(one.draft))
            return _Drafted(choices)
        if self.drafter is None:
            raise InputError(
                "drafter", None, "give a model that drafts; only choices can be weighed without one"
            )
        dealt: steps.Dealt = yield Search(
            lambda: steps.deal(task.text, read, self._dealing, duplicates, self._clock)
        )
        numbers = tuple(tuple(index + 1 for index in subset) for subset in dealt.subsets)
        yield Emit(SubsetsDrawn(numbers, dealt.sampling))
        started = self._clock()
        written = yield from drafting(self.drafter, task, read, dealt.subsets, self.drafting)
        seconds = self._clock() - started
        return _Drafted(written, dealt.sampling, dealt.embedding, dealt.clustering, seconds)

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
            drafter=None if self.drafter is None else self.drafter.name,
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
