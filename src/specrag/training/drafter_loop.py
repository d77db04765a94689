"""The training loop: transformers' Trainer, with a checkpoint of our own.

The Trainer steps, clips and follows the learning rate. It neither saves nor resumes: it would unpickle, and write in
several steps that a kill can tear apart (docs/decisions/0005). Everything random is a function of the seed and the
step, so that a resumed run is the run that was never stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from specrag.errors import SpecragError
from specrag.training.drafter_batches import Batch, make_batch, parts, plan, targets
from specrag.training.drafter_checkpoint import Checkpoint, Drafted, Measured, Progress
from specrag.training.drafter_examples import Example
from specrag.training.drafter_model import Tuned
from specrag.training.drafter_settings import GPU_TOKENS, TuningSettings

_LARGEST_GRADIENT = 1.0
_WARM_UP, _LAST_RATE = 0.03, 0.1  # shares of all steps and of the highest learning rate
_ENOUGH = 0.999  # of the best held-back loss: less than this lowers it enough


def learning_rate(highest: float, done: float) -> float:
    """The learning rate when this share of the steps is done: a linear rise, then a cosine."""
    if done < _WARM_UP:
        return highest * done / _WARM_UP
    wave = (1 + math.cos(math.pi * min((done - _WARM_UP) / (1 - _WARM_UP), 1.0))) / 2
    return highest * (_LAST_RATE + (1 - _LAST_RATE) * wave)


@dataclass(frozen=True, slots=True)
class Hits:
    """What a batch comes to.

    Attributes:
        loss: sum over its targets, nats; carries the gradient.
        right: targets that are the most probable token.
    """

    loss: torch.Tensor
    right: int


class TuningLoop:
    """Tunes a module until it is done with its epochs, or its held-back loss falls no more.

    Args:
        tuned: the module; where there is a checkpoint, it gets its weights.
        training, held_back: examples.
        path: the checkpoint.
        draft: writes drafts for held-back rows with the module's present weights.
        clock: seconds.
        checkpoint_seconds: between checkpoints.
    """

    def __init__(
        self,
        tuned: Tuned,
        training: Sequence[Example],
        held_back: Sequence[Example],
        settings: TuningSettings,
        path: Path,
        *,
        draft: Callable[[], Drafted | None],
        clock: Callable[[], float],
        checkpoint_seconds: float,
    ) -> None:
        self._tuned = tuned
        self._training = training
        self._held_back = held_back
        self._settings = settings
        self._path = path
        self._draft = draft
        self._clock = clock
        self._checkpoint_seconds = checkpoint_seconds
        self._steps = plan(len(training), settings.batch_rows, settings.epochs, settings.seed)
        self._autocast = settings.precision == "bf16"
        self._most = settings.batch_tokens or (1 if tuned.device.type == "cpu" else GPU_TOKENS)
        optimizer = torch.optim.AdamW(
            list(tuned.trained.values()), lr=settings.highest_rate, weight_decay=0.0
        )
        self._state = Checkpoint(Progress(), tuned.trained, optimizer, {})
        self._state.load(path)
        self._restored = {
            name: dict(optimizer.state[parameter])
            for name, parameter in tuned.trained.items()
            if parameter in optimizer.state
        }

    @property
    def progress(self) -> Progress:
        """How far the run is."""
        return self._state.progress

    @property
    def total(self) -> int:
        """Steps of the whole run."""
        return len(self._steps)

    @property
    def best(self) -> dict[str, torch.Tensor]:
        """The weights of the lowest held-back loss; empty before the first measurement."""
        return self._state.best

    def run(self, proceed: Callable[[Progress], bool]) -> None:
        """Go on until the run is over; :attr:`progress` says why.

        Args:
            proceed: told after each step and measurement how far the run is; whether to go on. After a no the
                checkpoint is written.

        Raises:
            SpecragError: a checkpoint cannot be written, or the loss is no number any more.
        """
        progress = self.progress
        follow = _Follow(self, proceed, self._clock, self._checkpoint_seconds)
        if not progress.history:
            self.measure()
            proceed(progress)
        if not progress.ended and progress.step < self.total:
            self._trainer(follow).train()
        if not progress.ended and progress.step == self.total:
            progress.ended = f"all {self._settings.epochs} epochs are done"
        follow.count_seconds()
        self.save()

    def save(self) -> None:
        """Write the checkpoint."""
        self._state.save(self._path)

    def _trainer(self, follow: _Follow) -> Trainer:
        settings, start = self._settings, self.progress.step
        optimizer = self._state.optimizer
        arguments = TrainingArguments(
            output_dir=str(self._path.parent),
            max_steps=self.total - start,
            max_grad_norm=_LARGEST_GRADIENT,
            per_device_train_batch_size=1,
            save_strategy="no",
            eval_strategy="no",
            logging_strategy="no",
            logging_nan_inf_filter=False,
            report_to=[],
            disable_tqdm=True,
            seed=settings.seed,
            use_cpu=self._tuned.device.type == "cpu",
            dataloader_pin_memory=False,
            remove_unused_columns=False,
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: learning_rate(1.0, (start + step + 1) / self.total)
        )
        trainer = _StepTrainer(
            self,
            model=self._tuned.module,
            args=arguments,
            optimizers=(optimizer, schedule),
            callbacks=[follow],
        )
        trainer.remove_callback(PrinterCallback)
        return trainer

    # -- a step ---------------------------------------------------------------------------------------------

    def rest(self) -> list[list[int]]:
        """The steps that are left."""
        return self._steps[self.progress.step :]

    def restore(self) -> None:
        """Give the optimizer its moments back, which the Trainer has looked through."""
        for name, state in self._restored.items():
            self._state.optimizer.state[self._tuned.trained[name]] = state
        self._restored = {}

    def learn(self, step: Sequence[int], backward: Callable[[torch.Tensor], None]) -> torch.Tensor:
        """Sum a step's gradients up, part by part, and return its mean loss a token.

        Raises:
            SpecragError: the loss is no number.
        """
        examples = [self._training[number] for number in step]
        count = targets(examples)
        total = torch.zeros((), device=self._tuned.device)
        for part in parts(examples, self._most):
            loss = self._hits(make_batch(part, self._tuned.device)).loss / count
            backward(loss)
            total += loss.detach()
        if not torch.isfinite(total):
            raise SpecragError(
                f"training: the loss of step {self.progress.step + 1:,} is {float(total)}: train anew with --fresh "
                "and a lower --learning-rate; the last checkpoint is intact"
            )
        progress = self.progress
        progress.rows += len(examples)
        progress.tokens += sum(len(example.tokens) for example in examples)
        progress.loss += float(total)
        progress.since += 1
        return total

    def _hits(self, batch: Batch) -> Hits:
        with torch.autocast(self._tuned.device.type, torch.bfloat16, enabled=self._autocast):
            logits = self._tuned.module(
                input_ids=batch.tokens, logits_to_keep=batch.rows, use_cache=False
            ).logits
        wanted = batch.targets >= 0
        chosen, expected = logits[wanted].float(), batch.targets[wanted]
        loss = F.cross_entropy(chosen, expected, reduction="sum")
        return Hits(loss, int((chosen.detach().argmax(dim=-1) == expected).sum()))

    # -- measuring ------------------------------------------------------------------------------------------

    def due(self) -> bool:
        """Whether to measure behind this step."""
        settings, step = self._settings, self.progress.step
        in_epoch = -(-len(self._training) // settings.batch_rows)
        place = (step - 1) % in_epoch + 1
        return place * settings.evaluations // in_epoch > (place - 1) * settings.evaluations // in_epoch

    @torch.no_grad()
    def measure(self) -> None:
        """Measure on the held-back rows, and note the weights if they are the best."""
        progress = self.progress
        self._tuned.module.eval()
        loss, right = 0.0, 0
        for part in parts(self._held_back, self._most):
            hits = self._hits(make_batch(part, self._tuned.device))
            loss += float(hits.loss)
            right += hits.right
        count = targets(self._held_back)
        measured = Measured(
            step=progress.step,
            rows=progress.rows,
            loss=progress.loss / progress.since if progress.since else None,
            held_back=loss / count,
            tokens_right=right / count,
            drafted=self._draft(),
        )
        progress.history.append(measured)
        progress.loss, progress.since = 0.0, 0
        self._judge(measured.held_back)

    def _judge(self, loss: float) -> None:
        progress = self.progress
        before = progress.best
        progress.stale = 0 if before is None or loss < _ENOUGH * before else progress.stale + 1
        if before is None or loss < before:
            progress.best, progress.best_at = loss, len(progress.history) - 1
            self._state.best = {name: value.detach().clone() for name, value in self._tuned.trained.items()}
        if progress.stale >= self._settings.patience:
            progress.ended = f"{progress.stale} measurements have not lowered the held-back loss"


class _StepTrainer(Trainer):  # type: ignore[misc] # transformers is not typed
    """A Trainer whose batch is a whole step, given by the numbers of its rows."""

    def __init__(self, loop: TuningLoop, **options: Any) -> None:
        super().__init__(**options)
        self._loop = loop

    def get_train_dataloader(self) -> DataLoader[list[int]]:
        return DataLoader(self._loop.rest(), batch_size=None, shuffle=False, collate_fn=list)  # type: ignore[arg-type]

    def training_step(
        self,
        model: Any,
        inputs: list[int],
        num_items_in_batch: object = None,  # noqa: ARG002
    ) -> torch.Tensor:
        model.train()
        return self._loop.learn(inputs, self.accelerator.backward).detach()

    def floating_point_ops(self, inputs: list[int]) -> int:  # noqa: ARG002 - not counted
        return 0


class _Follow(TrainerCallback):  # type: ignore[misc] # transformers is not typed
    """Counts, measures and saves between steps."""

    def __init__(
        self,
        loop: TuningLoop,
        proceed: Callable[[Progress], bool],
        clock: Callable[[], float],
        checkpoint_seconds: float,
    ) -> None:
        self._loop = loop
        self._proceed = proceed
        self._clock = clock
        self._checkpoint_seconds = checkpoint_seconds
        self._saved = self._counted = clock()

    def count_seconds(self) -> None:
        """Add the time since the last call."""
        now = self._clock()
        self._loop.progress.seconds += now - self._counted
        self._counted = now

    def on_train_begin(self, args: Any, state: Any, control: Any, **_unused: Any) -> Any:  # noqa: ARG002
        self._loop.restore()
        return control

    def on_step_end(self, args: Any, state: Any, control: Any, **_unused: Any) -> Any:  # noqa: ARG002
        loop = self._loop
        loop.progress.step += 1
        if loop.due():
            loop.measure()
        self.count_seconds()
        if not self._proceed(loop.progress) or loop.progress.ended:
            control.should_training_stop = True
        elif self._counted - self._saved >= self._checkpoint_seconds:
            loop.save()
            self._saved = self._counted
        return control
