"""Examples side by side: the steps of a run, and the parts of a step that are in memory at a time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specrag.training.drafter_examples import Example


@dataclass(frozen=True, slots=True)
class Batch:
    """Some examples, padded at their ends. No example sees padding, since it stands behind; so no mask is needed.

    Attributes:
        tokens: int64 ``[B, T]``.
        rows: places whose logits are wanted, of any example, ascending, int64 ``[R]``.
        targets: the token behind each of these places, int64 ``[B, R]``; -100 where it is not trained on.
    """

    tokens: torch.Tensor
    rows: torch.Tensor
    targets: torch.Tensor


def make_batch(examples: Sequence[Example], device: torch.device) -> Batch:
    """The batch of examples."""
    longest = max(len(example.tokens) for example in examples)
    tokens = torch.zeros(len(examples), longest, dtype=torch.int64)
    wanted = torch.full((len(examples), longest), -100)
    for place, example in enumerate(examples):
        tokens[place, : len(example.tokens)] = torch.tensor(example.tokens)
        wanted[place, example.begin - 1 : len(example.tokens) - 1] = torch.tensor(
            example.tokens[example.begin :]
        )
    rows = torch.nonzero((wanted >= 0).any(dim=0)).flatten()
    return Batch(tokens.to(device), rows.to(device), wanted[:, rows].to(device))


def targets(examples: Sequence[Example]) -> int:
    """Tokens that are trained on."""
    return sum(len(example.tokens) - example.begin for example in examples)


def parts(examples: Sequence[Example], most: int) -> list[list[Example]]:
    """Examples of like length together, at most so many tokens, padding included; a longer example is alone."""
    found: list[list[Example]] = []
    for example in sorted(examples, key=lambda example: len(example.tokens), reverse=True):
        if not found or len(found[-1][0].tokens) * (len(found[-1]) + 1) > most:
            found.append([])
        found[-1].append(example)
    return found


def plan(count: int, batch_rows: int, epochs: int, seed: int) -> list[list[int]]:
    """The rows of every step; each epoch has every row once, in an order of its own."""
    steps: list[list[int]] = []
    for epoch in range(epochs):
        order = list(range(count))
        random.Random(seed * 1009 + epoch).shuffle(order)
        steps += [order[start : start + batch_rows] for start in range(0, count, batch_rows)]
    return steps
