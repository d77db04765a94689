"""Iterative RaLM, one retrieval after the other (Ram et al. 2023): the reference for RaLMSpec's output and speed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from specrag.engine.passes import Coroutine, Emit, Search
from specrag.methods.base import Decoder, SessionGenerator
from specrag.methods.ralmspec.iterative import DEFAULT_CLOCK, IterativeMethod, IterativeRequest
from specrag.methods.ralmspec.prompts import RetrievalLimits
from specrag.methods.ralmspec.result import IterativeAnswer
from specrag.methods.ralmspec.search import PassageFinder, Searched
from specrag.methods.remote import TokenEndpoint
from specrag.methods.retriever import PassageRetriever

if TYPE_CHECKING:
    from specrag.retrieval.knowledge_base import KnowledgeBase


class SequentialPipeline(IterativeMethod):
    """Retrieves every few tokens and waits for the result.

    Before every ``interval`` new tokens, the last ``query_tokens`` of question and output are searched for; the best
    passage is put in front of the question and replaces the previous one.

    Args:
        llm: the language model, such as :func:`specrag.load` makes, or one behind endpoints.
        retriever: such as a :class:`~specrag.retrieval.knowledge_base.SingleIndex`; for a knowledge base, its ``flat``
            index is searched.
        interval: new tokens between two retrievals.
        query_tokens: maximum tokens of a query.
        passage_tokens: maximum tokens of a passage; the rest is cut.
        prompt_tokens: maximum tokens of passage and question together.
        reuse: keep the keys and values of the newest passages, so that a prompt is read once while its passage stays
            or comes back; otherwise the prompt is encoded again at every retrieval, as in the paper.
        decoder: how the tokens between two retrievals are decoded.
        system: a system message in front of the question.
        clock: seconds, the executor's.

    Raises:
        InputError: a value cannot be used, or the knowledge base is empty.
    """

    name = "sequential"

    def __init__(  # noqa: PLR0913 - settings, each with a name of its own; methods give them as options
        self,
        llm: SessionGenerator | TokenEndpoint,
        retriever: PassageRetriever | KnowledgeBase,
        *,
        interval: int = 4,
        query_tokens: int = 32,
        passage_tokens: int = 256,
        prompt_tokens: int = 512,
        reuse: bool = True,
        decoder: str | Decoder = "plain",
        system: str | None = None,
        clock: Callable[[], float] = DEFAULT_CLOCK,
    ) -> None:
        super().__init__(
            llm,
            retriever,
            limits=RetrievalLimits(interval, query_tokens, passage_tokens, prompt_tokens),
            prefetch=1,
            reuse=reuse,
            decoder=decoder,
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
