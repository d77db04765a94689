"""Sentence encoders and rerankers."""

from typing import TYPE_CHECKING

from specrag.lazy import lazy_names

if TYPE_CHECKING:
    from specrag.retrieval.encoder.encoder import DEFAULT_ENCODER, Encoder, find_encoder, load_encoder
    from specrag.retrieval.encoder.loaded import Encoders
    from specrag.retrieval.encoder.question_vectors import HasEncoder, QuestionVectors
    from specrag.retrieval.encoder.reranker import Reranker, checked_reranker, load_reranker
    from specrag.retrieval.encoder.settings import EncoderSettings, checksums
else:
    __getattr__ = lazy_names(__name__)

__all__ = [
    "DEFAULT_ENCODER",
    "Encoder",
    "EncoderSettings",
    "Encoders",
    "HasEncoder",
    "QuestionVectors",
    "Reranker",
    "checked_reranker",
    "checksums",
    "find_encoder",
    "load_encoder",
    "load_reranker",
]
