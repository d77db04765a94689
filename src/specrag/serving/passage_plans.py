"""Plans of the methods that answer from passages or from a long text."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from specrag.engine.passes import Coroutine
from specrag.engine.session import Session
from specrag.errors import InputError
from specrag.methods.base import DecodingMethod
from specrag.methods.generation import Generation, Prompt
from specrag.methods.iterative import DEFAULT_MAX_TOKENS as ITERATIVE_MAX_TOKENS
from specrag.methods.options import DEFAULT_MAX_TOKENS, Options
from specrag.methods.rag_prompt import LEAD
from specrag.methods.ralm_text import KEPT
from specrag.methods.standard_rag import StandardRAG
from specrag.scheduling.cost_aware_guesses import MAX_FRESH, SharedGuesses
from specrag.serving.method_options import (
    RaLMOptions,
    RaLMSpecOptions,
    RapidOptions,
    SpeculativeRAGOptions,
    StandardRAGOptions,
)
from specrag.serving.plans import (
    DEFAULT_K,
    GUESSES,
    PASSAGE_TOKENS,
    Ask,
    Plan,
    decoder,
    passage_retriever,
    refuse_form,
    retrieval,
)

if TYPE_CHECKING:
    from specrag.methods.rapid import RAPID
    from specrag.retrieval.context import ContextRetriever

#: By knowledge base and index.
_LEARNED: WeakKeyDictionary[object, dict[str | None, SharedGuesses]] = WeakKeyDictionary()
#: Sessions that guesses of a round may keep.
_MOST_SESSIONS = {"os3": 8, "cost-aware": MAX_FRESH + 1}


def plan_answer(ask: Ask, method: DecodingMethod) -> Plan:
    """Standard RAG, its text decoded by a method."""
    llm = ask.llm
    given: Options = {"max_tokens": DEFAULT_MAX_TOKENS, **ask.options}
    found = retrieval(ask)
    room = min(
        llm.context_length - given["max_tokens"],
        (found.k + 1) * PASSAGE_TOKENS + ask.said_tokens,
    )
    rag = StandardRAG(
        llm,
        found.retriever,
        k=found.k,
        index=found.index,
        where=found.where,
        min_score=found.min_score,
        max_prompt_tokens=max(room, 1),
        system=ask.system,
        lead="" if ask.formed else LEAD,
        rewrite=ask.wish.rewrite,
    )
    options: Options = {**given, "method": method}
    rag.check(ask.question, ask.history, **options)
    tokens = max(room, 1) + given["max_tokens"] + GUESSES
    return Plan(lambda: rag.answering(ask.question, ask.history, **options), tokens)


def plan_standard_rag(ask: Ask, options: StandardRAGOptions) -> Plan:
    """Standard RAG."""
    return plan_answer(ask, decoder(options.decoder))


def plan_iterative(ask: Ask, options: RaLMOptions) -> Plan:
    """A passage every few tokens, one search after the other."""
    from specrag.methods.iterative_ralm import IterativeRaLM

    method = IterativeRaLM(
        ask.llm,
        passage_retriever(ask),
        interval=options.interval,
        query_tokens=options.query_tokens,
        passage_tokens=options.passage_tokens,
        prompt_tokens=options.prompt_tokens,
        decoder=decoder(options.decoder),
        system=ask.system,
    )
    given: Options = {"max_tokens": ITERATIVE_MAX_TOKENS, **ask.options}
    method.check(ask.question, **given)
    return Plan(lambda: method.answering(ask.question, **given), _tokens(options, given, KEPT + 1))


def plan_ralmspec(ask: Ask, options: RaLMSpecOptions) -> Plan:
    """The same, speculated."""
    from specrag.methods.ralmspec import RaLMSpec

    retriever = passage_retriever(ask)
    method = RaLMSpec(
        ask.llm,
        retriever,
        stride=options.stride,
        prefetch=min(options.prefetch, max(len(retriever), 1)),
        asynchronous=options.asynchronous,
        learned=_learned(ask),
        interval=options.interval,
        query_tokens=options.query_tokens,
        passage_tokens=options.passage_tokens,
        prompt_tokens=options.prompt_tokens,
        decoder=decoder(options.decoder),
        system=ask.system,
    )
    given: Options = {"max_tokens": ITERATIVE_MAX_TOKENS, **ask.options}
    method.check(ask.question, **given)
    # A session is kept for every passage that may still turn out to be the right one.
    sessions = KEPT + (options.stride if isinstance(options.stride, int) else _MOST_SESSIONS[options.stride])
    return Plan(lambda: method.answering(ask.question, **given), _tokens(options, given, sessions))


def _learned(ask: Ask) -> SharedGuesses:
    """What earlier requests learned of searching the same index."""
    assert ask.kb is not None
    return _LEARNED.setdefault(ask.kb, {}).setdefault(ask.wish.index, SharedGuesses())


def plan_speculative_rag(ask: Ask, options: SpeculativeRAGOptions) -> Plan:
    """Drafts from subsets, the best one chosen; the server's model verifies them, and drafts if no other one does."""
    from specrag.engine.memory import keys_values_bytes
    from specrag.methods.draft_scores import Scoring
    from specrag.methods.drafting import Drafting
    from specrag.methods.local_generator import LocalGenerator
    from specrag.methods.speculative_rag import SpeculativeRAG
    from specrag.models.scoring import LocalScorer

    refuse_form(ask, "drafts have a form of their own")
    found = retrieval(ask, 2 * DEFAULT_K)
    method = SpeculativeRAG(
        # By its name: what the model's passes cost says nothing of a drafter's.
        LocalGenerator(_Tenant(ask), method=options.decoder),
        LocalScorer(ask.llm.loaded),
        found.retriever,
        m=options.drafts,
        k=min(options.passages_per_draft, found.k),
        passages=found.k,
        strategy=options.strategy,
        scoring=Scoring(evidence=options.evidence),
        drafting=Drafting(
            max_tokens=options.draft_tokens,
            rationale_tokens=max(options.draft_tokens * 5 // 8, 1),
        ),
        seed=ask.options.get("seed", 0) % 2**32,
        index=found.index,
        where=found.where,
        min_score=found.min_score,
        executor=ask.llm.executor,
    )
    method.answering(ask.question).close()
    prompt = (options.passages_per_draft + 1) * PASSAGE_TOKENS + ask.said_tokens
    # Each draft has a session of the drafter and rows of the verifier's pass; memory is counted in the model's tokens.
    each = min(prompt, ask.rag_drafter.context_length) + 2 * options.draft_tokens
    share = keys_values_bytes(ask.rag_drafter.model, each) / keys_values_bytes(ask.llm.model, each)
    # What one text more reads: the draft of all passages, the verifier that has them all in front.
    more = (share if options.strategy == "anchored-whole" else 0) + (options.evidence == "all-passages")
    tokens = math.ceil((1 + share) * options.drafts * each + more * found.k * PASSAGE_TOKENS)
    return Plan(lambda: method.answering(ask.question), tokens)


def plan_rapid(ask: Ask, options: RapidOptions) -> Plan:
    """A long text in the request itself: the earlier messages, or all but the last paragraph of a single one."""
    from specrag.methods.long_context import LongContext

    if ask.kb is not None:
        remedy = "leave it out; rapid reads a long text that the request itself holds"
        raise InputError("specrag.kb", ask.wish.kb, remedy)
    refuse_form(ask, "a long text is answered freely")
    if options.eta and ask.options["temperature"] == 0:
        remedy = "at temperature 0 the answer is the model's own whatever it is; raise the temperature, or leave it out"
        raise InputError("specrag.options.eta", options.eta, remedy)
    documents: tuple[str, ...] = ()
    question, history = ask.question, ask.history
    if not history:
        text, cut, question = ask.question.strip().rpartition("\n\n")
        if not cut or not text.strip():
            remedy = "send a long text and, as its last paragraph or as a message of its own, the question"
            raise InputError("messages", "no long text", remedy)
        # A text, never the name of a file.
        documents = (text,)
    given: Options = {"max_tokens": DEFAULT_MAX_TOKENS, **ask.options}
    given.pop("raw", None)
    method = LongContext(
        ask.llm,
        method=_rapid(options.eta, options.gamma),
        retriever=_context_retriever(),
        reuse=False,
        system=ask.system,
    )
    method.answering(question, documents, history=history, **given).close()
    tokens = min(ask.said_tokens + PASSAGE_TOKENS, ask.llm.context_length) + given["max_tokens"] + GUESSES
    return Plan(lambda: method.answering(question, documents, history=history, **given), 2 * tokens)


class _Tenant:
    """Who writes the drafts: the model, or another one whose passes run beside the model's.

    The model's prefix cache keeps what is read for one key apart from the others'; another drafter has none.

    Args:
        ask: whose.
    """

    def __init__(self, ask: Ask) -> None:
        self._llm = ask.rag_drafter
        self._tenant = ask.options.get("tenant", "")
        self.executor = ask.llm.executor
        self.loaded = ask.rag_drafter.loaded

    def generating(
        self, prompt: Prompt, options: Options, begun: Session | None = None
    ) -> Coroutine[Generation]:
        """As the model's own."""
        return self._llm.generating(prompt, {**options, "tenant": self._tenant}, begun)


@lru_cache(maxsize=16)
def _rapid(eta: float, gamma: int) -> RAPID:
    from specrag.methods.rapid import RAPID

    return RAPID(eta=eta, gamma=gamma)


@lru_cache(maxsize=1)
def _context_retriever() -> ContextRetriever:
    from specrag.retrieval.context import ContextRetriever

    return ContextRetriever()


def _tokens(options: RaLMOptions, given: Options, sessions: int) -> int:
    return sessions * (options.prompt_tokens + given["max_tokens"] + GUESSES)
