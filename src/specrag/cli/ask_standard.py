"""How ``specrag ask`` answers from passages that are found once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specrag.cli.answers import describe_answer, show_answer
from specrag.cli.chat import run_chat
from specrag.errors import InputError

if TYPE_CHECKING:
    from specrag.cli.speculation import SourceColours
    from specrag.language_model import LanguageModel
    from specrag.methods.options import Options
    from specrag.methods.standard_rag import StandardRAG
    from specrag.retrieval.knowledge_base import KnowledgeBase
    from specrag.retrieval.reranker import Reranker

_DEFAULT_K = 5


@dataclass(frozen=True, slots=True)
class StandardChoice:
    """Standard RAG, as the options describe it.

    Attributes:
        k: passages, ``None`` for five.
        index: searched.
        rerank: a cross-encoder's name.
        min_score: the least similarity of a passage that is answered from, ``None`` for the default.
        no_abstain: answer whatever is found.
        rewrite: make follow-up questions whole before the search.
        system: a message in front of the conversation.
    """

    k: int | None
    index: str
    rerank: str | None
    min_score: float | None
    no_abstain: bool
    rewrite: bool
    system: str | None

    def check(self) -> None:
        """Check all that needs no knowledge base.

        Raises:
            InputError: a value cannot be used.
        """
        from specrag.methods.standard_rag import check_min_score
        from specrag.retrieval.knowledge_base import check_index

        if self.no_abstain and self.min_score is not None:
            raise InputError("--min-score", self.min_score, "give --min-score or --no-abstain, not both")
        check_index(self.index)
        check_min_score(self.threshold)

    @property
    def threshold(self) -> float | None:
        """The least similarity; ``None`` where whatever is found is answered from."""
        from specrag.methods.standard_rag import MIN_SCORE

        if self.no_abstain:
            return None
        return MIN_SCORE if self.min_score is None else self.min_score

    def passages(self, base: KnowledgeBase) -> int:
        """How many passages are put into the prompt.

        Raises:
            InputError: the knowledge base holds fewer.
        """
        wanted = min(_DEFAULT_K, len(base)) if self.k is None else self.k
        base.check_k(wanted)
        return wanted

    def make(self, llm: LanguageModel, base: KnowledgeBase, where: Mapping[str, Any]) -> StandardRAG:
        """The method itself."""
        from specrag.methods.standard_rag import StandardRAG

        return StandardRAG(
            llm,
            base,
            k=self.passages(base),
            index=self.index,
            where=where,
            reranker=_load_reranker(self.rerank),
            min_score=self.threshold,
            system=self.system,
            rewrite=self.rewrite,
        )


def chat(rag: StandardRAG, question: str | None, options: Options) -> None:
    """Ask again and again."""
    _warm_up(rag)
    run_chat(rag, question, options)


def answer(rag: StandardRAG, question: str, options: Options, colours: SourceColours | None) -> None:
    """Show the answer as it comes, with its sources and figures."""
    rag.check(question, **options)
    _warm_up(rag)
    show_answer(rag.stream(question, **options), colours)


def describe(rag: StandardRAG, question: str, options: Options) -> dict[str, object]:
    """The answer for programs."""
    rag.check(question, **options)
    _warm_up(rag)
    described = describe_answer(question, rag.answer(question, **options))
    return described | {"index": rag.index, "k": rag.k, "min_score": rag.min_score}


def _load_reranker(name: str | None) -> Reranker | None:
    if name is None:
        return None
    from specrag.retrieval.reranker import load_reranker

    return load_reranker(name)


def _warm_up(rag: StandardRAG) -> None:
    """Read index and encoder and compile loops: what a server pays once is no part of an answer's time."""
    rag.knowledge_base.search(["warm-up"], 1, index=rag.index, reranker=rag.reranker)
