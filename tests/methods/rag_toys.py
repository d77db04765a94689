"""A question with five passages, and Speculative RAG over them in few tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specrag.methods.generator import LocalGenerator
from specrag.methods.speculative_rag.drafting import Drafting
from specrag.methods.speculative_rag.pipeline import SpeculativeRAGPipeline
from specrag.methods.speculative_rag.scoring import Scoring
from specrag.models.roles import TextGenerator
from specrag.models.scoring import LocalScorer
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
SHORT = Drafting(max_tokens=32, rationale_tokens=16)
TINY = Drafting(max_tokens=16, rationale_tokens=8)
CONFIDENCE = Scoring(self_contain=False, self_reflect=False)


def make(llm: LanguageModel, **arguments: Any) -> SpeculativeRAGPipeline:
    given: dict[str, Any] = {"m": 3, "k": 2, "drafting": SHORT} | arguments
    drafter: TextGenerator = given.pop("drafter", LocalGenerator(llm))
    return SpeculativeRAGPipeline(drafter, LocalScorer(llm.loaded), **given)
