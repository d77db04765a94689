"""The losses of an EAGLE head against its frozen target, and how often its guesses are right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from specrag.errors import InputError
from specrag.models import read_weights
from specrag.models.catalog import ModelFiles
from specrag.training.eagle.features import Batch, Text
from specrag.training.eagle.module import Estimate, KeysValues, TrainableHead

_EMBEDDING = "model.embed_tokens.weight"
_OUTPUT = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class TargetMatrices:
    """Parts of the target.

    Attributes:
        embedding: ``[vocab_size, hidden_size]``.
        output: rows of the output matrix, ``[len(vocabulary), hidden_size]``.
        vocabulary: the token of each of these rows, int64, ascending.
    """

    embedding: torch.Tensor
    output: torch.Tensor
    vocabulary: torch.Tensor

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """The embeddings of tokens, ``[T, hidden_size]``."""
        return F.embedding(tokens, self.embedding)

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """Logits of the tokens in ``vocabulary``, fp32 ``[T, len(vocabulary)]``."""
        return F.linear(features.to(self.output.dtype), self.output).float()


def read_matrices(
    files: ModelFiles, vocabulary: Sequence[int], *, dtype: torch.dtype, device: torch.device
) -> TargetMatrices:
    """Read the matrices from the target's files.

    Args:
        vocabulary: the tokens that the head may propose, ascending; empty for all.
        dtype: of the matrices.

    Raises:
        InputError: the model has no such matrices.
        ModelFilesError: its files are damaged.
    """
    weights = read_weights(files)
    embedding = weights.get(_EMBEDDING)
    if embedding is None:
        raise InputError("model", files.name, f"it has no {_EMBEDDING}; take a model of the Llama family")
    output = weights.get(_OUTPUT, embedding)
    tokens = torch.tensor(vocabulary) if len(vocabulary) else torch.arange(len(output))
    return TargetMatrices(
        embedding.to(device=device, dtype=dtype, copy=True),
        output[tokens].to(device=device, dtype=dtype),
        tokens.to(device),
    )


def frequent_tokens(texts: Sequence[Text], count: int, always: Collection[int], vocab_size: int) -> list[int]:
    """The most frequent tokens of answers, ascending.

    Ties go to tokens that are more frequent in prompts, then to smaller ids.

    Args:
        count: how many; if it is 0 or at least ``vocab_size``, all, returned as an empty list.
        always: tokens that are always included, such as those that end an answer.
    """
    if not 0 < count < vocab_size:
        return []
    answers: Counter[int] = Counter()
    prompts: Counter[int] = Counter()
    for text in texts:
        answers.update(text.tokens[text.begin :])
        prompts.update(text.tokens[: text.begin])
    order = sorted(
        range(vocab_size), key=lambda token: (token not in always, -answers[token], -prompts[token], token)
    )
    return sorted(order[:count])


@dataclass(frozen=True, slots=True)
class Losses:
    """Mean losses over the rows of a batch's answers.

    Attributes:
        regression: Smooth-L1 between estimated and true features (EAGLE, section 4.2, L_reg).
        classification: cross-entropy between the target's and the head's distribution of the next token (L_cls).
            With a reduced vocabulary both are renormalised over it: the head need not predict what it cannot
            propose.
        rows: number of rows.
    """

    regression: torch.Tensor
    classification: torch.Tensor
    rows: int

    def total(self, classification_weight: float) -> torch.Tensor:
        """The weighted sum of both losses."""
        return self.regression + classification_weight * self.classification


def unrolled(
    head: TrainableHead, target: TargetMatrices, batch: Batch, features: torch.Tensor, steps: int
) -> Iterator[Estimate]:
    """Run the head ``steps`` deep from every row at once.

    Step 0 reads the target's features, each further step the estimates of the previous one. In step ``d``, a draft's
    row is ``d`` rows further down than where the draft begins.
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
    """How deep drafts of one guess per step agree with the text, counted from every row of the answers.

    Attributes:
        drafts: number of drafts.
        reached: number of drafts whose first ``d`` guesses are all right, for ``d`` from 1.
    """

    drafts: int
    reached: list[int]

    @property
    def accuracy(self) -> list[float]:
        """Accuracy of the guess at each depth, given that all guesses before it were right; 0 without such drafts."""
        before = [self.drafts, *self.reached]
        return [hit / max(all_before, 1) for hit, all_before in zip(self.reached, before, strict=False)]

    @property
    def mean_accepted_tokens(self) -> float:
        """Tokens per pass if a round began at every token (MAT, bonus token included)."""
        return 1 + sum(self.reached) / max(self.drafts, 1)

    def add(self, other: Hits) -> None:
        """Count another batch."""
        self.drafts += other.drafts
        self.reached = [mine + theirs for mine, theirs in zip(self.reached, other.reached, strict=True)]


@torch.no_grad()
def count_hits(head: TrainableHead, target: TargetMatrices, batch: Batch, depth: int) -> Hits:
    """Draft ``depth`` tokens from every row of the answers that is followed by that many tokens."""
    right = []
    for step, estimate in enumerate(unrolled(head, target, batch, batch.features, depth)):
        guessed = target.vocabulary[target.logits(estimate.features).argmax(dim=-1)]
        # Aligned with the row where the draft begins.
        right.append((guessed == batch.following).roll(-step))
    # Rows left in the text, this one included; the last row has no token to compare with.
    left = torch.cat([torch.arange(rows, 0, -1, device=batch.behind.device) for rows in batch.lengths])
    begins = (batch.behind >= 0) & (left > depth)
    reached = torch.stack(right).cumprod(dim=0)[:, begins].sum(dim=1)
    return Hits(int(begins.sum()), [int(count) for count in reached])
