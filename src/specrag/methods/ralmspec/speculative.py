"""RaLMSpec: speculative retrieval for iterative RaLM, with the output of sequential retrieval (Zhang et al. 2024).

A cache of passages that this request has seen guesses what the knowledge base would return, the text continues after
the guesses, and one batched search verifies several of them at once; from the first wrong guess on, the text is taken
back. Three parts can be chosen separately: prefetching (P), the scheduler OS3 (S), asynchronous verification (A).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specrag.engine import Coroutine, Emit, Search
from specrag.methods.base import Decoder, SessionGenerator
from specrag.methods.ralmspec.iterative import (
    DEFAULT_CLOCK,
    IterativeMethod,
    IterativeRequest,
    Work,
)
from specrag.methods.ralmspec.prompts import id_of
from specrag.methods.ralmspec.result import IterativeAnswer, Retraction
from specrag.methods.ralmspec.search import Found, Guess, PassageFinder, Searched
from specrag.methods.ralmspec.text import Chunk, Text
from specrag.methods.remote import TokenEndpoint
from specrag.methods.retriever import PassageRetriever
from specrag.methods.speculative_search import COST_AWARE, make_schedule, search_beside
from specrag.retrieval.index import CAPACITY, Query
from specrag.speculation.schedule import (
    ChunkTime,
    CostAwareGuesses,
    CountedGuesses,
    GuessSchedule,
    SharedGuesses,
    SharedStrides,
    StrideRound,
)

if TYPE_CHECKING:
    from specrag.methods.ralmspec import RaLMSpec
    from specrag.retrieval import KnowledgeBase


class RaLMSpecPipeline(IterativeMethod):
    """Guesses retrievals from a cache and verifies several in one search.

    A round of stride s looks up s queries and decodes after the first s - 1 guesses; then one search verifies all s.
    After the right guesses, the text continues with the passage that the search has returned, so a stride of 1 is
    sequential retrieval. The tokens and the passages are those of
    :class:`~specrag.methods.ralmspec.sequential.SequentialPipeline` with the same settings, whatever is chosen here.

    With a ``stride`` of ``cost-aware`` every guess is weighed alone, also whether to decode beside a search
    (:class:`~specrag.speculation.schedule.guesses.CostAwareGuesses`). With ``asynchronous`` the text goes on after the
    last guess while the search runs, and stops at the next token if a guess is wrong. With ``early`` text is shown at
    once and taken back by a :class:`~specrag.methods.ralmspec.result.Retraction`. If a search after the first one
    fails, ``on_failure=cache`` continues with unverified guesses (the newest passage if the store cannot rank the
    cache), and the result says so.

    Args:
        llm, retriever, options, decoder, system, clock: see
            :class:`~specrag.methods.ralmspec.iterative.IterativeMethod`.
        learned: what requests with a cost-aware schedule learn together; by default shared by those of this object.
        reuse: keep the keys and values of the newest passages, and of those that may still turn out to be the right
            ones; otherwise every prompt is read anew, as in the paper.

    Attributes:
        capacity: maximum number of passages in a request's cache, whose texts are kept too.
    """

    name = "ralmspec"
    options: RaLMSpec.Options
    capacity = CAPACITY

    def __init__(
        self,
        llm: SessionGenerator | TokenEndpoint,
        retriever: PassageRetriever | KnowledgeBase,
        options: RaLMSpec.Options,
        decoder: Decoder,
        *,
        learned: SharedGuesses | None = None,
        reuse: bool = True,
        system: str | None = None,
        clock: Callable[[], float] = DEFAULT_CLOCK,
    ) -> None:
        super().__init__(
            llm,
            retriever,
            options,
            decoder,
            prefetch=options.prefetch,
            reuse=reuse,
            system=system,
            clock=clock,
        )
        self._shared = SharedStrides()
        self._learned = learned or SharedGuesses()
        self._schedule()  # OS3 refuses a cap of 1: say so now, not in the middle of a request

    def _schedule(self) -> GuessSchedule:
        stride, asynchronous = self.options.stride, self.options.asynchronous
        if stride == COST_AWARE:
            return CostAwareGuesses(self._learned)
        strides = make_schedule(stride, asynchronous, self.options.max_match, self._shared)
        return CountedGuesses(strides, asynchronous)

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
            if self.options.on_failure == "error":
                raise searched.failure
            work.record.failure = str(searched.failure)
        found = drafts.guessed if searched.failure is not None else searched.found
        kept = min(drafts.matched(found), len(drafts.chunks))
        yield from self._take_back(work, drafts.chunks[kept:])
        for guess, chunk, truth in zip(drafts.guesses, drafts.chunks[:kept], found, strict=False):
            work.record.accept(chunk, guess.text, truth)
            if not self.options.early:
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
        if self.options.early:
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
            if searched.failure is not None and self.options.on_failure == "error":
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
        if self.options.early and wrong:
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
