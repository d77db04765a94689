"""A question with five passages, and Speculative RAG over them in few tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specrag.methods.generator import LocalGenerator
from specrag.methods.passages import Retrieval, retrieval
from specrag.methods.resources import Resources
from specrag.methods.speculative_rag import SpeculativeRAG
from specrag.methods.speculative_rag.pipeline import SpeculativeRAGPipeline
from specrag.methods.standard_rag import StandardRAG
from specrag.methods.standard_rag.pipeline import StandardPipeline
from specrag.models.roles import TextGenerator, TextScorer
from specrag.models.scoring import LocalScorer
from specrag.request import Request, SearchOptions, check_search
from specrag.retrieval.passage import Passage

if TYPE_CHECKING:
    from specrag import LanguageModel

QUESTION = "Who discovered radium?"
TEXTS = (
    ("Marie Curie", "Marie Curie discovered radium together with Pierre Curie in 1898 in Paris."),
    ("Radium", "Radium is a radioactive metal. Marie and Pierre Curie found it in uranium ore."),
    ("Danube", "The Danube rises in the Black Forest and flows into the Black Sea."),
    ("Rivers", "The Rhine and the Danube are the longest rivers of central Europe."),
    ("Moon", "The Moon is the only natural satellite of the Earth; it causes most of the tides."),
)
PASSAGES = [Passage(n, "sample", title, "", text, {}) for n, (title, text) in enumerate(TEXTS)]
#: Options of Speculative RAG: drafts of few tokens, and verdicts without a verifier.
SHORT: dict[str, Any] = {"draft_tokens": 32, "rationale_tokens": 16}
TINY: dict[str, Any] = {"draft_tokens": 16, "rationale_tokens": 8}
CONFIDENCE: dict[str, Any] = {"without": ("self-contain", "self-reflect")}


def standard(
    llm: LanguageModel, retriever: Any, options: StandardRAG.Options | None = None, **search: Any
) -> StandardPipeline:
    """Standard RAG over what is searched so."""
    request = Request(QUESTION, search=check_search(search))
    found = retrieval(request, Resources(retriever=retriever), "standard-rag")
    return StandardPipeline(llm, found, options or StandardRAG.Options())


def among(passages: Sequence[Passage], n: int | None = None) -> Retrieval:
    """Answers from passages that are given, the first n at most."""
    request = Request(QUESTION, search=SearchOptions(k=n), passages=passages)
    return retrieval(request, Resources(), "speculative-rag")


def paper(**values: Any) -> SpeculativeRAG.Options:
    """The paper's options, but with three short drafts."""
    return SpeculativeRAG.Options(**{"form": "paper", "drafts": 3, **SHORT, **values})


def make(
    llm: LanguageModel,
    passages: Sequence[Passage] = PASSAGES,
    *,
    drafter: TextGenerator | None = None,
    verifier: TextScorer | None = None,
    n: int | None = None,
    **values: Any,
) -> SpeculativeRAGPipeline:
    """Speculative RAG from these passages, the first n at most; the model drafts and verifies."""
    return SpeculativeRAGPipeline(
        drafter or LocalGenerator(llm),
        verifier or LocalScorer(llm.loaded),
        among(passages, n),
        paper(**values),
    )
