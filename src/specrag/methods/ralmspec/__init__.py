"""Iterative RaLM, a retrieval every few tokens (Ram et al. 2023); RaLMSpec, which speculates on them (Zhang et al.)."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import Field

from specrag.errors import InputError
from specrag.methods.base import GUESSES, Method, MethodOptions, Needs, Plan
from specrag.methods.decoding import make_decoder
from specrag.methods.passages import passage_retriever
from specrag.methods.remote import RemoteModel

if TYPE_CHECKING:
    from specrag.engine import Coroutine
    from specrag.methods.base import Decoder, SessionGenerator
    from specrag.methods.ralmspec.iterative import IterativeMethod
    from specrag.methods.remote import TokenEndpoint
    from specrag.methods.resources import Resources
    from specrag.methods.retriever import PassageRetriever
    from specrag.request import Options as GenerationOptions
    from specrag.request import Request, Result

    Model: TypeAlias = SessionGenerator | TokenEndpoint

#: Sessions that a round's guesses may keep with a schedule that chooses their number.
_MOST_SESSIONS = {"os3": 8, "cost-aware": 5}

#: Options of a local model's decoding and memory.
_LOCAL = {"decoder", "reuse"}


class Iterative(Method):
    """A method that retrieves every few tokens."""

    needs = Needs.GENERATOR | Needs.RETRIEVER
    reads_history = False

    class Options(MethodOptions):
        """How often to retrieve and how much to read; the defaults are the paper's."""

        interval: Annotated[int, Field(ge=1, le=128)] = Field(
            4, description="New tokens between two retrievals."
        )
        query_tokens: Annotated[int, Field(ge=1, le=512)] = Field(32, description="Most tokens of a query.")
        passage_tokens: Annotated[int, Field(ge=16, le=2048)] = Field(
            256, description="Most tokens of a passage; the rest is cut."
        )
        prompt_tokens: Annotated[int, Field(ge=32, le=8192)] = Field(
            512, description="Most tokens of passage and question together."
        )
        decoder: str = Field(
            "plain",
            max_length=64,
            description="How tokens between two retrievals are decoded: a method's name.",
            json_schema_extra={"resource": "decoders"},
        )

    options: Options

    def plan(self, request: Request, given: Resources) -> Plan:
        """See :class:`~specrag.methods.base.Method`."""
        from specrag.methods.ralmspec.iterative import DEFAULT_MAX_TOKENS

        retriever = passage_retriever(request, given, self.name)
        decoder = make_decoder(self.options.decoder, given)
        pipeline = self._pipeline(self._model(given), retriever, decoder, request, given)
        options: GenerationOptions = {"max_tokens": DEFAULT_MAX_TOKENS, **request.options}
        options.pop("method", None)
        pipeline.check(request.question, **options)
        each = self.options.prompt_tokens + options["max_tokens"] + GUESSES

        def begin() -> Coroutine[Result]:
            answer = yield from pipeline.answering(request.question, **options)
            return answer.result()

        return Plan(begin, self._sessions() * each)

    def _model(self, given: Resources) -> Model:
        """The model that writes: the local one, or one behind endpoints, which makes its own decisions.

        Raises:
            InputError: an option is for a local model, or the endpoints' tokenizer is not known.
        """
        generator = given.generator
        if not isinstance(generator, RemoteModel):
            return given.llm
        for name, value in self.options.model_dump(include=_LOCAL, exclude_defaults=True).items():
            raise InputError(name, value, "leave it out; an endpoint decides it for itself")
        return generator.by_tokens(self.name)

    @abstractmethod
    def _pipeline(
        self, llm: Model, retriever: PassageRetriever, decoder: Decoder, request: Request, given: Resources
    ) -> IterativeMethod:
        """What answers."""

    @abstractmethod
    def _sessions(self) -> int:
        """How many sessions a request may keep at a time."""


class Sequential(Iterative):
    """Iterative RaLM, one retrieval after the other: RaLMSpec must equal it, and is measured against it.

    Args:
        options: :class:`Sequential.Options`.
    """

    name = "sequential"
    summary = "Iterative RaLM: a passage every few tokens, each waited for"

    class Options(Iterative.Options):
        """Options of sequential retrieval."""

        reuse: bool = Field(
            True,
            description="Keep keys and values of the newest passages; false reads every prompt anew (as published).",
        )

    options: Options

    def _pipeline(
        self, llm: Model, retriever: PassageRetriever, decoder: Decoder, request: Request, given: Resources
    ) -> IterativeMethod:
        from specrag.methods.ralmspec.sequential import SequentialPipeline

        return SequentialPipeline(
            llm, retriever, self.options, decoder, system=request.system, clock=given.clock
        )

    def _sessions(self) -> int:
        from specrag.methods.ralmspec.text import KEPT

        return KEPT + 1


class RaLMSpec(Iterative):
    """RaLMSpec: guesses retrievals from a cache and verifies several in one search.

    Args:
        options: :class:`RaLMSpec.Options`; the defaults are the paper's RaLMSpec+PSA.
    """

    name = "ralmspec"
    summary = "RaLMSpec: guesses the passage of every few tokens from a cache, verifies several in one search"

    class Options(Iterative.Options):
        """Options of RaLMSpec."""

        stride: Annotated[int, Field(ge=1, le=16)] | Literal["os3", "cost-aware"] = Field(
            "os3",
            title="s",
            description="Retrievals guessed before a search verifies them: a number (the paper's fixed stride is 3), "
            "os3, or cost-aware, which weighs guess by guess.",
        )
        prefetch: Annotated[int, Field(ge=1, le=256)] = Field(
            20, title="P", description="Passages that a search brings into the cache."
        )
        asynchronous: bool = Field(
            True,
            title="A",
            description="Decode on while guesses are verified; cost-aware decides that by itself.",
        )
        max_match: Annotated[float, Field(gt=0, le=1)] | None = Field(
            0.6,
            title="gamma_max",
            description="Cap of the match rate that os3 reckons with; none: a confidence bound.",
        )
        on_failure: Literal["error", "cache"] = Field(
            "error",
            description="When the knowledge base fails in mid-answer: end, or go on with what is cached.",
        )
        early: bool = Field(
            False, description="Show text before it is verified and take it back if it was wrong."
        )

    options: Options

    @property
    def retracts(self) -> bool:
        """See :class:`~specrag.methods.base.Method`."""
        return self.options.early

    def _pipeline(
        self, llm: Model, retriever: PassageRetriever, decoder: Decoder, request: Request, given: Resources
    ) -> IterativeMethod:
        from specrag.methods.ralmspec.speculative import RaLMSpecPipeline
        from specrag.speculation.schedule import SharedGuesses

        return RaLMSpecPipeline(
            llm,
            retriever,
            self.options,
            decoder,
            learned=given.learned(SharedGuesses, getattr(retriever, "name", None)),
            system=request.system,
            clock=given.clock,
        )

    def _sessions(self) -> int:
        from specrag.methods.ralmspec.text import KEPT

        stride = self.options.stride
        # A session is kept for every passage that may still turn out to be the right one.
        return KEPT + (stride if isinstance(stride, int) else _MOST_SESSIONS[stride])
