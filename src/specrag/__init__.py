"""Retrieval-augmented generation with open-weight models, made faster by speculation."""

from specrag.errors import (
    Cancelled,
    ContextLengthError,
    DeadlineExceeded,
    InputError,
    ModelFilesError,
    SpecragError,
)
from specrag.language_model import LanguageModel, load
from specrag.methods.generation import Generation
from specrag.methods.options import Options
from specrag.speculation.decode import Step

__all__ = [
    "Cancelled",
    "ContextLengthError",
    "DeadlineExceeded",
    "Generation",
    "InputError",
    "LanguageModel",
    "ModelFilesError",
    "Options",
    "SpecragError",
    "Step",
    "load",
]
