"""What a run of ``specrag train eagle`` is asked, what it tells meanwhile, and what it comes to."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from specrag.errors import InputError
from specrag.training.eagle_checkpoint import Measured, Progress
from specrag.training.eagle_measure import ChainResult
from specrag.training.eagle_settings import DataSettings, TrainingSettings


@dataclass(frozen=True, kw_only=True)
class EagleRun:
    """What to do.

    Args:
        data: files and folders of texts, of which prompts are made.
        prompts: files of texts that are prompts as they are.
        exclude: files whose text must not be trained on.
        out: the folder of the run.
        texts: settings of the data.
        training: settings of the training.
        fresh: train anew on the same answers.
        minutes: stop after so long, in good order; ``None`` for no limit.
        checkpoint_minutes: between checkpoints.
        measure: held-back prompts to answer with the finished head; 0 for none.
        command: that repeats the run, for the card.
    """

    data: tuple[Path, ...]
    prompts: tuple[Path, ...] = ()
    exclude: tuple[Path, ...] = ()
    out: Path
    texts: DataSettings = field(default_factory=DataSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    fresh: bool = False
    minutes: float | None = None
    checkpoint_minutes: float = 5.0
    measure: int = 0
    command: str = ""

    def __post_init__(self) -> None:
        if not self.data and not self.prompts:
            raise InputError("--data", [], "give at least one file of texts")
        for name, value in (("minutes", self.minutes), ("checkpoint_minutes", self.checkpoint_minutes)):
            if value is not None and not value > 0:
                raise InputError(name, value, "give minutes, more than 0")
        if self.measure < 0:
            raise InputError("measure", self.measure, "give a number of prompts, 0 for none")


@dataclass(frozen=True, slots=True)
class Status:
    """How far a run is.

    Attributes:
        stage: ``answers`` (tokens of them), ``features`` (texts) or ``training`` (tokens).
        done, total: of the stage.
        measured: the newest measurement, while training.
    """

    stage: str
    done: int
    total: int
    measured: Measured | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run has come to.

    Attributes:
        out: its folder.
        stage: that it has reached.
        ended: why the training is over; empty if it was stopped and goes on with the same command.
        progress: of the training; ``None`` before it.
        kept: the measurement of the weights that were written; ``None`` if there is no head yet.
        measured: in the engine; ``None`` where nothing was.
    """

    out: Path
    stage: str
    ended: str = ""
    progress: Progress | None = None
    kept: Measured | None = None
    measured: ChainResult | None = None
