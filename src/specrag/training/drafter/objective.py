"""What the training loop does for a drafter: its plan, losses and measurements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from specrag.training.checkpoint import Progress
from specrag.training.drafter.examples import Batch, Example, make_batch, parts, plan, targets
from specrag.training.drafter.model import Tuned
from specrag.training.drafter.run import GPU_TOKENS, TuningSettings
from specrag.training.loop import Plan, TrainingLoop

_LARGEST_GRADIENT = 1.0


@dataclass(frozen=True, slots=True)
class Drafted:
    """Drafts for held-back rows, written by the engine with the trained weights merged in, and not kept to the form.

    Attributes:
        right, wrong, malformed: numbers of drafts.
    """

    right: int
    wrong: int
    malformed: int

    @property
    def count(self) -> int:
        """Number of drafts."""
        return self.right + self.wrong + self.malformed


@dataclass(frozen=True, slots=True)
class Measured:
    """One measurement.

    Attributes:
        step: of training; 0 is the untuned model.
        rows: trained on so far; rows of later epochs count again.
        loss: mean training loss since the previous measurement, nats per token; ``None`` at the first.
        held_back: loss on the held-back rows, nats per token.
        tokens_right: share of their tokens that are the most probable ones.
        drafted: drafts for some of them; ``None`` if none were written.
    """

    step: int
    rows: int
    loss: float | None
    held_back: float
    tokens_right: float
    drafted: Drafted | None


@dataclass(slots=True)
class DrafterProgress(Progress[Measured]):
    """How far a run is.

    Attributes:
        rows: trained on so far.
        loss: sum of the steps' losses since the last measurement.
    """

    rows: int = 0
    loss: float = 0.0

    @staticmethod
    def measured_from_json(values: dict[str, Any]) -> Measured:
        """One measurement."""
        drafted = values["drafted"]
        return Measured(**{**values, "drafted": None if drafted is None else Drafted(**drafted)})


@dataclass(frozen=True, slots=True)
class _Hits:
    """The results of a batch.

    Attributes:
        loss: sum over its targets, nats; carries the gradient.
        right: targets that are the most probable token.
    """

    loss: torch.Tensor
    right: int


class DrafterObjective:
    """An :class:`~specrag.training.loop.Objective`: a module learns to write the examples' drafts.

    Args:
        training, held_back: examples.
        draft: writes drafts for held-back rows with the module's current weights.
    """

    def __init__(
        self,
        tuned: Tuned,
        training: Sequence[Example],
        held_back: Sequence[Example],
        settings: TuningSettings,
        *,
        draft: Callable[[], Drafted | None],
    ) -> None:
        self.tuned = tuned
        self.training = training
        self._held_back = held_back
        self._settings = settings
        self._draft = draft
        self._autocast = settings.precision == "bf16"
        self._most = settings.batch_tokens or (1 if tuned.device.type == "cpu" else GPU_TOKENS)
        self._steps = sum(map(len, self._epochs()))

    @property
    def trained(self) -> Mapping[str, torch.nn.Parameter]:
        """The parameters that are trained."""
        return self.tuned.trained

    def plan(self) -> Plan:
        """The run: each epoch has its own order, and the untuned module is measured too."""
        settings = self._settings
        return Plan(
            self._epochs(),
            evaluations=settings.evaluations,
            learning_rate=settings.highest_rate,
            largest_gradient=_LARGEST_GRADIENT,
            patience=settings.patience,
            untrained=True,
        )

    def _epochs(self) -> list[list[list[int]]]:
        settings = self._settings
        return plan(len(self.training), settings.batch_rows, settings.epochs, settings.seed)

    def done(self, progress: DrafterProgress) -> float:
        """The share of the steps that is done after the next one."""
        return (progress.step + 1) / self._steps

    def learn(self, batch: Sequence[int], progress: DrafterProgress) -> float:
        """Accumulate a step's gradients, part by part; its loss is the mean over its tokens."""
        self.tuned.module.train()
        examples = [self.training[number] for number in batch]
        count = targets(examples)
        total = torch.zeros((), device=self.tuned.device)
        for part in parts(examples, self._most):
            loss = self._hits(make_batch(part, self.tuned.device)).loss / count
            loss.backward()
            total += loss.detach()
        progress.rows += len(examples)
        progress.tokens += sum(len(example.tokens) for example in examples)
        progress.loss += float(total)
        return float(total)

    def measure(self, progress: DrafterProgress) -> float:
        self.tuned.module.eval()
        loss, right = 0.0, 0
        for part in parts(self._held_back, self._most):
            hits = self._hits(make_batch(part, self.tuned.device))
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
        progress.loss = 0.0
        return measured.held_back

    def _hits(self, batch: Batch) -> _Hits:
        wanted = batch.targets >= 0
        module = self.tuned.module
        with torch.autocast(self.tuned.device.type, torch.bfloat16, enabled=self._autocast):
            hidden = module.get_decoder()(input_ids=batch.tokens, use_cache=False).last_hidden_state
            # The output matrix is half of the work, so it runs only where something is learned.
            chosen = module.get_output_embeddings()(hidden[wanted]).float()
        expected = batch.targets[wanted]
        loss = F.cross_entropy(chosen, expected, reduction="sum")
        return _Hits(loss, int((chosen.detach().argmax(dim=-1) == expected).sum()))


def drafter_loop(
    objective: DrafterObjective, path: Path, *, clock: Callable[[], float], checkpoint_seconds: float
) -> TrainingLoop[DrafterProgress]:
    """The loop that tunes a drafter, with its checkpoint at ``path``."""
    return TrainingLoop(
        objective,
        objective.plan(),
        DrafterProgress(),
        path,
        clock=clock,
        checkpoint_seconds=checkpoint_seconds,
        adamw={"weight_decay": 0.0},
    )
