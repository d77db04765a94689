"""Questions about long contexts, read whole, in part, or by RAPID, whose drafter reads the part (Chen et al. 2025)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from specrag.errors import InputError
from specrag.methods.base import GUESSES, Decoder, Method, MethodOptions, Needs, Plan
from specrag.methods.decoding import make_decoder
from specrag.methods.passages import PASSAGE_TOKENS, refuse_form, said_tokens
from specrag.request import DEFAULT_MAX_TOKENS, Request

if TYPE_CHECKING:
    from specrag.engine import Coroutine
    from specrag.methods.rapid.context.retriever import ContextSettings
    from specrag.methods.rapid.readers import ContextMethod, ReadsPart
    from specrag.methods.resources import Resources
    from specrag.request import Options as GenerationOptions
    from specrag.request import Result


class ContextOptions(MethodOptions):
    """How the relevant part of a long context is found, and what happens to a context that is too long."""

    retrieval_tokens: Annotated[int, Field(ge=1, le=1_000_000)] | None = Field(
        None,
        description="Most tokens of the relevant part; none: 4,096, or a 24th of the context if that is more.",
    )
    scoring: Literal["dense", "bm25", "hybrid"] = Field("dense", description="How chunks are ranked.")
    chunk_tokens: Annotated[int, Field(ge=16, le=8192)] = Field(512, description="Most tokens of a chunk.")
    threshold: Annotated[float, Field(ge=-1, le=1)] = Field(
        0.3, description="Chunks with a smaller cosine are left out."
    )
    pooling: Literal["max", "mean"] = Field(
        "max", description="The score of a chunk that the encoder reads in several windows."
    )
    truncate_middle: bool = Field(
        False, description="Leave out the middle of what is too long for the model."
    )
    keep_prefix: Annotated[str, Field(max_length=4096)] | None = Field(
        None,
        description="A folder to keep what the model has read in, so that the next question need not read it again.",
        json_schema_extra={"resource": "folders"},
    )

    def settings(self) -> ContextSettings:
        """The settings for the retriever of parts."""
        from specrag.methods.rapid.context.retriever import ContextSettings

        found = ContextSettings(self.chunk_tokens, self.threshold, scoring=self.scoring, pooling=self.pooling)
        most = self.retrieval_tokens
        return found if most is None else replace(found, min_tokens=most, max_tokens=most)


class _Contextual(Method):
    """A method that answers from a long text in the request itself."""

    needs = Needs.SESSIONS | Needs.CONTEXT
    Options = ContextOptions
    options: Any

    def plan(self, request: Request, given: Resources) -> Plan:
        """See :class:`~specrag.methods.base.Method`."""
        from specrag.methods.rapid.long_context import LongContextPipeline

        if given.retriever is not None or request.passages is not None:
            remedy = f"leave it out; {self.name} reads a long text that the request itself holds"
            raise InputError("kb", "a knowledge base", remedy)
        refuse_form(request, "a long text is answered freely")
        self._check(request)
        asked = _with_documents(request)
        options: GenerationOptions = {"max_tokens": DEFAULT_MAX_TOKENS, **asked.options}
        options.pop("method", None)
        own = self.options
        folder = given.folder(own.keep_prefix, "keep_prefix")
        pipeline = LongContextPipeline(
            given.llm,
            given.context_retriever(own.settings(), folder),
            own,
            self._method(given),
            prefixes=given.kept_prefixes(folder),
            system=asked.system,
            clock=given.clock,
        )
        history = asked.history
        pipeline.answering(asked.question, asked.documents, history=history, **options).close()
        tokens = min(said_tokens(request, given) + PASSAGE_TOKENS, given.llm.context_length)

        def begin() -> Coroutine[Result]:
            answer = yield from pipeline.answering(
                asked.question, asked.documents, history=history, **options
            )
            return answer.result()

        return Plan(begin, 2 * (tokens + options["max_tokens"] + GUESSES))

    def _check(self, request: Request) -> None:
        """Refuse what does not fit this method in particular."""

    def _method(self, given: Resources) -> ContextMethod | Decoder | ReadsPart:
        """The object that decodes, or drafts from the part."""
        raise NotImplementedError


class LongContext(_Contextual):
    """The model reads the whole context, or only the relevant part of it.

    Args:
        options: :class:`LongContext.Options`.
        decoding: a decoder that replaces the one named by the options.
    """

    name = "long-context"
    summary = "The model reads a whole long text, or the relevant part of it"

    class Options(ContextOptions):
        """What is read, and how tokens are decoded."""

        read: Literal["whole", "part"] = Field(
            "whole",
            description="What the model reads: everything, or the relevant part (RAG within the text).",
        )
        decoder: str | None = Field(
            None,
            max_length=64,
            description="How tokens are decoded: a method's name; adaptive, or plain for a part.",
            json_schema_extra={"resource": "decoders"},
        )

    def __init__(self, *given: Any, decoding: Decoder | None = None, **values: Any) -> None:
        super().__init__(*given, **values)
        self._decoding = decoding

    def _method(self, given: Resources) -> ContextMethod | Decoder | ReadsPart:
        from specrag.methods.rapid.readers import ContextMethod

        part = self.options.read == "part"
        name = self.options.decoder or ("plain" if part else "adaptive")
        decoder = self._decoding or make_decoder(name, given)
        return ContextMethod(self.name, decoder, reads_part_only=part)


class RAPID(_Contextual):
    """Retrieval-augmented speculative decoding: a drafter that reads the relevant part guesses for the model.

    Args:
        options: :class:`RAPID.Options`; the defaults are the paper's, but produce the model's own text (eta 0).
    """

    name = "rapid"
    summary = (
        "RAPID: a drafter that reads the relevant part of a long text guesses for the model that reads all"
    )

    class Options(ContextOptions):
        """Options of RAPID."""

        drafter: str = Field(
            "self",
            max_length=4096,
            description="self for the model's own weights, or a model's name; it may be larger.",
            json_schema_extra={"resource": "drafters", "own": ["self"], "prefix": "model:"},
        )
        eta: Annotated[float, Field(ge=0, le=100)] = Field(
            0.0,
            title="eta",
            description="How much of the drafter's opinion the answer takes over (Eq. 6); 0 gives the model's own "
            "text, the paper takes 5 to 20, and 40 to 50 with a larger drafter.",
        )
        gamma: Annotated[int, Field(ge=1, le=32)] = Field(
            10, title="gamma", description="Most guesses in a round."
        )
        schedule: Literal["fixed", "cost-aware"] = Field(
            "fixed", description="gamma guesses in every round, or as many as their measured cost allows."
        )
        suffix: bool | None = Field(
            None,
            description="Copy behind a repetition before the drafter guesses; none: only with cost-aware.",
        )
        residual: Literal["exact", "paper"] = Field(
            "exact",
            description="What is drawn behind a refused guess: exact gives p-hat, paper what the paper prints.",
        )
        mask: Annotated[float, Field(ge=0, lt=1)] = Field(
            0.0, description="Tokens below this share of the drafter's likeliest are not moved."
        )

    def _check(self, request: Request) -> None:
        if self.options.eta and not request.options.get("temperature"):
            own = "at temperature 0 the answer is the model's own whatever it is"
            remedy = f"{own}; raise the temperature, or leave it out"
            raise InputError("eta", self.options.eta, remedy)

    def _method(self, given: Resources) -> ContextMethod | Decoder | ReadsPart:
        given.check_drafter(self.options.drafter, ("self",))
        own = self.options.model_dump(
            include={"drafter", "eta", "gamma", "residual", "mask", "schedule", "suffix"}
        )
        return given.shared.get(_rapid, *own.items())


def _rapid(*items: tuple[str, Any]) -> ReadsPart:
    from specrag.methods.rapid.decoder import RapidDecoder

    own = dict(items)
    cost_aware = own.pop("schedule") == "cost-aware"
    suffix = own.pop("suffix")
    own["drafter"] = own["drafter"].removeprefix("model:")
    return RapidDecoder(
        **own, cost_aware=cost_aware, suffix=False if suffix is None and not cost_aware else suffix
    )


class NaiveSD(_Contextual):
    """RAPID's drafter with a fixed number of guesses and the target's own law: the paper's naive SD."""

    name = "naive-sd"
    summary = "RAPID's baseline: always gamma guesses, the model's own distribution"

    class Options(ContextOptions):
        """Which model drafts, and how much."""

        drafter: str = Field(
            "self",
            max_length=4096,
            description="self for the model's own weights, or a model's name.",
            json_schema_extra={"resource": "drafters", "own": ["self"], "prefix": "model:"},
        )
        gamma: Annotated[int, Field(ge=1, le=32)] = Field(
            10, title="gamma", description="Guesses in a round."
        )

    def _method(self, given: Resources) -> ContextMethod | Decoder | ReadsPart:
        from specrag.methods.rapid.baselines import naive_sd

        given.check_drafter(self.options.drafter, ("self",))
        drafter = self.options.drafter.removeprefix("model:")
        return given.shared.get(naive_sd, drafter, self.options.gamma)


