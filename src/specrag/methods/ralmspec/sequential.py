"""Iterative RaLM, one retrieval after the other (Ram et al. 2023): the reference for RaLMSpec's output and speed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from specrag.engine import Coroutine, Emit, Search
from specrag.methods.base import Decoder, SessionGenerator
from specrag.methods.ralmspec.iterative import DEFAULT_CLOCK, IterativeMethod, IterativeRequest
from specrag.methods.ralmspec.result import IterativeAnswer
from specrag.methods.ralmspec.search import PassageFinder, Searched
from specrag.methods.remote import TokenEndpoint
from specrag.methods.retriever import PassageRetriever

if TYPE_CHECKING:
    from specrag.methods.ralmspec import Sequential
    from specrag.retrieval import KnowledgeBase


class SequentialPipeline(IterativeMethod):
    """Retrieves every few tokens and waits for the result.

    Before every ``interval`` new tokens, the last ``query_tokens`` of question and output are searched for; the best
    passage is put in front of the question and replaces the previous one. With ``reuse`` a prompt is read once while
    its passage stays or comes back; otherwise it is encoded again at every retrieval, as in the paper.

    Args:
        llm, retriever, options, decoder, system, clock: see
            :class:`~specrag.methods.ralmspec.iterative.IterativeMethod`.
    """

    name = "sequential"

    def __init__(
        self,
        llm: SessionGenerator | TokenEndpoint,
        retriever: PassageRetriever | KnowledgeBase,
        options: Sequential.Options,
        decoder: Decoder,
        *,
        system: str | None = None,
        clock: Callable[[], float] = DEFAULT_CLOCK,
    ) -> None:
        super().__init__(
            llm,
            retriever,
            options,
            decoder,
            prefetch=1,
            reuse=options.reuse,
            system=system,
            clock=clock,
        )

    def _answering(self, request: IterativeRequest) -> Coroutine[IterativeAnswer]:
        work = self._start(request)
        finder = PassageFinder(self.retriever, self._clock)
        record = work.record
        try:
            while record.text.finish_reason is None:
                place = len(record.text.tokens)
                query = work.prompts.query(record.text.tokens)
                searched = yield from _find(finder, query)
                work.timeline.add(searched.times, place)
                if searched.failure is not None:
                    raise searched.failure
                found = searched.found[0]
                work.writer.keep([found.passage])
                chunk = yield from work.writer.write(record.text, found.passage)
                record.accept(chunk, query, found)
                yield Emit(record.step(chunk))
        finally:
            work.writer.close()
        return record.answer()


def _find(finder: PassageFinder, query: str) -> Coroutine[Searched]:
    searched: Searched = yield Search(lambda: finder.find(query), finder.remote)
    return searched
