"""A training run in one file: weights, their moments, the best weights so far and how far it is.

Safetensors with a JSON text in the header, so that resuming unpickles nothing; replaced as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from specrag.errors import SpecragError
from specrag.training.files import replace_tensors, write_errors


@dataclass(frozen=True, slots=True)
class Measured:
    """One measurement while training.

    Attributes:
        step: of training.
        tokens: trained on so far; those of later epochs count again.
        regression, classification: mean training losses since the measurement before.
        held_back_regression, held_back_classification: on the held-back answers, without noise.
        accuracy: see :class:`~specrag.training.eagle_losses.Hits`.
        mat: of chains on the held-back answers if a round began at every token.
    """

    step: int
    tokens: int
    regression: float
    classification: float
    held_back_regression: float
    held_back_classification: float
    accuracy: tuple[float, ...]
    mat: float


@dataclass(slots=True)
class Progress:
    """How far a run is.

    Attributes:
        step: steps done.
        tokens: trained on so far.
        epoch, batch: of the next step.
        regression, classification: sums of the training losses since the last measurement.
        since: steps since then.
        best: the lowest held-back loss.
        best_at: place in ``history`` of the measurement that found it.
        stale: measurements since one that lowered it enough.
        ended: why the run is over; empty while it is not.
        history: all measurements.
    """

    step: int = 0
    tokens: int = 0
    epoch: int = 0
    batch: int = 0
    regression: float = 0.0
    classification: float = 0.0
    since: int = 0
    best: float | None = None
    best_at: int = -1
    stale: int = 0
    ended: str = ""
    history: list[Measured] = field(default_factory=list)


@dataclass(slots=True)
class Checkpoint:
    """What a run goes on from.

    Attributes:
        weights, best: the state of the module, now and where it was best.
        optimizer: AdamW over the module's parameters, in their order.
    """

    progress: Progress
    module: torch.nn.Module
    optimizer: torch.optim.AdamW
    best: dict[str, torch.Tensor]

    def save(self, path: Path) -> None:
        """Replace the file.

        Raises:
            SpecragError: the disk refuses; the file is as it was.
        """
        tensors = {f"best.{name}": tensor for name, tensor in self.best.items()}
        for name, parameter in self.module.named_parameters():
            tensors[f"weights.{name}"] = parameter.detach()
            for moment, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"{moment}.{name}"] = value
        with write_errors(path, "checkpoint"):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_tensors(path, tensors, {"progress": json.dumps(asdict(self.progress))})

    def load(self, path: Path) -> bool:
        """Take over what the file holds; whether there is one.

        Raises:
            SpecragError: it is damaged, or of another head.
        """
        if not path.is_file():
            return False
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
                self.progress = _progress(json.loads(file.metadata()["progress"]))
            self.module.load_state_dict(_part(tensors, "weights"))
            self.best = _part(tensors, "best")
            moments = {name: _part(tensors, name) for name in ("step", "exp_avg", "exp_avg_sq")}
            for name, parameter in self.module.named_parameters():
                self.optimizer.state[parameter] = {
                    moment: values[name].to(parameter.device if values[name].dim() else "cpu")
                    for moment, values in moments.items()
                    if name in values
                }
        except (SafetensorError, OSError, RuntimeError, ValueError, TypeError, KeyError) as error:
            reason = " ".join(str(error).split())[:160]
            raise SpecragError(
                f"checkpoint {str(path)!r} is damaged ({reason}): train anew with --fresh"
            ) from error
        return True


def _part(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    start = f"{prefix}."
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}


def _progress(values: dict[str, object]) -> Progress:
    history = values.pop("history")
    assert isinstance(history, list)
    measured = [Measured(**{**each, "accuracy": tuple(each["accuracy"])}) for each in history]
    return Progress(**values, history=measured)  # type: ignore[arg-type]
