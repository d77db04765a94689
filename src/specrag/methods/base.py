"""The contract of methods: what they are asked, what they may use, what they plan; and how tokens are decoded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Flag, auto
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict

from specrag.engine import NOTHING, PREFILL_ROWS, Coroutine, FinishReason, Outputs, Row, Session
from specrag.errors import InputError
from specrag.methods.facade import Asked, Call, Facade, open_retriever
from specrag.methods.registry import check_values
from specrag.request import Options, Prompt, Request, Result

if TYPE_CHECKING:
    from pathlib import Path

    from specrag.engine import Executor, PrefixCache
    from specrag.methods.resources import Resources, SharedMethods
    from specrag.methods.retriever import PassageRetriever, Retriever
    from specrag.models import LoadedModel, Tokenizer
    from specrag.speculation import Settings, Speculation, TextSink

#: Guesses that a pass may write after the text, for memory estimates.
GUESSES = 64


class Needs(Flag):
    """What a method requires; anything else it uses if it is available."""

    NOTHING = 0
    #: A local model whose sessions it decodes itself.
    SESSIONS = auto()
    #: A model that writes texts, local or behind an endpoint.
    GENERATOR = auto()
    #: A model that scores texts, local or behind an endpoint.
    SCORER = auto()
    #: Passages that can be searched.
    RETRIEVER = auto()
    #: A kNN-LM datastore.
    DATASTORE = auto()
    #: A long text in the request itself.
    CONTEXT = auto()
    #: A model or a head that drafts tokens, named by an option.
    DRAFTER = auto()
    #: A smaller local model that answers first, lent by the host or named by an option.
    SMALL_MODEL = auto()


class MethodOptions(BaseModel):
    """Base of a method's ``Options``: rejects unknown options and does not convert types.

    A field's default, bounds, description and, as its title, the paper's symbol are all that the command line, the
    HTTP API, the page and the documentation know about it. A field that names something only its host can resolve
    declares it with ``json_schema_extra={"resource": "datastores"}`` (see
    :class:`~specrag.methods.resources.Resources`): ``datastores``, ``corpora``, ``drafters``, ``decoders``, ``writers``
    or ``folders``. ``"own"`` lists names that need no resource; ``"prefix"`` is the beginning of the only usable names.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked request that can be started.

    Attributes:
        begin: makes its coroutine, for the executor of the model that it uses.
        tokens: tokens that its sessions may hold together, for a server's admission control.
        prompt: tokens of the prompt if they are known beforehand; equal prompts are read once.
    """

    begin: Callable[[], Coroutine[Result]]
    tokens: int
    prompt: tuple[int, ...] = ()


class Method(Facade, ABC):
    """A way to answer. Everything that others need to know about it is here.

    A method that is given a model answers by itself, ``RaLMSpec(llm, kb).generate(question)``; any other is passed to
    a call, ``llm.generate(question, method=RaLMSpec())``.

    Args:
        given: a model (:class:`specrag.LanguageModel`, or a :class:`specrag.Answerer` if all models are elsewhere), or
            checked options; by default the options that the method's name implies.
        kb: what it searches if a call does not say: a knowledge base, a table, or the folder of one.
        values: options by name: ``Adaptive(drafter="lookup")``.

    Attributes:
        name: as people type it.
        summary: one line, for help, page and documentation.
        needs: what it requires.
        reads_history: whether earlier messages of a conversation count; if not, only the question does.
        Options: every setting.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    needs: ClassVar[Needs] = Needs.SESSIONS
    reads_history: ClassVar[bool] = True
    Options: ClassVar[type[MethodOptions]] = MethodOptions

    def __init__(
        self,
        given: MethodOptions | Facade | None = None,
        kb: Retriever | PassageRetriever | str | Path | None = None,
        **values: Any,
    ) -> None:
        checked = given if isinstance(given, MethodOptions) else None
        self.options = checked or check_values(self.Options, values, self.name, "")
        self._host = given if isinstance(given, Facade) else None
        if given is not None and checked is None and self._host is None:
            raise InputError("llm", given, f"{self._usage} with llm = specrag.load(NAME)")
        if kb is not None and self._host is None:
            raise InputError("kb", kb, f"give a model, too: {self._usage}")
        self._kb = open_retriever(kb)

    def __repr__(self) -> str:
        values = self.options.model_dump(exclude_defaults=True).items()
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in values)})"

    @property
    def _usage(self) -> str:
        return f"{type(self).__name__}(llm, kb)"

    def _ask(self, prompt: Prompt, call: Call) -> Asked:
        """See :class:`~specrag.methods.facade.Facade`: its model answers by this method."""
        name = type(self).__name__
        if self._host is None:
            raise InputError("llm", None, f"ask {self._usage}, or llm.generate(..., method={name}())")
        if "method" in call:
            raise InputError("method", call["method"], f"leave it out; {name} answers")
        whole: Call = {**call, "method": self}
        if self._kb is not None:
            whole.setdefault("kb", self._kb)
        return self._host._ask(prompt, whole)

    @abstractmethod
    def plan(self, request: Request, given: Resources) -> Plan:
        """Check a request; the only place where that is done. Loads what the method needs, runs no model.

        Raises:
            InputError: a value cannot be used.
            ContextLengthError: the prompt does not fit.
            SpecragError: something it needs cannot be loaded.
        """

    @property
    def retracts(self) -> bool:
        """Whether an event may take back text already sent (:attr:`~specrag.request.Event.text_lost`)."""
        return False

    def run(self, plan: Plan) -> Coroutine[Result]:
        """A coroutine that answers; emits steps and events along the way."""
        return plan.begin()


_FEATURE = Outputs(hidden=("final",))


