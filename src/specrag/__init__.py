"""Retrieval-augmented generation with open-weight models, made faster by speculation."""

from specrag.errors import (
    Cancelled,
    ContextLengthError,
    DeadlineExceeded,
    InputError,
    ModelFilesError,
    SpecragError,
)
from specrag.llm import LLM, Generation, load
from specrag.options import Options
from specrag.speculation.decode import Step

__all__ = [
    "LLM",
    "Cancelled",
    "ContextLengthError",
    "DeadlineExceeded",
    "Generation",
    "InputError",
    "ModelFilesError",
    "Options",
    "SpecragError",
    "Step",
    "load",
]
