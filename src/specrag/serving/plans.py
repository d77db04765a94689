"""A text that is asked for, and the checked plan that it becomes; what the plans of all methods have in common."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from specrag.engine.passes import Coroutine
from specrag.errors import InputError
from specrag.methods import registry
from specrag.methods.base import DecodingMethod
from specrag.methods.fallbacks import DRAFTERS
from specrag.methods.generation import Prompt
from specrag.methods.options import Options
from specrag.methods.rag_prompt import Message
from specrag.methods.standard_rag import MIN_SCORE
from specrag.serving.method_options import ReSpecOptions
from specrag.serving.schemas import Body, SpecragField

if TYPE_CHECKING:
    from specrag.language_model import LanguageModel
    from specrag.methods.retriever import PassageRetriever, Retriever
    from specrag.retrieval.knn_datastore import Datastore
    from specrag.serving.knowledge import Base
    from specrag.speculation.suffix.corpus import SuffixCorpus

T = TypeVar("T")

#: Passages found where a request does not say how many.
DEFAULT_K = 5

#: Tokens that one passage may take of a prompt, for the estimate of memory: an encoder reads no longer ones.
PASSAGE_TOKENS = 400

#: Guesses that a pass may write behind the text.
GUESSES = 64


class SharedMethods:
    """Configured methods, one for all equal requests of a server, so that they learn together what things cost.

    They hold the datastores and corpora that they read, so the server lets them go before it closes these.
    """

    def __init__(self) -> None:
        self._made = lru_cache(maxsize=64)(_call)

    def get(self, make: Callable[..., T], *words: Hashable) -> T:
        """What ``make`` makes of these words; the same object as long as it is remembered."""
        made: T = self._made(make, *words)
        return made

    def clear(self) -> None:
        """Forget all of them."""
        self._made.cache_clear()


def _call(make: Callable[..., T], *words: Hashable) -> T:
    return make(*words)


@dataclass(frozen=True, slots=True)
class Ask:
    """One text that is asked for.

    Attributes:
        llm: writes it.
        prompt: the whole conversation, or a text's tokens; what a model without passages reads.
        question: the last thing that the user has said.
        history: what was said before.
        system: the system message; ``None`` for none.
        options: of the generation, without ``method``.
        wish: the field ``specrag``.
        kb: the knowledge base that it names.
        datastores: those that the asker may search, by name.
        corpora: those that guesses may be copied from, by name.
        drafters: what ReSpec may ask besides what it has itself.
        rag_drafter: writes the drafts of Speculative RAG.
        formed: the text must keep to a form, so that nothing may be put in front of it.
        methods: those that it shares with equal asks of the same server.
    """

    llm: LanguageModel
    prompt: Prompt
    question: str
    history: tuple[Message, ...]
    system: str | None
    options: Options
    wish: SpecragField
    kb: Base | None
    datastores: Mapping[str, Datastore]
    corpora: Mapping[str, SuffixCorpus]
    drafters: Sequence[str]
    rag_drafter: LanguageModel
    formed: bool
    methods: SharedMethods

    def with_seed(self, seed: int) -> Ask:
        """The same with another seed, for another choice."""
        return replace(self, options={**self.options, "seed": seed})

    @property
    def said_tokens(self) -> int:
        """Tokens of everything that was said, from above: a token is at least a byte."""
        said = [self.question, self.system or "", *(message["content"] for message in self.history)]
        return min(sum(len(text.encode("utf-8", "replace")) for text in said), self.llm.context_length)


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked text that can be started.

    Attributes:
        start: makes its coroutine.
        tokens: that its sessions may hold, together.
        prompt: tokens of the prompt where they are known beforehand; equal prompts are read once.
    """

    start: Callable[[], Coroutine[Any]]
    tokens: int
    prompt: tuple[int, ...] = ()


def plan_text(ask: Ask, method: str | DecodingMethod) -> Plan:
    """The plan of a text without passages.

    Raises:
        InputError: a value cannot be used.
        ContextLengthError: the prompt does not fit.
    """
    llm = ask.llm
    tokens = llm.encode(ask.prompt, raw=ask.options.get("raw", False))
    left = max(llm.context_length - len(tokens), 1)
    most = min(ask.options.get("max_tokens", left), left)
    options: Options = {**ask.options, "method": method, "max_tokens": most}
    # Checked now, while the caller can still be told by the answer's status.
    llm.generating(tokens, options).close()
    return Plan(lambda: llm.generating(tokens, options), len(tokens) + most + GUESSES, tuple(tokens))


def same_prompts(plans: Sequence[Plan]) -> list[int | None]:
    """For each plan the earlier one that reads the same prompt; ``None`` for the first of its kind."""
    first: dict[tuple[int, ...], int] = {}
    found: list[int | None] = []
    for index, plan in enumerate(plans):
        known = first.get(plan.prompt) if plan.prompt else None
        found.append(known)
        if plan.prompt and known is None:
            first[plan.prompt] = index
    return found


