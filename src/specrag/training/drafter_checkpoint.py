"""A tuning run in one file: what is trained, its moments, the best weights so far and how far it is.

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

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Drafted:
    """Drafts for held-back rows, written by the engine with what was trained merged in, and not kept to the form.

    Attributes:
        right, wrong, malformed: drafts.
    """

    right: int
    wrong: int
    malformed: int

    @property
    def count(self) -> int:
        """Drafts."""
        return self.right + self.wrong + self.malformed


@dataclass(frozen=True, slots=True)
class Measured:
    """One measurement.

    Attributes:
        step: of training; 0 is the untuned model.
        rows: trained on so far; those of later epochs count again.
        loss: mean training loss since the measurement before, nats a token; ``None`` at the first.
        held_back: loss on the held-back rows, nats a token.
        tokens_right: share of their tokens that are the most probable ones.
        drafted: drafts for some of them; ``None`` where none were written.
    """

    step: int
    rows: int
    loss: float | None
    held_back: float
    tokens_right: float
    drafted: Drafted | None


@dataclass(slots=True)
class Progress:
    """How far a run is.

    Attributes:
        step: steps done.
        rows: trained on so far.
        tokens: trained on so far, prompts included.
        seconds: of training and measuring, of all processes that worked at it.
        loss: sum of the steps' losses since the last measurement.
        since: steps since then.
        best: the lowest held-back loss.
        best_at: place in ``history`` of the measurement that found it.
        stale: measurements since one that lowered it enough.
        ended: why the run is over; empty while it is not.
        history: all measurements.
    """

    step: int = 0
    rows: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss: float = 0.0
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
        trained: the parameters that are trained, by name.
        optimizer: AdamW over them.
        best: their values where the held-back loss was lowest.
    """

    progress: Progress
    trained: Mapping[str, torch.nn.Parameter]
    optimizer: torch.optim.AdamW
    best: dict[str, torch.Tensor]

    def save(self, path: Path) -> None:
        """Replace the file.

        Raises:
            SpecragError: the disk refuses; the file is as it was.
        """
        tensors = {f"best.{name}": tensor for name, tensor in self.best.items()}
        for name, parameter in self.trained.items():
            tensors[f"weights.{name}"] = parameter.detach()
            for moment, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"{moment}.{name}"] = value
        with write_errors(path, "checkpoint"):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_tensors(path, tensors, {"progress": json.dumps(asdict(self.progress))})

    def load(self, path: Path) -> bool:
        """Take over what the file holds; whether there is one.

        Raises:
            SpecragError: it is damaged, or of other weights.
        """
        if not path.is_file():
            return False
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
                progress = _progress(json.loads(file.metadata()["progress"]))
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
            best = {name: tensors[f"best.{name}"] for name in names}
        except (SafetensorError, OSError, RuntimeError, ValueError, TypeError, KeyError) as error:
            reason = " ".join(str(error).split())[:160]
            raise SpecragError(
                f"checkpoint {str(path)!r} is damaged ({reason}): train anew with --fresh"
            ) from error
        self.best, self.progress = best, progress
        return True


def _progress(values: dict[str, object]) -> Progress:
    history = values.pop("history")
    assert isinstance(history, list)
    measured = [
        Measured(**{**each, "drafted": None if each["drafted"] is None else Drafted(**each["drafted"])})
        for each in history
    ]
    return Progress(**values, history=measured)  # type: ignore[arg-type]
