"""What a head is trained to make small, and how often its guesses are right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from specrag.training.eagle_batch import Batch
from specrag.training.eagle_module import Estimate, KeysValues, TrainableHead
from specrag.training.eagle_target import TargetMatrices


@dataclass(frozen=True, slots=True)
class Losses:
    """Means over the answers' rows of a batch.

    Attributes:
        regression: Smooth-L1 between estimated and true features (EAGLE, section 4.2, L_reg).
        classification: cross-entropy between the target's and the head's distribution of the next token (L_cls).
            With a reduced vocabulary both are distributions over it, renormalised: what the head cannot propose,
            it need not foresee.
        rows: how many rows.
    """

    regression: torch.Tensor
    classification: torch.Tensor
    rows: int

    def total(self, classification_weight: float) -> torch.Tensor:
        """The loss."""
        return self.regression + classification_weight * self.classification


def unrolled(
    head: TrainableHead, target: TargetMatrices, batch: Batch, features: torch.Tensor, steps: int
) -> Iterator[Estimate]:
    """Run the head ``steps`` deep behind every row at once: step 0 reads the target's features, each further step the
    estimates of the one before. In step ``d`` the row of a draft stands ``d`` rows further down.
    """
    embeddings = target.embed(batch.tokens)
    memories: list[KeysValues] = []
    for _ in range(steps):
        estimate = head(embeddings, features, batch.lengths, memories)
        memories.append(estimate.memory)
        yield estimate
        features = estimate.features.roll(1, dims=0)


def losses(
    head: TrainableHead,
    target: TargetMatrices,
    batch: Batch,
    *,
    steps: int = 1,
    noise: torch.Tensor | None = None,
) -> Losses:
    """The two losses, averaged over the rows of all steps.

    Args:
        steps: how deep the head is unrolled.
        noise: added to the features that are read, ``[T, hidden_size]`` (EAGLE, section 4.2).
    """
    features = batch.features if noise is None else batch.features + noise
    regression, classification = [], []
    rows = 0
    answers = batch.behind >= 0
    wanted = torch.softmax(target.logits(batch.targets[answers]), dim=-1)
    for depth, estimate in enumerate(unrolled(head, target, batch, features, steps)):
        chosen = batch.behind >= depth
        found, true = estimate.features[chosen], batch.targets[chosen].float()
        regression.append(F.smooth_l1_loss(found, true, reduction="sum") / found.shape[1])
        probs = wanted[chosen[answers]]
        classification.append(F.cross_entropy(target.logits(found), probs, reduction="sum"))
        rows += len(found)
    count = max(rows, 1)
    return Losses(torch.stack(regression).sum() / count, torch.stack(classification).sum() / count, rows)


@dataclass(slots=True)
class Hits:
    """How deep drafts of one guess a step agree with the text, counted from every row of the answers.

    Attributes:
        drafts: how many.
        reached: drafts whose first ``d`` guesses are all right, for ``d`` from 1.
    """

    drafts: int
    reached: list[int]

    @property
    def accuracy(self) -> list[float]:
        """Of the guess at each depth, where all guesses before it were right; 0 where there is no such draft."""
        before = [self.drafts, *self.reached]
        return [hit / max(all_before, 1) for hit, all_before in zip(self.reached, before, strict=False)]

    @property
    def mean_accepted_tokens(self) -> float:
        """Tokens a pass if a round began at every token (MAT, bonus token included)."""
        return 1 + sum(self.reached) / max(self.drafts, 1)

    def add(self, other: Hits) -> None:
        """Count another batch."""
        self.drafts += other.drafts
        self.reached = [mine + theirs for mine, theirs in zip(self.reached, other.reached, strict=True)]


@torch.no_grad()
def count_hits(head: TrainableHead, target: TargetMatrices, batch: Batch, depth: int) -> Hits:
    """Draft ``depth`` tokens behind every row of the answers that has so many tokens behind it."""
    right = []
    for step, estimate in enumerate(unrolled(head, target, batch, batch.features, depth)):
        guessed = target.vocabulary[target.logits(estimate.features).argmax(dim=-1)]
        # Told at the row where the draft begins.
        right.append((guessed == batch.following).roll(-step))
    # A text's rows left, this one included; the last row has no token to compare.
    left = torch.cat([torch.arange(rows, 0, -1, device=batch.behind.device) for rows in batch.lengths])
    begins = (batch.behind >= 0) & (left > depth)
    reached = torch.stack(right).cumprod(dim=0)[:, begins].sum(dim=1)
    return Hits(int(begins.sum()), [int(count) for count in reached])
