"""Drafters propose tokens."""

from typing import TYPE_CHECKING

from specrag.lazy import lazy_names

if TYPE_CHECKING:
    from specrag.speculation.drafters.base import ANY_DEPTH, Drafter, NoDrafter, Stopwatch
    from specrag.speculation.drafters.cross_vocabulary import CrossVocabulary
    from specrag.speculation.drafters.draft_model import DraftModel, check_same_vocabulary
    from specrag.speculation.drafters.eagle import PROMPT_ROWS, Eagle
    from specrag.speculation.drafters.pair import FirstNonEmpty, Weighed
    from specrag.speculation.drafters.prompt_lookup import PromptLookup
    from specrag.speculation.drafters.rag import RAG, Guessing, RagDrafter, TranslatedRagDrafter
    from specrag.speculation.drafters.recycling import Recycling
    from specrag.speculation.drafters.retrieval import EntropyTrigger, RetrievalDrafter, RetrievalSettings
    from specrag.speculation.drafters.suffix import (
        COPY_RATES,
        CORPUS,
        REFERENCE,
        SUFFIX,
        RequestText,
        SuffixDrafter,
        copy_grade,
    )
else:
    __getattr__ = lazy_names(__name__)

__all__ = [
    "ANY_DEPTH",
    "COPY_RATES",
    "CORPUS",
    "PROMPT_ROWS",
    "RAG",
    "REFERENCE",
    "SUFFIX",
    "CrossVocabulary",
    "DraftModel",
    "Drafter",
    "Eagle",
    "EntropyTrigger",
    "FirstNonEmpty",
    "Guessing",
    "NoDrafter",
    "PromptLookup",
    "RagDrafter",
    "Recycling",
    "RequestText",
    "RetrievalDrafter",
    "RetrievalSettings",
    "Stopwatch",
    "SuffixDrafter",
    "TranslatedRagDrafter",
    "Weighed",
    "check_same_vocabulary",
    "copy_grade",
]
