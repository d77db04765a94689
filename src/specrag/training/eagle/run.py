"""Settings of a run of ``specrag train eagle``, and its outcome."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from specrag.errors import InputError
from specrag.training.run import Run, check_least, check_precision

if TYPE_CHECKING:
    from specrag.training.eagle.measure import ChainResult
    from specrag.training.eagle.objective import HeadProgress, Measured


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """The text that a head learns from: prompts, and the target's own answers to them.

    Args:
        tokens: answers are made until they hold this many tokens.
        answer_tokens: tokens of the longest answer.
        temperature: of every second answer; the others are greedy. 0 makes all greedy.
        length: tokens of the longest sequence, prompt and answer; longer ones are cut.
        held_back: conversations with greedy answers that are measured on, not trained on: the first ones, so that
            they stay the same when ``tokens`` grows.
        seed: of the prompts, their order, and sampled answers.

    Raises:
        InputError: a value is out of range.
    """

    tokens: int = 500_000
    answer_tokens: int = 192
    temperature: float = 0.7
    length: int = 1024
    held_back: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        check_least(self, 1, "tokens", "answer_tokens", "held_back")
        check_least(self, 0, "temperature", "seed")
        check_least(self, self.answer_tokens + 16, "length")


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """How a head is trained. The defaults of loss, noise, betas and clipping are the paper's (EAGLE, section 4).

    Args:
        draft_vocabulary: how many of the answers' most frequent tokens the head may propose; 0 for all.
        epochs: passes over the data; training may end earlier.
        batch_tokens: tokens of a step.
        learning_rate: the highest; it rises over the first 3 % of training and falls to a tenth along a cosine.
        noise: noise added to the features that are read, uniform between minus and plus this.
        classification_weight: of the cross-entropy; the features' Smooth-L1 loss has weight 1.
        unroll: 1 trains on the target's features, as the paper does. A larger number also trains this many steps deep
            on the head's own estimates, as drafting reads them (HASS, Zhang et al. 2024), at that many times the cost.
        precision: one of :data:`~specrag.training.run.PRECISIONS`.
        evaluations: measurements on the held-back answers per epoch.
        patience: end when this many measurements in a row have not lowered the held-back loss by 0.1 %.
        seed: of the weights, the order and the noise.

    Raises:
        InputError: a value is out of range.
    """

    draft_vocabulary: int = 8192
    epochs: int = 10
    batch_tokens: int = 4096
    learning_rate: float = 1e-3
    noise: float = 0.1
    classification_weight: float = 0.1
    unroll: int = 1
    precision: str = "bf16"
    evaluations: int = 2
    patience: int = 6
    seed: int = 0

    def __post_init__(self) -> None:
        check_least(self, 1, "epochs", "batch_tokens", "unroll", "evaluations", "patience")
        check_least(self, 0, "draft_vocabulary", "noise", "classification_weight", "seed")
        if not 0 < self.learning_rate <= 1:
            raise InputError("learning_rate", self.learning_rate, "give a number above 0 and at most 1")
        check_precision(self.precision)


@dataclass(frozen=True, kw_only=True)
class EagleRun(Run):
    """Arguments of a run. ``data`` are files and folders of texts, from which prompts are made.

    Args:
        prompts: files of texts used as prompts unchanged.
        texts: settings of the data.
        training: settings of the training; ``fresh`` starts training over on the same answers.
        measure: held-back prompts to answer with the finished head; 0 for none.

    Raises:
        InputError: there are no files, or a value is out of range.
    """

    prompts: tuple[Path, ...] = ()
    texts: DataSettings = field(default_factory=DataSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    measure: int = 0

    def __post_init__(self) -> None:
        if not self.data and not self.prompts:
            raise InputError("--data", [], "give at least one file of texts")
        super().__post_init__()
        if self.measure < 0:
            raise InputError("measure", self.measure, "give a number of prompts, 0 for none")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The state of a run when it returns.

    Attributes:
        out: its folder.
        stage: the stage that it has reached: ``answers``, ``features`` or ``training``.
        ended: why the training is over; empty if it was stopped and can be resumed by the same command.
        progress: of the training; ``None`` before it.
        kept: the measurement of the weights that were written; ``None`` if there is no head yet.
        measured: the measurement in the engine; ``None`` if there was none.
    """

    out: Path
    stage: str
    ended: str = ""
    progress: HeadProgress | None = None
    kept: Measured | None = None
    measured: ChainResult | None = None