@dataclass(frozen=True, slots=True)
class PromptNeeds:
    """What a method reads from the prompt's own pass.

    Args:
        rows: how many of its last rows; excludes the newest token, which is fed with the first round.
        outputs: what each of them returns.
        features: how many of its last rows return their ``final`` hidden state, which needs no logits.
        joins: the end of the prompt may be fed with the first round if nothing from its rows is needed.
    """

    rows: int = 0
    outputs: Outputs = NOTHING
    features: int = 0
    joins: bool = False


def read_prompt(
    session: Session, tokens: Sequence[int], needs: PromptNeeds, chunk: int = PREFILL_ROWS
) -> Coroutine[list[Row]]:
    """Feed a prompt, at most ``chunk`` rows per pass; returns the answers for the last rows that a method asks for.

    If the method joins it, the last pass is left to the first round.
    """
    fed = len(session.pending) + len(tokens) - 1
    if needs.joins and not (needs.rows or needs.features):
        left = fed % chunk or min(fed, chunk)
        yield from session.extend(tokens, NOTHING, chunk, left)
        return []
    full = min(needs.rows, fed)
    wanted = max(full, min(needs.features, fed))
    outputs = [NOTHING] * (fed - wanted) + [_FEATURE] * (wanted - full) + [needs.outputs] * full
    rows = yield from session.extend(tokens, outputs, chunk)
    return rows[fed - wanted :]


class Decoder(Protocol):
    """A configuration of drafter, acceptance rule and schedule, shared by all requests that ask for it.

    What a request learns stays in the coroutine of its :meth:`decode`. The object itself holds settings, things
    that are expensive to make (a draft model, a corpus), and the measured cost of passes, which changes no output.
    """

    @property
    def name(self) -> str:
        """The name in the registry."""

    @property
    def prompt_needs(self) -> PromptNeeds:
        """What it reads from the prompt's own pass."""

    def check(self, loaded: LoadedModel) -> None:
        """Check that it can work with a model, before any work.

        Raises:
            InputError: it cannot, for instance because of a draft model with another vocabulary.
        """

    def decode(
        self,
        session: Session,
        settings: Settings,
        text: TextSink,
        clock: Callable[[], float],
        prompt_rows: Sequence[Row] = (),
    ) -> Coroutine[FinishReason]:
        """Decode after the session's tokens; emits one :class:`~specrag.speculation.decode.Step` per round.

        Args:
            session: holds the prompt.
            settings: what the caller asks for.
            text: turns tokens into characters.
            clock: seconds.
            prompt_rows: the answers to :attr:`prompt_needs`; fewer, if the prompt is shorter or was cached.
        """


@runtime_checkable
class SpeculativeDecoder(Decoder, Protocol):
    """A method that is a drafter, a rule and a schedule, which another may use for its own guesses."""

    def speculation(self, session: Session, settings: Settings) -> Speculation:
        """Drafter, rule and schedule of one request; whatever decodes with them closes the drafter."""


class DraftingDecoder(ABC):
    """A decoder that is a drafter, a rule and a schedule, and nothing else."""

    name: str

    @property
    def prompt_needs(self) -> PromptNeeds:
        """Nothing, unless a drafter reads something."""
        return PromptNeeds(joins=True)

    def check(self, loaded: LoadedModel) -> None:
        """Accept every model, unless a drafter objects."""
        del loaded

    @abstractmethod
    def speculation(self, session: Session, settings: Settings) -> Speculation:
        """Drafter, rule and schedule of one request; :meth:`decode` closes the drafter."""

    def decode(
        self,
        session: Session,
        settings: Settings,
        text: TextSink,
        clock: Callable[[], float],
        prompt_rows: Sequence[Row] = (),
    ) -> Coroutine[FinishReason]:
        from specrag.speculation.decode import decode  # brings numpy, which a command line does without

        return decode(session, settings, text, self.speculation(session, settings), clock, prompt_rows)


class Generator(Protocol):
    """A language model as seen by methods above the token level: text in, text out, in the executor they share."""

    @property
    def executor(self) -> Executor:
        """Runs the coroutines of all users of this model."""

    @property
    def context_length(self) -> int:
        """Maximum number of tokens of prompt and output together."""

    def count(self, prompt: Prompt, *, raw: bool = False) -> int:
        """Tokens of a prompt; rather too high an estimate if the model's tokenizer is not known here."""

    def generating(self, prompt: Prompt, options: Options) -> Coroutine[Result]:
        """A coroutine that generates a text; it emits one :class:`~specrag.speculation.decode.Step` per round.

        The prompt and the options are checked by the call, before any work.
        """


@runtime_checkable
class EncodesPrompts(Protocol):
    """A generator whose tokenizer is here, so that a prompt can be put together token by token."""

    def encode(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """The tokens that the model reads for a prompt."""


class SessionGenerator(Generator, EncodesPrompts, Protocol):
    """A language model whose sessions a method decodes itself, such as :class:`specrag.LanguageModel`."""

    @property
    def loaded(self) -> LoadedModel:
        """The model with its tokenizer."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer."""

    @property
    def prefixes(self) -> PrefixCache:
        """Keys and values of earlier prompts, for coroutines of its executor."""


class LocalModel(SessionGenerator, Protocol):
    """A language model on this machine that remembers what it has read, such as :class:`specrag.LanguageModel`.

    Attributes:
        shared: what its requests learn together.
        clock: seconds, the executor's.
    """

    shared: SharedMethods
    clock: Callable[[], float]

    def generating(self, prompt: Prompt, options: Options, begun: Session | None = None) -> Coroutine[Result]:
        """See :meth:`Generator.generating`.

        Args:
            begun: holds the first tokens of the prompt; closed at the end.
        """
