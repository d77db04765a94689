"""Settings of a run of ``specrag train drafter``, and its outcome."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from specrag.errors import InputError
from specrag.methods.speculative_rag.drafting import FORMS, Form
from specrag.training.run import Run, check_least, check_precision

if TYPE_CHECKING:
    from specrag.training.drafter.objective import DrafterProgress, Measured

#: The default highest learning rate, for an adapter and for all weights.
ADAPTER_RATE, FULL_RATE = 5e-4, 2e-5
#: Tokens in memory at a time on a GPU, by default.
GPU_TOKENS = 16_384


@dataclass(frozen=True, kw_only=True)
class TuningSettings:
    """What a drafter learns and how.

    Args:
        rows: train on this many, the first in an order that depends only on ``seed``, so that a smaller number gives a
            subset of a larger one; 0 for all.
        held_back: rows that are measured on, the same for every ``rows``; whole questions are held back.
        length: tokens of the longest sequence, prompt and draft; passages are cut until they fit, as in drafting.
        rationales: train on rationale and answer; ``False`` trains on the answer after a dash in place of the
            rationale, so that drafts keep to the form (Speculative RAG, Table 8).
        form: of drafts for questions: the paper's, or ``cited``, where the rationale is the cited sentence and a row
            whose passages do not hold the answer teaches the drafter to say so. Choices and claims always have the
            paper's form.
        full: train all weights instead of an adapter.
        rank, alpha: of the adapter: r and alpha of Hu et al. 2021 ("LoRA"), at every linear layer.
        epochs: times that the rows are read; training may end earlier.
        batch_rows: rows of a step.
        batch_tokens: tokens, padding included, in memory at a time; a step is split into as many parts as needed. 0 for
            one row at a time on a CPU, which is fastest there, and :data:`GPU_TOKENS` on a GPU.
        learning_rate: the highest; it rises over the first 3 % of the steps and falls to a tenth along a cosine. By
            default :data:`ADAPTER_RATE`, or :data:`FULL_RATE` if all weights are trained.
        precision: of the computation, one of :data:`~specrag.training.run.PRECISIONS`. Trained weights are
            always fp32; in bf16 the weights under an adapter are bf16 too.
        evaluations: measurements on the held-back rows per epoch.
        drafts: held-back rows for which each measurement also writes drafts; 0 for none.
        patience: end when this many measurements in a row have not lowered the held-back loss by 0.1 %.
        seed: of the adapter's initial weights, of what is held back and of the order.

    Raises:
        InputError: a value is out of range.
    """

    rows: int = 0
    held_back: int = 64
    length: int = 1024
    rationales: bool = True
    form: Form = "paper"
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
        check_least(self, 1, "held_back", "rank", "epochs", "batch_rows", "evaluations", "patience")
        check_least(self, 0, "rows", "batch_tokens", "drafts", "seed")
        check_least(self, 128, "length")
        for name in ("alpha", "learning_rate"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise InputError(name, value, "give a number above 0")
        check_precision(self.precision)
        if self.form not in FORMS:
            raise InputError("form", self.form, f"take one of {', '.join(FORMS)}")

    @property
    def highest_rate(self) -> float:
        """The highest learning rate."""
        return self.learning_rate or (FULL_RATE if self.full else ADAPTER_RATE)


@dataclass(frozen=True, kw_only=True)
class DrafterRun(Run):
    """Arguments of a run. ``data`` are files of rows with rationales, ``exclude`` files of questions.

    Args:
        model: the base model, as :func:`specrag.load` takes it.
        settings: of the training.
        device: a torch device; by default the first GPU if there is one, else the CPU.

    Raises:
        InputError: there are no files, or a value is out of range.
    """

    model: str
    settings: TuningSettings = field(default_factory=TuningSettings)
    device: str | None = None

    def __post_init__(self) -> None:
        if not self.data:
            raise InputError("data", [], "give at least one file of rows")
        super().__post_init__()


@dataclass(frozen=True, slots=True)
class Outcome:
    """The state of a run when it returns.

    Attributes:
        out: its folder.
        progress: how far it is; its ``ended`` is empty if the run was stopped and can be resumed by the same
            command.
        kept: the measurement of the weights that were written.
        untuned: the measurement before the first step.
    """

    out: Path
    progress: DrafterProgress
    kept: Measured
    untuned: Measured
