"""The training loop.

It is our own because the usual loops resume through an unpickler, even if a restricted one, and write a checkpoint in
several steps, so that a kill can leave it incomplete (docs/decisions/0005). Everything random is a function of the seed
and the step, so a resumed run equals one that was never stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch

from specrag.errors import SpecragError
from specrag.training.checkpoint import Checkpoint, P, Progress

_WARM_UP, _LAST_RATE = 0.03, 0.1  # shares of the whole run and of the highest learning rate
P_contra = TypeVar("P_contra", bound=Progress[Any], contravariant=True)


def learning_rate(highest: float, done: float) -> float:
    """The learning rate when the share ``done`` of the run is done: a linear rise, then a cosine to a tenth."""
    if done < _WARM_UP:
        return highest * done / _WARM_UP
    wave = (1 + math.cos(math.pi * min((done - _WARM_UP) / (1 - _WARM_UP), 1.0))) / 2
    return highest * (_LAST_RATE + (1 - _LAST_RATE) * wave)


class Objective(Protocol[P_contra]):
    """What a loop trains, and on what."""

    @property
    def trained(self) -> Mapping[str, torch.nn.Parameter]:
        """The parameters that are trained, by name."""

    def done(self, progress: P_contra) -> float:
        """The share of the run that counts for the next step's learning rate."""

    def learn(self, batch: Sequence[int], progress: P_contra) -> float:
        """Accumulate a step's gradients, record its losses in ``progress``, and return its loss."""

    def measure(self, progress: P_contra) -> float:
        """Add a measurement on the held-back data to ``progress``, and return the held-back loss."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run does.

    Attributes:
        epochs: for each epoch its steps, and for each step the numbers of the items that it reads.
        evaluations: measurements per epoch.
        learning_rate: the highest.
        largest_gradient: norm to which gradients are clipped.
        patience: end when this many measurements in a row have not lowered the held-back loss by 0.1 %.
        untrained: also measure before the first step.
    """

    epochs: Sequence[Sequence[Sequence[int]]]
    evaluations: int
    learning_rate: float
    largest_gradient: float
    patience: int
    untrained: bool = False

    def steps(self) -> list[Sequence[int]]:
        """The steps of all epochs."""
        return [step for epoch in self.epochs for step in epoch]

    def measured(self) -> set[int]:
        """Steps, counted from 1, that are followed by a measurement: spread evenly over each epoch."""
        found: set[int] = set()
        before = 0
        for epoch in self.epochs:
            count, size = self.evaluations, len(epoch)
            found.update(
                before + place
                for place in range(1, size + 1)
                if place * count // size > (place - 1) * count // size
            )
            before += size
        return found


class TrainingLoop(Generic[P]):
    """Trains until all epochs are done or the held-back loss stops falling.

    Args:
        objective: if there is a checkpoint, its parameters get the checkpoint's values.
        progress: of a run that begins.
        path: the checkpoint.
        clock: seconds.
        checkpoint_seconds: between checkpoints.
        adamw: options of the optimizer besides the learning rate.
    """

    def __init__(
        self,
        objective: Objective[P],
        plan: Plan,
        progress: P,
        path: Path,
        *,
        clock: Callable[[], float],
        checkpoint_seconds: float,
        adamw: Mapping[str, Any],
    ) -> None:
        self.objective = objective
        self._plan = plan
        self._steps = plan.steps()
        self._measured = plan.measured()
        self._path = path
        self._clock = clock
        self._checkpoint_seconds = checkpoint_seconds
        trained = objective.trained
        optimizer = torch.optim.AdamW(list(trained.values()), lr=plan.learning_rate, **adamw)
        self._state = Checkpoint(progress, trained, optimizer)
        self._state.load(path)

    @property
    def progress(self) -> P:
        """How far the run is."""
        return self._state.progress

    @property
    def best(self) -> dict[str, torch.Tensor]:
        """The weights of the lowest held-back loss; empty before the first measurement."""
        return self._state.best

    @property
    def total(self) -> int:
        """Steps of the whole run."""
        return len(self._steps)

    def run(self, proceed: Callable[[P], bool]) -> None:
        """Train until the run is over; :attr:`progress` says why.

        Args:
            proceed: called with the progress after each step; returns whether to go on. If not, training stops
                after writing the checkpoint.

        Raises:
            SpecragError: a checkpoint cannot be written, or the loss is no longer finite.
        """
        progress = self.progress
        if progress.ended:
            return
        saved = counted = self._clock()
        if self._plan.untrained and not progress.history:
            self._measure()
            proceed(progress)
        while not progress.ended and progress.step < self.total:
            self._step()
            now = self._clock()
            progress.seconds += now - counted
            counted = now
            if not proceed(progress):
                break
            if now - saved >= self._checkpoint_seconds:
                self._state.save(self._path)
                saved = now
        if not progress.ended and progress.step == self.total:
            progress.ended = f"all {len(self._plan.epochs)} epochs are done"
        progress.seconds += self._clock() - counted
        self._state.save(self._path)

    def _step(self) -> None:
        progress, optimizer = self.progress, self._state.optimizer
        rate = learning_rate(self._plan.learning_rate, self.objective.done(progress))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad(set_to_none=True)
        loss = self.objective.learn(self._steps[progress.step], progress)
        if not math.isfinite(loss):
            raise SpecragError(
                f"training: the loss of step {progress.step + 1:,} is {loss}: train anew with --fresh "
                "and a lower --learning-rate; the last checkpoint is intact"
            )
        torch.nn.utils.clip_grad_norm_(self._parameters(), self._plan.largest_gradient)
        optimizer.step()
        progress.step += 1
        progress.since += 1
        if progress.step in self._measured:
            self._measure()

    def _parameters(self) -> Iterable[torch.Tensor]:
        return self._state.trained.values()

    @torch.no_grad()
    def _measure(self) -> None:
        """Measure, and keep a copy of the weights if they are the best so far."""
        loss = self.objective.measure(self.progress)
        self.progress.since = 0
        if self.progress.judge(loss, self._plan.patience):
            self._state.best = {name: value.detach().clone() for name, value in self._state.trained.items()}
