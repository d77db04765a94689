"""Retrieval-augmented generation with open-weight models, made faster by speculation."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from specrag.errors import (
    Cancelled,
    ContextLengthError,
    DeadlineExceeded,
    InputError,
    ModelFilesError,
    SpecragError,
)
from specrag.language_model import LanguageModel, load
from specrag.methods.answer import Answer, Sources
from specrag.methods.generation import Generation
from specrag.methods.options import Options
from specrag.methods.standard_rag import StandardRAG
from specrag.speculation.decode import Step

if TYPE_CHECKING:
    from specrag.methods.iterative_ralm import IterativeRaLM
    from specrag.methods.knn_lm import KnnLM
    from specrag.methods.long_context import LongContext
    from specrag.methods.ralmspec import RaLMSpec
    from specrag.methods.rapid import RAPID
    from specrag.methods.respec import ReSpec
    from specrag.methods.speculative_rag import SpeculativeRAG
    from specrag.retrieval.knowledge_base import KnowledgeBase

__all__ = [
    "RAPID",
    "Answer",
    "Cancelled",
    "ContextLengthError",
    "DeadlineExceeded",
    "Generation",
    "InputError",
    "IterativeRaLM",
    "KnnLM",
    "KnowledgeBase",
    "LanguageModel",
    "LongContext",
    "ModelFilesError",
    "Options",
    "RaLMSpec",
    "ReSpec",
    "Sources",
    "SpecragError",
    "SpeculativeRAG",
    "StandardRAG",
    "Step",
    "load",
]

# Imported when they are asked for: the kernels that they compile or load take a second or more.
_LATER = {
    "IterativeRaLM": "specrag.methods.iterative_ralm",
    "KnnLM": "specrag.methods.knn_lm",
    "KnowledgeBase": "specrag.retrieval.knowledge_base",
    "LongContext": "specrag.methods.long_context",
    "RAPID": "specrag.methods.rapid",
    "RaLMSpec": "specrag.methods.ralmspec",
    "ReSpec": "specrag.methods.respec",
    "SpeculativeRAG": "specrag.methods.speculative_rag",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)
