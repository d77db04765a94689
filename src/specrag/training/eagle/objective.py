"""What the training loop does for an EAGLE head: its plan, losses and measurements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specrag.models import HeadConfig
from specrag.training.checkpoint import Progress
from specrag.training.eagle.features import FeatureCache, make_batch, plan_epoch
from specrag.training.eagle.losses import Hits, TargetMatrices, count_hits, losses
from specrag.training.eagle.module import TrainableHead
from specrag.training.eagle.run import TrainingSettings
from specrag.training.loop import Plan, TrainingLoop

#: Guesses in each measured chain.
CHAIN = 4
_BETAS = (0.9, 0.95)
_LARGEST_GRADIENT = 0.5


@dataclass(frozen=True, slots=True)
class Measured:
    """One measurement while training.

    Attributes:
        step: of training.
        tokens: trained on so far; tokens of later epochs count again.
        regression, classification: mean training losses since the previous measurement.
        held_back_regression, held_back_classification: on the held-back answers, without noise.
        accuracy: see :class:`~specrag.training.eagle.losses.Hits`.
        mat: mean accepted tokens of chains on the held-back answers, if a round began at every token.
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
class HeadProgress(Progress[Measured]):
    """How far a run is.

    Attributes:
        regression, classification: sums of the training losses since the last measurement.
    """

    regression: float = 0.0
    classification: float = 0.0

    @staticmethod
    def measured_from_json(values: dict[str, Any]) -> Measured:
        """One measurement."""
        return Measured(**{**values, "accuracy": tuple(values["accuracy"])})


def new_head(config: HeadConfig, seed: int, device: torch.device) -> TrainableHead:
    """A head with random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return TrainableHead(config).to(device)


@dataclass(frozen=True, slots=True)
class Material:
    """What is trained on.

    Attributes:
        training, held_back: numbers of texts in the cache.
    """

    cache: FeatureCache
    target: TargetMatrices
    training: Sequence[int]
    held_back: Sequence[int]

    @property
    def tokens(self) -> int:
        """Tokens of an epoch."""
        return sum(len(self.cache.texts[number].tokens) for number in self.training)

    def batches(self, numbers: Sequence[int], most: int, seed: int | None) -> list[list[int]]:
        """These texts in batches of at most ``most`` tokens, in an order drawn from ``seed``, or in the order given."""
        sizes = [len(self.cache.texts[number].tokens) for number in numbers]
        return [[numbers[place] for place in batch] for batch in plan_epoch(sizes, most, seed)]


class HeadObjective:
    """An :class:`~specrag.training.loop.Objective`: a head learns to estimate its target's features."""

    def __init__(self, head: TrainableHead, material: Material, settings: TrainingSettings) -> None:
        self._head = head
        self._material = material
        self._settings = settings
        self._device = next(head.parameters()).device
        self._autocast = settings.precision == "bf16"
        self._all_tokens = settings.epochs * material.tokens

    @property
    def trained(self) -> Mapping[str, torch.nn.Parameter]:
        """All weights of the head."""
        return dict(self._head.named_parameters())

    def plan(self) -> Plan:
        """The run: each epoch has its own order."""
        settings, material = self._settings, self._material
        return Plan(
            [
                material.batches(material.training, settings.batch_tokens, settings.seed * 1009 + epoch)
                for epoch in range(settings.epochs)
            ],
            evaluations=settings.evaluations,
            learning_rate=settings.learning_rate,
            largest_gradient=_LARGEST_GRADIENT,
            patience=settings.patience,
        )

    def done(self, progress: HeadProgress) -> float:
        """The share of the tokens that is done."""
        return progress.tokens / self._all_tokens

    def learn(self, batch: Sequence[int], progress: HeadProgress) -> float:
        """See :class:`~specrag.training.loop.Objective`; the noise is a function of the seed and the step."""
        settings = self._settings
        made = make_batch(self._material.cache, batch, self._device)
        draw = torch.Generator().manual_seed(settings.seed * 1_000_003 + progress.step)
        noise = (2 * torch.rand(made.features.shape, generator=draw) - 1) * settings.noise
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._autocast):
            found = losses(
                self._head,
                self._material.target,
                made,
                steps=settings.unroll,
                noise=noise.to(self._device),
            )
        total = found.total(settings.classification_weight)
        total.backward()
        progress.tokens += sum(made.lengths) + len(made.lengths)
        progress.regression += float(found.regression.detach())
        progress.classification += float(found.classification.detach())
        return float(total.detach())

    def measure(self, progress: HeadProgress) -> float:
        settings, material = self._settings, self._material
        hits = Hits(0, [0] * CHAIN)
        regression = classification = 0.0
        rows = 0
        for numbers in material.batches(material.held_back, settings.batch_tokens, None):
            batch = make_batch(material.cache, numbers, self._device)
            with torch.autocast(self._device.type, torch.bfloat16, enabled=self._autocast):
                found = losses(self._head, material.target, batch, steps=settings.unroll)
                hits.add(count_hits(self._head, material.target, batch, CHAIN))
            regression += float(found.regression) * found.rows
            classification += float(found.classification) * found.rows
            rows += found.rows
        measured = Measured(
            step=progress.step,
            tokens=progress.tokens,
            regression=progress.regression / progress.since,
            classification=progress.classification / progress.since,
            held_back_regression=regression / rows,
            held_back_classification=classification / rows,
            accuracy=tuple(hits.accuracy),
            mat=hits.mean_accepted_tokens,
        )
        progress.history.append(measured)
        progress.regression = progress.classification = 0.0
        return (
            measured.held_back_regression + settings.classification_weight * measured.held_back_classification
        )


def head_loop(
    objective: HeadObjective, path: Path, *, clock: Callable[[], float], checkpoint_seconds: float
) -> TrainingLoop[HeadProgress]:
    """The loop that trains a head, with its checkpoint at ``path``."""
    return TrainingLoop(
        objective,
        objective.plan(),
        HeadProgress(),
        path,
        clock=clock,
        checkpoint_seconds=checkpoint_seconds,
        adamw={"betas": _BETAS},
    )
