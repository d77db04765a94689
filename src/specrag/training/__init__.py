"""Training of EAGLE heads and RAG drafters."""

from typing import TYPE_CHECKING

from specrag.lazy import lazy_names

if TYPE_CHECKING:
    from specrag.training.exclusion import EvaluationRows
    from specrag.training.run import Status
else:
    __getattr__ = lazy_names(__name__)

__all__ = [
    "EvaluationRows",
    "Status",
]
