"""A training run in one file: trained weights, AdamW's moments, the best weights so far and the run's progress.

The file is safetensors with JSON in the header, so that resuming unpickles nothing; it is replaced as a whole.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from specrag.errors import SpecragError
from specrag.training.files import replace_tensors, write_errors

M = TypeVar("M")
P = TypeVar("P", bound="Progress[Any]")

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")
_ENOUGH = 0.999  # share of the best held-back loss below which a loss counts as an improvement


@dataclass(slots=True)
class Progress(ABC, Generic[M]):
    """How far a run is.

    Attributes:
        step: steps done.
        tokens: trained on so far, prompts included; tokens of later epochs count again.
        seconds: of training and measuring, over all processes that worked on the run.
        since: steps since the last measurement.
        best: the lowest held-back loss.
        best_at: index in ``history`` of the measurement that found it.
        stale: measurements since one that lowered it enough.
        ended: why the run is over; empty while it is not.
        history: all measurements.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    since: int = 0
    best: float | None = None
    best_at: int = -1
    stale: int = 0
    ended: str = ""
    history: list[M] = field(default_factory=list)

    @property
    def kept(self) -> M | None:
        """The measurement of the best weights; ``None`` before the first."""
        return self.history[self.best_at] if self.history else None

    def judge(self, loss: float, patience: int) -> bool:
        """Record the held-back loss of the newest measurement; returns whether it is the lowest.

        Args:
            patience: end the run after this many measurements in a row without a lower loss.
        """
        before = self.best
        self.stale = 0 if before is None or loss < _ENOUGH * before else self.stale + 1
        is_best = before is None or loss < before
        if is_best:
            self.best, self.best_at = loss, len(self.history) - 1
        if self.stale >= patience:
            self.ended = f"{self.stale} measurements have not lowered the held-back loss"
        return is_best

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """The progress that a checkpoint holds.

        Raises:
            TypeError, KeyError: the values are not a progress.
        """
        history = [cls.measured_from_json(each) for each in values.pop("history")]
        return cls(**values, history=history)

    @staticmethod
    @abstractmethod
    def measured_from_json(values: dict[str, Any]) -> M:
        """One measurement."""


@dataclass(slots=True)
class Checkpoint(Generic[P]):
    """What a run resumes from.

    Attributes:
        trained: the parameters that are trained, by name.
        optimizer: AdamW over them.
        best: their values where the held-back loss was lowest; empty before the first measurement.
    """

    progress: P
    trained: Mapping[str, torch.nn.Parameter]
    optimizer: torch.optim.AdamW
    best: dict[str, torch.Tensor] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Replace the file.

        Raises:
            SpecragError: the disk refuses; the old file is intact.
        """
        tensors = {f"best.{name}": tensor for name, tensor in self.best.items()}
        for name, parameter in self.trained.items():
            tensors[f"weights.{name}"] = parameter.detach()
            for moment, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"{moment}.{name}"] = value
        with write_errors(path, "checkpoint"):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_tensors(path, tensors, {"progress": json.dumps(asdict(self.progress))})

    def load(self, path: Path) -> None:
        """Restore from the file, if there is one.

        Raises:
            SpecragError: it is damaged, or belongs to other weights.
        """
        if not path.is_file():
            return
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
                progress = type(self.progress).from_json(json.loads(file.metadata()["progress"]))
            for name, parameter in self.trained.items():
                with torch.no_grad():
                    parameter.copy_(tensors[f"weights.{name}"])
                moments = {each: tensors.get(f"{each}.{name}") for each in _MOMENTS}
                self.optimizer.state[parameter] = {
                    each: value.to(parameter.device if value.dim() else "cpu")
                    for each, value in moments.items()
                    if value is not None
                }
            names = self.trained if any(name.startswith("best.") for name in tensors) else ()
            self.best = {name: tensors[f"best.{name}"] for name in names}
        except (SafetensorError, OSError, RuntimeError, ValueError, TypeError, KeyError) as error:
            reason = " ".join(str(error).split())[:160]
            raise SpecragError(
                f"checkpoint {str(path)!r} is damaged ({reason}): train anew with --fresh"
            ) from error
        self.progress = progress
