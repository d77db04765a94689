"""The training loop.

It is written out because the usual ones resume through an unpickler, even if a restricted one, and write a
checkpoint in several steps that a kill can tear apart (docs/decisions/0005). Everything random is a function of
the seed and the step, so that a resumed run is the run that was never stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from specrag.models.eagle_files import HeadConfig
from specrag.training.eagle_batch import Batch, make_batch, plan_epoch
from specrag.training.eagle_checkpoint import Checkpoint, Measured, Progress
from specrag.training.eagle_features import FeatureCache
from specrag.training.eagle_losses import Hits, count_hits, losses
from specrag.training.eagle_module import TrainableHead
from specrag.training.eagle_settings import TrainingSettings
from specrag.training.eagle_target import TargetMatrices

#: Guesses of the chains that are measured.
CHAIN = 4
_BETAS = (0.9, 0.95)
_LARGEST_GRADIENT = 0.5
_WARM_UP, _LAST_RATE = 0.03, 0.1  # shares of all tokens and of the highest learning rate
_ENOUGH = 0.999  # of the best held-back loss: less than this lowers it enough


def learning_rate(settings: TrainingSettings, done: float) -> float:
    """The learning rate when this share of the tokens is done: a linear rise, then a cosine."""
    if done < _WARM_UP:
        return settings.learning_rate * done / _WARM_UP
    wave = (1 + math.cos(math.pi * min((done - _WARM_UP) / (1 - _WARM_UP), 1.0))) / 2
    return settings.learning_rate * (_LAST_RATE + (1 - _LAST_RATE) * wave)


def new_head(config: HeadConfig, seed: int, device: torch.device) -> TrainableHead:
    """A head of random weights."""
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
        """Of an epoch."""
        return sum(len(self.cache.texts[number].tokens) for number in self.training)


class TrainingLoop:
    """Trains a head until it is done with its epochs, or its held-back loss falls no more.

    Args:
        head: the module; where there is a checkpoint, it gets its weights.
        path: the checkpoint.
        clock: seconds.
        checkpoint_seconds: between checkpoints.
    """

    def __init__(
        self,
        head: TrainableHead,
        material: Material,
        settings: TrainingSettings,
        path: Path,
        *,
        clock: Callable[[], float],
        checkpoint_seconds: float,
    ) -> None:
        self._head = head
        self._material = material
        self._settings = settings
        self._path = path
        self._clock = clock
        self._checkpoint_seconds = checkpoint_seconds
        self._device = next(head.parameters()).device
        self._autocast = settings.precision == "bf16"
        optimizer = torch.optim.AdamW(head.parameters(), lr=settings.learning_rate, betas=_BETAS)
        self._state = Checkpoint(Progress(), head, optimizer, {})
        self._state.load(path)
        self._plan: list[list[int]] = []  # batches of the present epoch

    @property
    def progress(self) -> Progress:
        """How far the run is."""
        return self._state.progress

    @property
    def kept(self) -> Measured | None:
        """The measurement of :attr:`best`; ``None`` before the first."""
        return self.progress.history[self.progress.best_at] if self.progress.history else None

    @property
    def best(self) -> dict[str, torch.Tensor]:
        """The weights of the lowest held-back loss; empty before the first measurement."""
        return self._state.best

    def run(self, proceed: Callable[[Progress], bool]) -> None:
        """Go on until the run is over; :attr:`progress` says why.

        Args:
            proceed: told after each step how far the run is; whether to go on. After a no the checkpoint is
                written.

        Raises:
            SpecragError: a checkpoint cannot be written, or the features are damaged.
        """
        progress = self.progress
        saved = self._clock()
        while not progress.ended:
            if progress.epoch == self._settings.epochs:
                progress.ended = f"all {self._settings.epochs} epochs are done"
                break
            self._step()
            if not proceed(progress):
                break
            if self._clock() - saved >= self._checkpoint_seconds:
                self._state.save(self._path)
                saved = self._clock()
        self._state.save(self._path)

    def _step(self) -> None:
        settings, progress = self._settings, self.progress
        if progress.batch == 0 or not self._plan:
            self._plan = self._batches(self._material.training, settings.seed * 1009 + progress.epoch)
        plan = self._plan
        batch = make_batch(self._material.cache, plan[progress.batch], self._device)
        self._learn(batch)
        progress.step += 1
        progress.tokens += sum(batch.lengths) + len(batch.lengths)
        progress.batch += 1
        if progress.batch * settings.evaluations // len(plan) > (
            (progress.batch - 1) * settings.evaluations // len(plan)
        ):
            self._measure()
        if progress.batch == len(plan):
            progress.epoch, progress.batch = progress.epoch + 1, 0

    def _batches(self, numbers: Sequence[int], seed: int | None) -> list[list[int]]:
        sizes = [len(self._material.cache.texts[number].tokens) for number in numbers]
        plan = plan_epoch(sizes, self._settings.batch_tokens, seed)
        return [[numbers[place] for place in batch] for batch in plan]

    def _learn(self, batch: Batch) -> None:
        settings, progress = self._settings, self.progress
        optimizer = self._state.optimizer
        done = progress.tokens / (settings.epochs * self._material.tokens)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, done)
        draw = torch.Generator().manual_seed(settings.seed * 1_000_003 + progress.step)
        noise = (2 * torch.rand(batch.features.shape, generator=draw) - 1) * settings.noise
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._autocast):
            found = losses(
                self._head,
                self._material.target,
                batch,
                steps=settings.unroll,
                noise=noise.to(self._device),
            )
        optimizer.zero_grad(set_to_none=True)
        found.total(settings.classification_weight).backward()
        torch.nn.utils.clip_grad_norm_(self._head.parameters(), _LARGEST_GRADIENT)
        optimizer.step()
        progress.regression += float(found.regression.detach())
        progress.classification += float(found.classification.detach())
        progress.since += 1

    @torch.no_grad()
    def _measure(self) -> None:
        """Measure on the held-back answers, and note the weights if they are the best."""
        settings, progress = self._settings, self.progress
        hits = Hits(0, [0] * CHAIN)
        regression = classification = 0.0
        rows = 0
        for numbers in self._batches(self._material.held_back, None):
            batch = make_batch(self._material.cache, numbers, self._device)
            with torch.autocast(self._device.type, torch.bfloat16, enabled=self._autocast):
                found = losses(self._head, self._material.target, batch, steps=settings.unroll)
                hits.add(count_hits(self._head, self._material.target, batch, CHAIN))
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
        progress.since = 0
        self._judge(
            measured.held_back_regression + settings.classification_weight * measured.held_back_classification
        )

    def _judge(self, loss: float) -> None:
        progress = self.progress
        before = progress.best
        progress.stale = 0 if before is None or loss < _ENOUGH * before else progress.stale + 1
        if before is None or loss < before:
            progress.best, progress.best_at = loss, len(progress.history) - 1
            self._state.best = {
                name: value.detach().clone() for name, value in self._head.state_dict().items()
            }
        if progress.stale >= self._settings.patience:
            progress.ended = f"{progress.stale} measurements have not lowered the held-back loss"
