"""Training of RAG drafters: ``specrag train drafter``."""

from typing import TYPE_CHECKING

from specrag.lazy import lazy_names

if TYPE_CHECKING:
    from specrag.training.drafter.objective import Drafted, Measured
    from specrag.training.drafter.rows import read_rows, without_evaluation
    from specrag.training.drafter.run import DrafterRun, Outcome, TuningSettings
    from specrag.training.drafter.train import train_drafter
else:
    __getattr__ = lazy_names(__name__)

__all__ = [
    "Drafted",
    "DrafterRun",
    "Measured",
    "Outcome",
    "TuningSettings",
    "read_rows",
    "train_drafter",
    "without_evaluation",
]
