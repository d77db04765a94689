"""How a drafter is tuned, what a run of ``specrag train drafter`` is asked, and what it comes to."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from specrag.errors import InputError
from specrag.training.eagle_settings import PRECISIONS

if TYPE_CHECKING:
    from specrag.training.drafter_checkpoint import Measured, Progress

#: The highest learning rate where none is given, of an adapter and of all weights.
ADAPTER_RATE, FULL_RATE = 5e-4, 2e-5
#: Tokens in memory at a time on a GPU.
GPU_TOKENS = 16_384


@dataclass(frozen=True, kw_only=True)
class TuningSettings:
    """What a drafter learns and how.

    Args:
        rows: train on this many, the first in an order that only ``seed`` decides, so that a smaller number is a part
            of a larger one; 0 for all.
        held_back: rows that are measured on, the same for every ``rows``; whole questions are held back.
        length: tokens of the longest sequence, prompt and draft; passages are cut until they fit, as in drafting.
        rationales: train on rationale and answer; ``False`` trains on the answer behind a dash that stands where the
            rationale would, so that drafts keep to the form (Speculative RAG, Table 8).
        full: train all weights in place of an adapter.
        rank, alpha: of the adapter, r and alpha of Hu et al. 2021 ("LoRA"), at every linear layer.
        epochs: times that the rows are read; training may end before.
        batch_rows: rows of a step.
        batch_tokens: tokens, padding included, that are in memory at a time; a step is as many parts as it takes. 0 for
            one row at a time on a CPU, which is fastest there, and :data:`GPU_TOKENS` on a GPU.
        learning_rate: the highest; it rises over the first 3 % of the steps and falls to a tenth along a cosine. By
            default :data:`ADAPTER_RATE`, or :data:`FULL_RATE` where all weights are trained.
        precision: in what is computed, one of :data:`~specrag.training.eagle_settings.PRECISIONS`. What is trained is
            always fp32; in bf16 the weights under an adapter are bf16 too.
        evaluations: measurements on the held-back rows in an epoch.
        drafts: held-back rows that are also drafted for in each measurement; 0 for none.
        patience: end when so many measurements in a row have not lowered the held-back loss by 0.1 %.
        seed: of the adapter's first weights, of what is held back and of the order.

    Raises:
        InputError: a value is out of range.
    """

    rows: int = 0
    held_back: int = 64
    length: int = 1024
    rationales: bool = True
    full: bool = False
    rank: int = 16
    alpha: float = 32.0
    epochs: int = 3
    batch_rows: int = 16
    batch_tokens: int = 0
    learning_rate: float | None = None
    precision: str = "bf16"
    evaluations: int = 2
    drafts: int = 32
    patience: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        _at_least(self, 1, "held_back", "rank", "epochs", "batch_rows", "evaluations", "patience")
        _at_least(self, 0, "rows", "batch_tokens", "drafts", "seed")
        _at_least(self, 128, "length")
        for name in ("alpha", "learning_rate"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise InputError(name, value, "give a number above 0")
        if self.precision not in PRECISIONS:
            raise InputError("precision", self.precision, f"take one of {', '.join(PRECISIONS)}")

    @property
    def highest_rate(self) -> float:
        """The highest learning rate."""
        return self.learning_rate or (FULL_RATE if self.full else ADAPTER_RATE)


@dataclass(frozen=True, kw_only=True)
class DrafterRun:
    """What to do.

    Args:
        model: the base model, as :func:`specrag.load` takes it.
        data: files of rows with rationales.
        exclude: files of questions that must not be trained on, such as a benchmark's.
        out: the folder of the run.
        settings: of the training.
        device: a torch device; by default the first GPU if there is one, else the CPU.
        fresh: train anew.
        minutes: stop after so long, in good order; ``None`` for no limit.
        checkpoint_minutes: between checkpoints.
        command: that repeats the run, for the card.

    Raises:
        InputError: there are no files, or a value is out of range.
    """

    model: str
    data: tuple[Path, ...]
    exclude: tuple[Path, ...] = ()
    out: Path
    settings: TuningSettings = field(default_factory=TuningSettings)
    device: str | None = None
    fresh: bool = False
    minutes: float | None = None
    checkpoint_minutes: float = 5.0
    command: str = ""

    def __post_init__(self) -> None:
        if not self.data:
            raise InputError("data", [], "give at least one file of rows")
        for name, value in (("minutes", self.minutes), ("checkpoint_minutes", self.checkpoint_minutes)):
            if value is not None and not value > 0:
                raise InputError(name, value, "give minutes, more than 0")


@dataclass(frozen=True, slots=True)
class Status:
    """How far a run is.

    Attributes:
        done, total: steps.
        measured: the newest measurement; ``None`` before the first.
    """

    done: int
    total: int
    measured: Measured | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run has come to.

    Attributes:
        out: its folder.
        progress: how far it is; :attr:`~specrag.training.drafter_checkpoint.Progress.ended` is empty if the run was
            stopped and goes on with the same command.
        kept: the measurement of the weights that were written.
        untuned: the measurement before the first step.
    """

    out: Path
    progress: Progress
    kept: Measured
    untuned: Measured


def _at_least(settings: TuningSettings, least: int, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if not least <= value < float("inf"):
            raise InputError(name, value, f"give at least {least}")
