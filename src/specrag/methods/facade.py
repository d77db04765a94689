"""The Python calls ``generate``, ``stream``, ``agenerate``, ``astream`` and ``batch``, for every method."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from specrag.engine import Coroutine, Emit, gather
from specrag.errors import InputError
from specrag.methods.partial import mark_missing_shards
from specrag.methods.registry import (
    DEFAULT_METHOD,
    DEFAULT_OVER_CONTEXT,
    DEFAULT_OVER_PASSAGES,
    make_method,
)
from specrag.methods.resources import Resources
from specrag.request import (
    Event,
    Options,
    Prompt,
    Request,
    Result,
    SearchOptions,
    check_options,
    check_search,
)

if TYPE_CHECKING:
    from specrag.methods.base import Method
    from specrag.methods.retriever import PassageRetriever, Retriever
    from specrag.retrieval import Passage
    from specrag.retrieval.documents import ContextItem
    from specrag.speculation import Step

T = TypeVar("T")

_SEARCH = tuple(SearchOptions.model_fields)


class Call(Options, total=False):
    """Keyword arguments of every call.

    Args:
        method: a name listed by ``specrag methods``, or a method with its options, such as ``RaLMSpec(stride=3)``;
            default ``adaptive``, which decodes ``standard-rag`` over a knowledge base and ``long-context`` from
            documents.
        kb: where passages are found: a knowledge base, a table, or the folder of one.
        documents: a long context: texts, paths, or documents that have been read.
        passages: passages to answer from instead of searching, best first.
        k, index, where, rerank, min_score, abstain, rewrite: how passages are found
            (:class:`~specrag.request.SearchOptions`).
    """

    kb: Retriever | PassageRetriever | str | Path
    documents: ContextItem | Sequence[ContextItem]
    passages: Sequence[Passage]
    k: int
    index: str
    where: Sequence[str]
    rerank: str
    min_score: float
    abstain: bool
    rewrite: bool


@dataclass(frozen=True, slots=True)
class Asked:
    """A checked call.

    Attributes:
        begin: makes its coroutine.
        given: the resources it is answered with.
        timeout: seconds.
    """

    begin: Callable[[], Coroutine[Result]]
    given: Resources
    timeout: float | None

    @property
    def deadline(self) -> float | None:
        """A time on the executor's clock."""
        return None if self.timeout is None else self.given.clock() + self.timeout


class Facade:
    """Answers by any method. Calls from several threads, and asynchronous calls, share passes.

    Attributes:
        resources: what is available for answering.
    """

    resources: Resources

    def generate(self, prompt: Prompt, **call: Unpack[Call]) -> Result:
        """Generate a text; the arguments are :class:`Call`.

        Args:
            prompt: a text or question, a conversation, or token ids.

        Raises:
            InputError: a value cannot be used.
            ContextLengthError: the prompt does not fit the model's context.
            DeadlineExceeded: the timeout passed.
        """
        asked = self._ask(prompt, call)
        executor = asked.given.executor
        return executor.run(executor.submit(asked.begin(), deadline=asked.deadline))

    def batch(self, prompts: Sequence[Prompt], **call: Unpack[Call]) -> list[Result]:
        """Generate a text for each prompt, in the same passes. Every prompt is checked before any work."""
        asked = [self._ask(prompt, call) for prompt in prompts]
        if not asked:
            return []
        executor = asked[0].given.executor
        together = gather([one.begin() for one in asked])
        return executor.run(executor.submit(together, deadline=asked[0].deadline))

    def stream(self, prompt: Prompt, **call: Unpack[Call]) -> Generator[Step | Event, None, Result]:
        """Generate a text, yielding a :class:`~specrag.speculation.decode.Step` per round, and events, as they come.

        A step's text never ends inside a character. Leaving the loop early ends the request. The generator returns
        the result to a caller that uses ``yield from``.
        """
        return _stream(self._ask(prompt, call))

    async def agenerate(self, prompt: Prompt, **call: Unpack[Call]) -> Result:
        """:meth:`generate` without blocking the event loop."""
        asked = self._ask(prompt, call)
        result: object = None
        emissions = asked.given.executor.astream(_telling(asked.begin()), deadline=asked.deadline)
        async with aclosing(emissions):
            async for result in emissions:  # noqa: B007 - the last one is the result
                pass
        assert isinstance(result, Result)
        return result

    async def astream(self, prompt: Prompt, **call: Unpack[Call]) -> AsyncIterator[Step | Event | Result]:
        """:meth:`stream` without blocking the event loop; the result is the last event."""
        asked = self._ask(prompt, call)
        emissions = asked.given.executor.astream(_telling(asked.begin()), deadline=asked.deadline)
        async with aclosing(emissions):
            async for event in emissions:
                yield event

    def _ask(self, prompt: Prompt, call: Call) -> Asked:
        """Check a call and plan it."""
        options = {name: value for name, value in call.items() if name in Options.__annotations__}
        method = options.pop("method", None)
        unknown = set(call) - set(Call.__annotations__)
        if unknown:
            check_options({name: call[name] for name in unknown})  # type: ignore[literal-required, arg-type]
        search = check_search({name: call[name] for name in _SEARCH if name in call})  # type: ignore[literal-required]
        checked = check_options(options)  # type: ignore[arg-type]
        given = self.resources.over(open_retriever(call.get("kb")))
        request = Request(
            prompt,
            options,  # type: ignore[arg-type]
            search,
            _documents(call.get("documents", ())),
            call.get("passages"),
        )
        chosen = choose_method(method, request, given)
        plan = chosen.plan(request, given)
        return Asked(lambda: mark_missing_shards(chosen.run(plan), given.retriever), given, checked.timeout)


def choose_method(method: Any, request: Request, given: Resources) -> Method:
    """The method of a request: a named one, a configured one, the caller's own decoder, or the default.

    Raises:
        InputError: it is none of these.
    """
    from specrag.methods.base import Method  # a facade itself

    if isinstance(method, Method):
        return method
    if method is None:
        if given.retriever is not None or request.passages is not None:
            return make_method(DEFAULT_OVER_PASSAGES)
        return make_method(DEFAULT_OVER_CONTEXT if request.documents else DEFAULT_METHOD)
    if isinstance(method, str):
        return make_method(method)
    if callable(getattr(method, "decode", None)):
        from specrag.methods.decoding import OwnDecoder

        return OwnDecoder(method)
    raise InputError("method", method, "give a method's name or a configured method")


def _stream(asked: Asked) -> Generator[Step | Event, None, Result]:
    executor = asked.given.executor
    return (yield from executor.stream(executor.submit(asked.begin(), deadline=asked.deadline)))


def _telling(coroutine: Coroutine[T]) -> Coroutine[None]:
    """Run a coroutine to its end and emit its result."""
    result = yield from coroutine
    yield Emit(result)


def open_retriever(kb: Any) -> Any:
    """Open the folder or store address to be searched; anything else is returned unchanged."""
    if not isinstance(kb, str | Path):
        return kb
    from specrag.retrieval import KnowledgeBase
    from specrag.retrieval.stores import QuestionSearch, is_address, open_store

    return QuestionSearch(open_store(str(kb))) if is_address(str(kb)) else KnowledgeBase.open(Path(kb))


def _documents(given: Any) -> Sequence[Any]:
    single = isinstance(given, str | Path) or not isinstance(given, Iterable)
    return (given,) if single else tuple(given)