# -- decoders ---------------------------------------------------------------------------------------------------


def decoder(name: str, options: Body | None = None, ask: Ask | None = None) -> DecodingMethod:
    """A decoding method; all requests share it, so that it learns what a pass costs.

    Args:
        ask: whose options they are.

    Raises:
        InputError: there is none of this name, or the asker may not use what the options name.
    """
    if isinstance(options, ReSpecOptions) and ask is not None:
        known = (*DRAFTERS, *ask.drafters)
        if options.drafter not in known:
            raise InputError("specrag.options.drafter", options.drafter, f"take one of {', '.join(known)}")
        if options.corpus is not None and options.corpus not in ask.corpora:
            names = ", ".join(sorted(ask.corpora)) or "none is served"
            raise InputError("specrag.options.corpus", options.corpus, f"take one of these: {names}")
        corpus = None if options.corpus is None else ask.corpora[options.corpus]
        return respec(ask.methods, options, corpus)
    registry.check_method(name)
    return _shared(name)


def respec(methods: SharedMethods, options: ReSpecOptions, corpus: SuffixCorpus | None) -> DecodingMethod:
    """ReSpec as the options say; equal ones are one method."""
    return methods.get(
        _respec, options.drafter, options.relaxed, options.tolerance, options.cost_aware, corpus
    )


@lru_cache(maxsize=64)
def _shared(name: str) -> DecodingMethod:
    return registry.make_method(name)


def _respec(
    drafter: str, relaxed: bool, tolerance: float, cost_aware: bool, corpus: SuffixCorpus | None
) -> DecodingMethod:
    from specrag.methods.respec import ReSpec

    return ReSpec(drafter=drafter, relaxed=relaxed, tolerance=tolerance, cost_aware=cost_aware, corpus=corpus)


# -- retrieval --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Retrieval:
    """How passages are found once for an answer.

    Attributes:
        retriever: a knowledge base or a table.
        k: how many are found.
        index: by which index.
        where: conditions on their metadata.
        min_score: as of :class:`~specrag.methods.standard_rag.StandardRAG`.
    """

    retriever: Retriever
    k: int
    index: str
    where: Mapping[str, Any] | None
    min_score: float | None


def retrieval(ask: Ask, default_k: int = DEFAULT_K) -> Retrieval:
    """What an ask says of it.

    Raises:
        InputError: a condition cannot be used.
    """
    from specrag.retrieval.knowledge_base import KnowledgeBase

    wish, base = ask.wish, ask.kb
    assert base is not None  # asked for by make_plan
    k = wish.k if wish.k is not None else max(min(default_k, len(base)), 1)
    index = wish.index or "hybrid"
    if isinstance(base, KnowledgeBase):
        least = MIN_SCORE if wish.min_score is None else wish.min_score
        return Retrieval(base, k, index, _conditions(ask), least if wish.abstain else None)
    if wish.where or wish.index is not None:
        raise InputError("specrag.where", wish.where, "leave where and index out; a table has its own")
    return Retrieval(base, k, index, None, None)


def passage_retriever(ask: Ask) -> PassageRetriever:
    """What is searched every few tokens.

    Raises:
        InputError: the ask has earlier messages or a form, or a condition cannot be used.
    """
    from specrag.retrieval.knowledge_base import KnowledgeBase
    from specrag.retrieval.single_index import SingleIndex

    assert ask.kb is not None
    if ask.history:
        remedy = "send the question alone; this method searches with the text as it grows"
        raise InputError("messages", f"{len(ask.history)} earlier ones", remedy)
    refuse_form(ask, "this method's text is written in parts")
    if isinstance(ask.kb, KnowledgeBase):
        return SingleIndex(ask.kb, ask.wish.index or "flat", _conditions(ask))
    if ask.wish.where or ask.wish.index is not None:
        raise InputError("specrag.where", ask.wish.where, "leave where and index out; a table has its own")
    return ask.kb.store


def refuse_form(ask: Ask, reason: str) -> None:
    """Refuse an ask whose text must keep to a form.

    Raises:
        InputError: it must.
    """
    if ask.formed:
        raise InputError("response_format", "a form", f"leave it and tools out; {reason}")


def _conditions(ask: Ask) -> Mapping[str, Any] | None:
    from specrag.retrieval.filters import parse_conditions
    from specrag.retrieval.knowledge_base import KnowledgeBase

    assert isinstance(ask.kb, KnowledgeBase)
    try:
        conditions = parse_conditions(ask.wish.where)
        ask.kb.allowed(conditions)  # says which field does not exist
    except InputError as error:  # the command line knows it as --where
        raise InputError("specrag.where", error.value, error.remedy) from None
    return conditions or None
