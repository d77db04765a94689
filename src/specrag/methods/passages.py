"""Reads what a request says about finding passages, for the methods over passages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specrag.errors import InputError
from specrag.methods.retriever import GivenPassages, VectorRetriever, check_k, check_retriever

if TYPE_CHECKING:
    from specrag.methods.resources import Resources
    from specrag.methods.retriever import PassageRetriever, Retriever
    from specrag.request import Request
    from specrag.retrieval import Hit
    from specrag.retrieval.encoder import Reranker
    from specrag.retrieval.index import Where

#: Default number of passages found.
DEFAULT_K = 5

#: Tokens that one passage may take in a prompt, for memory estimates: an encoder reads no longer ones.
PASSAGE_TOKENS = 400


@dataclass(frozen=True, slots=True)
class Retrieval:
    """How passages are found once for an answer.

    Attributes:
        retriever: a knowledge base, a table, or passages that are given.
        k: how many are found.
        index: the index to search.
        where: conditions on their metadata.
        reranker: reorders them.
        min_score: the minimum cosine of question and best passage; ``None`` for the usual one.
        abstain: whether to give no answer if nothing relevant is found.
        rewrite: whether to make a follow-up question complete before the search.
    """

    retriever: Retriever
    k: int
    index: str
    where: Where | None
    reranker: Reranker | None
    min_score: float | None
    abstain: bool
    rewrite: bool

    def search(self, question: str) -> list[Hit]:
        """The passages for a question, best first."""
        return self.retriever.search(
            [question], self.k, index=self.index, where=self.where, reranker=self.reranker
        )[0]


def retrieval(request: Request, given: Resources, name: str, default_k: int = DEFAULT_K) -> Retrieval:
    """What a request says about finding passages once.

    Args:
        name: of the method, for errors.

    Raises:
        InputError: there are no passages, or a value cannot be used.
    """
    search = request.search
    if search.min_score is not None and not search.abstain:
        raise InputError("min_score", search.min_score, "give it, or do not abstain; not both")
    retriever, k = _searched(request, given, name, default_k)
    if isinstance(retriever, VectorRetriever):
        index, min_score, abstain = search.index or "hybrid", search.min_score, search.abstain
    else:
        _refuse_beyond_stores(request)
        index, min_score, abstain = "hybrid", None, False
    where = conditions(request, retriever)
    reranker = given.reranker(search.rerank)
    return Retrieval(retriever, k, index, where, reranker, min_score, abstain, search.rewrite)


def _searched(request: Request, given: Resources, name: str, default_k: int) -> tuple[Retriever, int]:
    """What is searched, and how many passages to find: of given ones all, unless fewer are wanted.

    Raises:
        InputError: there are no passages, or fewer than are wanted; or given ones are to be ranked.
    """
    wanted, rerank = request.search.k, request.search.rerank
    if request.passages is not None:
        if not request.passages:
            raise InputError("passages", [], "give at least one passage")
        if rerank is not None:
            raise InputError("rerank", rerank, "leave it out; these passages have been ranked already")
        count = len(request.passages)
        return GivenPassages(request.passages), min(wanted or count, count)
    retriever: Retriever = given.passages(name)
    check_retriever(retriever)
    k = wanted if wanted is not None else max(min(default_k, len(retriever)), 1)
    check_k(k, len(retriever))
    return retriever, k


def passage_retriever(request: Request, given: Resources, name: str) -> PassageRetriever:
    """The retriever that is searched every few tokens.

    Args:
        name: of the method, for errors.

    Raises:
        InputError: there are no passages, or the request has earlier messages or a form.
    """
    from specrag.retrieval import KnowledgeBase, SingleIndex

    retriever = given.passages(name)
    if request.history:
        remedy = "send the question alone; this method searches with the text as it grows"
        raise InputError("messages", f"{len(request.history)} earlier ones", remedy)
    refuse_form(request, "this method's text is written in parts")
    _refuse_beyond_steps(request)
    if isinstance(retriever, KnowledgeBase):
        return SingleIndex(retriever, request.search.index or "flat", conditions(request, retriever))
    if isinstance(retriever, SingleIndex):
        return retriever
    _refuse_beyond_stores(request)
    where = conditions(request, retriever)
    if where is not None:
        narrowed: PassageRetriever = retriever.narrowed(where)
        return narrowed
    # A store that also answers whole questions: take the part that answers encoded ones.
    found: PassageRetriever = getattr(retriever, "store", retriever)
    return found


def conditions(request: Request, retriever: Any) -> Where | None:
    """The conditions on metadata, checked.

    Raises:
        InputError: one cannot be used.
    """
    from specrag.retrieval.index import read_filter

    found = read_filter(request.search.where)
    if found is not None:
        check = getattr(retriever, "allowed", None) or getattr(retriever, "narrowed", None)
        if check is None:
            raise InputError(
                "where", request.search.where, "these passages have been found already; leave it out"
            )
        check(found)  # says which field does not exist
    return found


def refuse_form(request: Request, reason: str) -> None:
    """Refuse a request whose text must follow a form.

    Raises:
        InputError: its text must follow one.
    """
    if request.is_formed:
        raise InputError("response_format", "a form", f"leave it and tools out; {reason}")


def said_tokens(request: Request, given: Resources) -> int:
    """Upper bound for the tokens of everything that was said: a token is at least one byte."""
    said = [request.question, request.system or "", *(message["content"] for message in request.history)]
    return min(sum(len(text.encode("utf-8", "replace")) for text in said), given.generator.context_length)


def _refuse_beyond_steps(request: Request) -> None:
    """Refuse what is for passages that are found once: another order, and a threshold for answering at all."""
    search = request.search
    remedy = "leave it out; this method searches every few tokens"
    for name, value in (("rerank", search.rerank), ("min_score", search.min_score)):
        if value is not None:
            raise InputError(name, value, remedy)


def _refuse_beyond_stores(request: Request) -> None:
    """Refuse what only a knowledge base has: a choice of indexes, and similarities to compare with a threshold."""
    search = request.search
    if search.index is not None:
        raise InputError("index", search.index, "leave it out; only a knowledge base has several")
    if search.min_score is not None:
        raise InputError("min_score", search.min_score, "leave it out; only a knowledge base has a threshold")
