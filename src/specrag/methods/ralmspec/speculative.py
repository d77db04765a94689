"""RaLMSpec: speculative retrieval for iterative RaLM, with the output of sequential retrieval (Zhang et al. 2024).

A cache of passages that this request has seen guesses what the knowledge base would return, the text continues after
the guesses, and one batched search verifies several of them at once; from the first wrong guess on, the text is taken
back. Three parts can be chosen separately: prefetching (P), the scheduler OS3 (S), asynchronous verification (A).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from specrag.engine.passes import Coroutine, Emit, Search
from specrag.errors import InputError
from specrag.methods.base import Decoder, SessionGenerator
from specrag.methods.ralmspec.iterative import (
    DEFAULT_CLOCK,
    IterativeMethod,
    IterativeRequest,
    Work,
)
from specrag.methods.ralmspec.prompts import RetrievalLimits, id_of
from specrag.methods.ralmspec.result import IterativeAnswer, Retraction
from specrag.methods.ralmspec.search import Found, Guess, PassageFinder, Searched
from specrag.methods.ralmspec.text import Chunk, Text
from specrag.methods.remote import TokenEndpoint
from specrag.methods.retriever import PassageRetriever, passages_of
from specrag.methods.speculative_search import COST_AWARE, MAX_MATCH, make_schedule, search_beside
from specrag.methods.speculative_search import Stride as CountedStride
from specrag.retrieval.index.base import Query
from specrag.retrieval.index.cache import CAPACITY
from specrag.speculation.schedule.guesses import (
    CostAwareGuesses,
    CountedGuesses,
    GuessSchedule,
    SharedGuesses,
)
from specrag.speculation.schedule.strides import ChunkTime, SharedStrides, StrideRound

if TYPE_CHECKING:
    from specrag.retrieval.knowledge_base import KnowledgeBase

__all__ = ["COST_AWARE", "MAX_MATCH", "OnFailure", "RaLMSpecPipeline", "Stride"]

#: Passages that a search brings into the cache with prefetching (section 5.1).
PREFETCH: Final = 20
#: The number of guesses in a round.
Stride: TypeAlias = CountedStride | Literal["cost-aware"]

#: What to do when the knowledge base fails during a request.
OnFailure: TypeAlias = Literal["error", "cache"]


class RaLMSpecPipeline(IterativeMethod):
    """Guesses retrievals from a cache and verifies several in one search.

    A round of stride s looks up s queries and decodes after the first s - 1 guesses; then one search verifies all s.
    After the right guesses, the text continues with the passage that the search has returned, so a stride of 1 is
    sequential retrieval. The tokens and the passages are those of
    :class:`~specrag.methods.ralmspec.sequential.SequentialPipeline` with the same settings, whatever is chosen here.

    Args:
        llm: the language model, such as :func:`specrag.load` makes, or one behind endpoints.
        retriever: such as a :class:`~specrag.retrieval.knowledge_base.SingleIndex`; for a knowledge base, its ``flat``
            index is searched.
        stride: queries of a round: a number, ``os3``, or a function that makes a schedule for a request;
            ``cost-aware`` decides guess by guess
            (:class:`~specrag.speculation.schedule.guesses.CostAwareGuesses`).
        prefetch: passages that a search brings into the cache for each query; 1 is the passage itself, ``None`` the
            paper's 20, or as many as there are.
        asynchronous: decode after the last guess while the search runs, stopping at the next token if a guess is wrong.
            A cost-aware schedule decides this by itself.
        max_match: OS3's cap on the match rate that it assumes; ``None`` uses a confidence bound instead of a cap.
        learned: what requests with a cost-aware schedule learn together; by default shared by those of this object.
        capacity: maximum number of passages in a request's cache, whose texts are kept too.
        on_failure: when a search after the first one fails: ``error`` ends the request with the error, ``cache``
            continues with unverified guesses (the newest passage if the store cannot rank the cache), and the result
            says so.
        early: show text at once and take it back by a :class:`~specrag.methods.ralmspec.result.Retraction`; otherwise
            text is shown when it is verified.
        interval, query_tokens, passage_tokens, prompt_tokens, reuse, decoder, system, clock: see
            :class:`~specrag.methods.ralmspec.sequential.SequentialPipeline`. A session is also kept while its passage
            may still turn out to be the right one.

    Raises:
        InputError: a value cannot be used, or the knowledge base is empty.
    """

    name = "ralmspec"

    def __init__(  # noqa: PLR0913 - settings, each with a name of its own; methods give them as options
        self,
        llm: SessionGenerator | TokenEndpoint,
        retriever: PassageRetriever | KnowledgeBase,
        *,
        stride: Stride = COST_AWARE,
        prefetch: int | None = None,
        asynchronous: bool = False,
        max_match: float | None = MAX_MATCH,
        learned: SharedGuesses | None = None,
        capacity: int = CAPACITY,
        on_failure: OnFailure = "error",
        early: bool = False,
        interval: int = 4,
        query_tokens: int = 32,
        passage_tokens: int = 256,
        prompt_tokens: int = 512,
        reuse: bool = True,
        decoder: str | Decoder = "plain",
        system: str | None = None,
        clock: Callable[[], float] = DEFAULT_CLOCK,
    ) -> None:
        retriever = passages_of(retriever)
        super().__init__(
            llm,
            retriever,
            limits=RetrievalLimits(interval, query_tokens, passage_tokens, prompt_tokens),
            prefetch=min(PREFETCH, max(len(retriever), 1)) if prefetch is None else prefetch,
            reuse=reuse,
            decoder=decoder,
            system=system,
            clock=clock,
        )
        if on_failure not in ("error", "cache"):
            raise InputError("on_failure", on_failure, "take error or cache")
        self.stride = stride
        self.asynchronous = asynchronous
        self.max_match = max_match
        self.capacity = capacity
        self.on_failure = on_failure
        self.early = early
        self._shared = SharedStrides()
        self._learned = learned or SharedGuesses()
        # Report errors in the schedule or the cache now, not in the middle of a request.
        self._schedule()
        PassageFinder(retriever, clock, self.prefetch, capacity)

    def _schedule(self) -> GuessSchedule:
        if self.stride == COST_AWARE:
            return CostAwareGuesses(self._learned)
        strides = make_schedule(
            self.stride, self.asynchronous, self.max_match, self._shared, names=(COST_AWARE, "os3")
        )
        return CountedGuesses(strides, self.asynchronous)

    # -- the protocol ---------------------------------------------------------------------------------------

    def _answering(self, request: IterativeRequest) -> Coroutine[IterativeAnswer]:
        work = self._start(request)
        finder = PassageFinder(self.retriever, self._clock, self.prefetch, self.capacity)
        schedule = self._schedule()
        try:
            yield from self._first(work, finder)
            while work.record.text.finish_reason is None:
                if work.record.failure is None:
                    yield from self._round(work, finder, schedule)
                else:
                    yield from self._unverified(work, finder)
        finally:
            work.writer.close()
        return work.record.answer()

    def _first(self, work: Work, finder: PassageFinder) -> Coroutine[None]:
        """The first retrieval, which fills the cache: before it there is nothing to guess from."""
        query = work.prompts.query(())
        searched: Searched = yield Search(lambda: finder.find(query), finder.remote)
        work.timeline.add(searched.times, 0)
        if searched.failure is not None:
            raise searched.failure
        yield from self._write(work, query, searched.found[0])

    def _round(self, work: Work, finder: PassageFinder, schedule: GuessSchedule) -> Coroutine[None]:
        """Guess, verify, keep what was right, and decode after the first passage that is known to be right."""
        drafts = _Drafts(work.record.text)
        yield from self._speculate(work, finder, drafts, schedule)
        searched = yield from self._verify(work, finder, drafts, schedule)
        if searched.failure is not None:
            if self.on_failure == "error":
                raise searched.failure
            work.record.failure = str(searched.failure)
        found = drafts.guessed if searched.failure is not None else searched.found
        kept = min(drafts.matched(found), len(drafts.chunks))
        yield from self._take_back(work, drafts.chunks[kept:])
        for guess, chunk, truth in zip(drafts.guesses, drafts.chunks[:kept], found, strict=False):
            work.record.accept(chunk, guess.text, truth)
            if not self.early:
                yield Emit(work.record.step(chunk))
        if kept < len(drafts.guesses):
            fresh = not work.writer.holds(found[kept].passage)
            right = yield from self._write(work, drafts.guesses[kept].text, found[kept])
            drafts.note_right(fresh, work.timeline.seconds(right.spans), drafts.guesses[kept])
        else:
            work.writer.keep([found[-1].passage])
        if searched.failure is None:
            round = drafts.round(found, searched.seconds)
            schedule.observe(round)
            work.record.observe(round)

    def _speculate(
        self, work: Work, finder: PassageFinder, drafts: _Drafts, schedule: GuessSchedule
    ) -> Coroutine[None]:
        """Look up queries and decode after all guesses but the last, as many as the schedule wants.

        Ends sooner if the text ends, the cache has no guess, or the store does not answer.
        """
        while True:
            guess = yield from _look_up(work, finder, drafts.text)
            drafts.guesses.append(guess)
            drafts.fresh.append(not work.writer.holds(guess.passage))
            if guess.failure is not None or guess.passage is None or not schedule.goes_on(drafts.fresh):
                return
            yield from self._draft(work, drafts, guess)
            drafts.note_alone(guess)
            if drafts.text.finish_reason is not None:
                return

    def _draft(self, work: Work, drafts: _Drafts, guess: Guess) -> Coroutine[None]:
        chunk = yield from work.writer.write(drafts.text, guess.passage)
        drafts.add(chunk, work.timeline.seconds(chunk.spans))
        if self.early:
            yield Emit(work.record.step(chunk))

    def _verify(
        self, work: Work, finder: PassageFinder, drafts: _Drafts, schedule: GuessSchedule
    ) -> Coroutine[Searched]:
        """One search for all queries of the round; the last chunk is written meanwhile, if the schedule wants it."""
        last = drafts.guesses[-1]
        if last.failure is not None:  # a store that cannot rank the cache is not asked to search
            return Searched((), (), last.failure)
        queries = [guess.query for guess in drafts.guesses]
        place = len(drafts.text.tokens)
        ended = drafts.text.finish_reason is not None
        if ended or last.passage is None or not schedule.beside(drafts.fresh):
            searched: Searched = yield Search(lambda: finder.search(queries), finder.remote)
            work.timeline.add(searched.times, place)
            return searched

        def wanted(searched: Searched) -> bool:
            if searched.failure is not None and self.on_failure == "error":
                raise searched.failure
            return searched.failure is not None or drafts.matched(searched.found) == len(queries)

        began = work.timeline.clock()
        beside = yield from search_beside(
            _searching(finder, queries), self._draft(work, drafts, last), wanted
        )
        drafts.beside_seconds = work.timeline.clock() - began
        work.timeline.add(beside.found.times, place)
        if not beside.finished:
            work.record.abort()
        return beside.found

    def _take_back(self, work: Work, wrong: Sequence[Chunk]) -> Coroutine[None]:
        for chunk in wrong:
            work.record.discard(chunk)
        if self.early and wrong:
            text = "".join(chunk.shown for chunk in wrong)
            yield Emit(Retraction(text, sum(len(chunk.tokens) for chunk in wrong)))

    def _unverified(self, work: Work, finder: PassageFinder) -> Coroutine[None]:
        """One chunk after a guess that will not be verified."""
        guess = yield from _look_up(work, finder, work.record.text)
        yield from self._write(work, guess.text, Found(guess.passage))

    def _write(self, work: Work, query: str, found: Found) -> Coroutine[Chunk]:
        """Decode after a passage that will not be taken back."""
        chunk = yield from work.writer.write(work.record.text, found.passage)
        work.writer.keep([found.passage])
        work.record.accept(chunk, query, found)
        yield Emit(work.record.step(chunk))
        return chunk


@dataclass(slots=True)
class _Drafts:
    """A round's guesses and what was written after them.

    Attributes:
        text: the output with all of the chunks.
        guesses: one per query.
        fresh: whether the prompt of each guess had to be read, or would have to be.
        chunks: those written after the first guesses.
        seconds: of writing each chunk.
        alone: timings of the chunks that ran with nothing beside them, including their look-ups.
        beside_seconds: of the search and the decoding beside it, if there was any.
    """

    text: Text
    guesses: list[Guess] = field(default_factory=list)
    fresh: list[bool] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    alone: list[ChunkTime] = field(default_factory=list)
    beside_seconds: float | None = None

    def add(self, chunk: Chunk, seconds: float) -> None:
        """Add a chunk that has been written to its end."""
        self.text = chunk.text
        self.chunks.append(chunk)
        self.seconds.append(seconds)

    def note_alone(self, guess: Guess) -> None:
        """Record that nothing ran beside the newest chunk."""
        self.alone.append(ChunkTime(self.fresh[-1], guess.seconds + self.seconds[-1]))

    def note_right(self, fresh: bool, seconds: float, guess: Guess) -> None:
        """Record a chunk after a passage known to be right; its time is used if no guess was timed."""
        self.alone.append(ChunkTime(fresh, guess.seconds + seconds))
        if not self.seconds:
            self.seconds.append(seconds)

    def round(self, found: Sequence[Found], search_seconds: float) -> StrideRound:
        """What the round gained and cost."""
        return StrideRound(
            len(self.guesses),
            self.matched(found),
            self.step_seconds,
            search_seconds,
            tuple(self.fresh),
            tuple(self.alone),
            self.beside_seconds,
        )

    @property
    def guessed(self) -> tuple[Found, ...]:
        """The guesses, treated as the truth."""
        return tuple(Found(guess.passage) for guess in self.guesses)

    def matched(self, found: Sequence[Found]) -> int:
        """How many guesses are right before the first wrong one."""
        pairs = zip(self.guesses, found, strict=True)
        wrong = (n for n, (guess, truth) in enumerate(pairs) if id_of(guess.passage) != id_of(truth.passage))
        return next(wrong, len(self.guesses))

    @property
    def step_seconds(self) -> float:
        """Seconds of one speculation step: encoding, look-up and writing, each as the mean of the round."""
        looking = sum(guess.seconds for guess in self.guesses) / len(self.guesses)
        return looking + (sum(self.seconds) / len(self.seconds) if self.seconds else 0.0)


def _look_up(work: Work, finder: PassageFinder, text: Text) -> Coroutine[Guess]:
    query = work.prompts.query(text.tokens)
    guess: Guess = yield Search(lambda: finder.guess(query))
    work.timeline.add(guess.times, len(text.tokens))
    return guess


def _searching(finder: PassageFinder, queries: Sequence[Query]) -> Coroutine[Searched]:
    searched: Searched = yield Search(lambda: finder.search(queries), finder.remote)
    return searched
