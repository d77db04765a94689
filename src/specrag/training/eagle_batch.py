"""Texts side by side: what one step of training reads."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specrag.training.eagle_features import FeatureCache


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of some texts. Row ``t`` of a text has feature ``t`` and token ``t + 1`` and estimates feature ``t + 1``,
    from which the target's distribution of token ``t + 2`` follows; a text of ``n`` tokens has ``n - 1`` rows.

    Attributes:
        lengths: rows of each text.
        tokens: the token behind each row's feature, int64 ``[T]``.
        features: bf16 ``[T, hidden_size]``.
        targets: the feature to estimate, bf16 ``[T, hidden_size]``.
        following: the token to guess, int64 ``[T]``; -1 where the text ends before it.
        behind: rows that each row is behind the first that drafting would read, int64 ``[T]``; that one has the
            feature in front of the answer and the answer's first token. Negative inside the prompt.
    """

    lengths: tuple[int, ...]
    tokens: torch.Tensor
    features: torch.Tensor
    targets: torch.Tensor
    following: torch.Tensor
    behind: torch.Tensor


def make_batch(cache: FeatureCache, numbers: Sequence[int], device: torch.device) -> Batch:
    """The batch of the texts of these numbers."""
    lengths: list[int] = []
    tokens: list[int] = []
    following: list[int] = []
    behind: list[int] = []
    features, targets = [], []
    for number in numbers:
        text = cache.texts[number]
        found = cache.features(number)
        rows = len(text.tokens) - 1
        lengths.append(rows)
        tokens += text.tokens[1:]
        following += [*text.tokens[2:], -1]
        behind += range(1 - text.begin, 1 - text.begin + rows)
        features.append(found[:-1])
        targets.append(found[1:])
    return Batch(
        tuple(lengths),
        torch.tensor(tokens, device=device),
        torch.cat(features).to(device),
        torch.cat(targets).to(device),
        torch.tensor(following, device=device),
        torch.tensor(behind, device=device),
    )


def plan_epoch(sizes: Sequence[int], most: int, seed: int | None) -> list[list[int]]:
    """Which texts make up which batch; each text is in exactly one.

    Args:
        sizes: tokens of each text.
        most: tokens of a batch; a single longer text is a batch of its own.
        seed: of the order; ``None`` leaves it as it is.
    """
    order = list(range(len(sizes)))
    if seed is not None:
        random.Random(seed).shuffle(order)
    batches: list[list[int]] = []
    room = 0
    for number in order:
        if not batches or sizes[number] > room:
            batches.append([])
            room = most
        batches[-1].append(number)
        room -= sizes[number]
    return batches
