"""Retrieval-augmented generation with open-weight models, made faster by speculation."""

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
    from specrag.retrieval.knowledge_base import KnowledgeBase

__all__ = [
    "Answer",
    "Cancelled",
    "ContextLengthError",
    "DeadlineExceeded",
    "Generation",
    "InputError",
    "KnowledgeBase",
    "LanguageModel",
    "ModelFilesError",
    "Options",
    "Sources",
    "SpecragError",
    "StandardRAG",
    "Step",
    "load",
]


def __getattr__(name: str) -> Any:
    """Import the knowledge base when it is asked for: its compiled kernels take a second to load."""
    if name == "KnowledgeBase":
        from specrag.retrieval.knowledge_base import KnowledgeBase

        return KnowledgeBase
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