class StreamingDrafter(_Contextual):
    """The model drafts for itself from the first and the last tokens (StreamingLLM; MagicDec's idea)."""

    name = "streaming-drafter"
    summary = "RAPID's baseline: the model drafts for itself from a window of the text"

    class Options(ContextOptions):
        """The drafter's window."""

        window: Annotated[int, Field(ge=16, le=1_000_000)] = Field(
            4096, description="Entries of the drafter's cache."
        )
        sinks: Annotated[int, Field(ge=0, le=1024)] = Field(4, description="First tokens that stay in it.")
        gamma: Annotated[int, Field(ge=1, le=32)] = Field(
            10, title="gamma", description="Guesses in a round."
        )

    def _method(self, given: Resources) -> ContextMethod | Decoder | ReadsPart:
        from specrag.methods.rapid.baselines import StreamingDecoder

        options = self.options
        return given.shared.get(StreamingDecoder, options.window, options.sinks, options.gamma)


def _with_documents(request: Request) -> Request:
    """The request with its long text as a document: all but the last paragraph, if nothing else is long."""
    if request.documents or request.history:
        return request
    text, cut, question = request.question.strip().rpartition("\n\n")
    if not cut or not text.strip():
        remedy = "send a long text and, as its last paragraph or as a message of its own, the question"
        raise InputError("messages", "no long text", remedy)
    system = request.system
    messages = [{"role": "system", "content": system}] if system else []
    # Always a text, never the name of a file.
    return Request(
        [*messages, {"role": "user", "content": question}], request.options, request.search, (text,)
    )
