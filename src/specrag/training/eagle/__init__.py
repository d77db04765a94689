"""Training of EAGLE heads: ``specrag train eagle``."""

from typing import TYPE_CHECKING

from specrag.lazy import lazy_names

if TYPE_CHECKING:
    from specrag.training.eagle.objective import Measured
    from specrag.training.eagle.run import DataSettings, EagleRun, Outcome, TrainingSettings
    from specrag.training.eagle.train import train_eagle
else:
    __getattr__ = lazy_names(__name__)

__all__ = [
    "DataSettings",
    "EagleRun",
    "Measured",
    "Outcome",
    "TrainingSettings",
    "train_eagle",
]
