"""What a head is trained on and how, and the check that a resumed run is the same run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specrag.errors import InputError
from specrag.training.files import read_json, replace_json, write_errors

#: In what the head computes while it is trained; its weights and their moments are always fp32.
PRECISIONS = ("bf16", "fp32")


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """The text that a head learns from: prompts, and the target's own answers to them.

    Args:
        tokens: answers are made until they hold this many tokens.
        answer_tokens: the longest answer.
        temperature: of every second answer; the others are greedy. 0: all are.
        length: tokens of the longest sequence, prompt and answer; what is longer is cut.
        held_back: conversations with greedy answers that are not trained on but measured: the first ones, which
            stay the same when ``tokens`` grows.
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
        _at_least(self, 1, "tokens", "answer_tokens", "held_back")
        _at_least(self, 0, "temperature", "seed")
        _at_least(self, self.answer_tokens + 16, "length")


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """How a head is trained. The defaults of loss, noise, betas and clipping are the paper's (EAGLE, section 4).

    Args:
        draft_vocabulary: how many of the answers' most frequent tokens the head may propose; 0 for all.
        epochs: passes over the data; training may end before.
        batch_tokens: tokens of a step.
        learning_rate: the highest; it rises over the first 3 % of training and falls to a tenth along a cosine.
        noise: features are read with noise, uniform between minus and plus this.
        classification_weight: of the cross-entropy, beside 1 for the features' Smooth-L1 loss.
        unroll: 1 trains on the target's features, as the paper does. More also trains this many steps deep on the
            head's own estimates, as drafting reads them (HASS, Zhang et al. 2024), at that many times the cost.
        precision: one of :data:`PRECISIONS`.
        evaluations: measurements on the held-back answers in an epoch.
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
        _at_least(self, 1, "epochs", "batch_tokens", "unroll", "evaluations", "patience")
        _at_least(self, 0, "draft_vocabulary", "noise", "classification_weight", "seed")
        if not 0 < self.learning_rate <= 1:
            raise InputError("learning_rate", self.learning_rate, "give a number above 0 and at most 1")
        if self.precision not in PRECISIONS:
            raise InputError("precision", self.precision, f"take one of {', '.join(PRECISIONS)}")


def _at_least(settings: DataSettings | TrainingSettings, least: int, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if not least <= value < float("inf"):
            raise InputError(name, value, f"give at least {least}")


def check_same(path: Path, mine: Mapping[str, Any], remedy: str) -> None:
    """Note the settings of a run, or make sure that they are those noted before.

    Args:
        path: the note.
        remedy: what else to do than to repeat the settings noted.

    Raises:
        InputError: they differ; the message says in what.
        SpecragError: the note cannot be read or written.
    """
    noted = read_json(path)
    if noted is None:
        with write_errors(path, "settings"):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_json(path, mine)
        return
    differences = [
        f"{name} {noted.get(name)!r} there, {mine.get(name)!r} here"
        for name in sorted(noted.keys() | mine.keys())
        if noted.get(name) != mine.get(name)
    ]
    if differences:
        raise InputError(
            "--out", str(path.parent), f"it was begun with {'; '.join(differences)}: repeat that, or {remedy}"
        )


def as_json(settings: DataSettings | TrainingSettings) -> dict[str, Any]:
    """The settings as an object."""
    return asdict(settings)
