"""Retrieval-augmented generation with open-weight models, made faster by speculation.

Public names are imported on first access (PEP 562), so ``import specrag`` costs next to nothing and works without the
packages of the extras.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from specrag import openmp as _openmp

if TYPE_CHECKING:
    from specrag.asking import Answerer, ask
    from specrag.errors import (
        Cancelled,
        ContextLengthError,
        DeadlineExceeded,
        InputError,
        ModelFilesError,
        SpecragError,
    )
    from specrag.language_model import LanguageModel, load
    from specrag.methods import (
        Adaptive,
        Call,
        DecodingMethod,
        Method,
        MethodOptions,
        Needs,
        Plain,
        Plan,
        Resources,
    )
    from specrag.methods.knn_lm import KnnLM
    from specrag.methods.ralmspec import RaLMSpec, Sequential
    from specrag.methods.rapid import RAPID, LongContext
    from specrag.methods.respec import ReSpec
    from specrag.methods.speculative_rag import SpeculativeRAG
    from specrag.methods.standard_rag import StandardRAG
    from specrag.methods.standard_rag.cascade import Cascade
    from specrag.request import Details, Event, Options, Request, Result, SearchOptions, Sources
    from specrag.retrieval import BuildSettings, KnowledgeBase
    from specrag.retrieval.build import build
    from specrag.speculation import Step

_openmp.set_spin_count()

__all__ = [
    "RAPID",
    "Adaptive",
    "Answerer",
    "BuildSettings",
    "Call",
    "Cancelled",
    "Cascade",
    "ContextLengthError",
    "DeadlineExceeded",
    "DecodingMethod",
    "Details",
    "Event",
    "InputError",
    "KnnLM",
    "KnowledgeBase",
    "LanguageModel",
    "LongContext",
    "Method",
    "MethodOptions",
    "ModelFilesError",
    "Needs",
    "Options",
    "Plain",
    "Plan",
    "RaLMSpec",
    "ReSpec",
    "Request",
    "Resources",
    "Result",
    "SearchOptions",
    "Sequential",
    "Sources",
    "SpecragError",
    "SpeculativeRAG",
    "StandardRAG",
    "Step",
    "ask",
    "build",
    "load",
]

# The same names as in the TYPE_CHECKING block, for the interpreter; a test compares the two.
_NAMES = {
    "specrag.asking": ("Answerer", "ask"),
    "specrag.errors": (
        "Cancelled",
        "ContextLengthError",
        "DeadlineExceeded",
        "InputError",
        "ModelFilesError",
        "SpecragError",
    ),
    "specrag.language_model": ("LanguageModel", "load"),
    "specrag.methods": (
        "Adaptive",
        "Call",
        "DecodingMethod",
        "Method",
        "MethodOptions",
        "Needs",
        "Plain",
        "Plan",
        "Resources",
    ),
    "specrag.methods.knn_lm": ("KnnLM",),
    "specrag.methods.ralmspec": ("RaLMSpec", "Sequential"),
    "specrag.methods.rapid": ("LongContext", "RAPID"),
    "specrag.methods.respec": ("ReSpec",),
    "specrag.methods.speculative_rag": ("SpeculativeRAG",),
    "specrag.methods.standard_rag": ("StandardRAG",),
    "specrag.methods.standard_rag.cascade": ("Cascade",),
    "specrag.request": ("Details", "Event", "Options", "Request", "Result", "SearchOptions", "Sources"),
    "specrag.retrieval": ("BuildSettings", "KnowledgeBase"),
    "specrag.retrieval.build": ("build",),
    "specrag.speculation": ("Step",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from specrag.extras import needed_by

    with needed_by(name):
        value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value  # later accesses bypass __getattr__
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
