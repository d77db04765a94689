"""From a pass's last hidden states to the rows' answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from specrag.engine.outputs import HiddenState, Outputs, Row
from specrag.models.top_kernel import read


def read_rows(
    wanted: Sequence[Outputs],
    hidden: dict[HiddenState, torch.Tensor],
    head: Callable[[torch.Tensor], torch.Tensor],
) -> list[Row]:
    """Answer every row.

    Args:
        wanted: what each row wants.
        hidden: ``[rows, hidden_size]`` for each hidden state that some row asks for, and always ``final``.
        head: the output matrix, ``[rows, hidden_size]`` -> ``[rows, vocab_size]``; called once, with only the
            rows that need logits.
    """
    rows = [Row() for _ in wanted]
    index = [number for number, outputs in enumerate(wanted) if outputs.needs_logits]
    if index:
        final = hidden["final"]
        logits = head(final if len(index) == len(wanted) else final[index])
        _read_logits([wanted[number] for number in index], [rows[number] for number in index], logits)
    for number, outputs in enumerate(wanted):
        if outputs.hidden:
            rows[number].hidden = {name: hidden[name][number] for name in outputs.hidden}
    return rows


def _read_logits(wanted: list[Outputs], rows: list[Row], logits: torch.Tensor) -> None:
    for number, (outputs, row) in enumerate(zip(wanted, rows, strict=True)):
        if outputs.logits:
            row.logits = logits[number].float().cpu().numpy()
        if outputs.entropy:
            row.entropy_of = partial(_entropy, logits[number])
        if outputs.log_probs_of:
            log_probs = torch.log_softmax(logits[number].float(), dim=-1)
            row.log_probs = log_probs[list(outputs.log_probs_of)].cpu().numpy()
    by_count: dict[int, list[int]] = {}
    for number, outputs in enumerate(wanted):
        if outputs.top_k or outputs.argmax:
            by_count.setdefault(min(outputs.top_k, logits.shape[1]), []).append(number)
    for count, numbers in by_count.items():
        if not count:
            for number, token in zip(numbers, _argmax(logits, numbers), strict=True):
                rows[number].argmax = token
            continue
        found, chances, entropies = _read_top(count, logits, numbers)
        for place, number in enumerate(numbers):
            rows[number].top_tokens, rows[number].top_log_probs = found[place], chances[place]
            if wanted[number].entropy and entropies is not None:
                rows[number].entropy_of = partial(float, entropies[place])
            if wanted[number].argmax:
                rows[number].argmax = int(found[place, 0])


def _argmax(logits: torch.Tensor, numbers: Sequence[int]) -> list[int]:
    """The first largest entry of some rows of ``[rows, vocab_size]``."""
    if _is_compiled(logits):
        none = np.empty(0, np.float32)
        tokens, _ = _largest(1, logits, numbers, none, none)
        return [int(token) for token in tokens[:, 0]]
    chosen = logits if len(numbers) == len(logits) else logits[list(numbers)]
    best: list[int] = chosen.argmax(dim=-1).tolist()
    return best


def _entropy(logits: torch.Tensor) -> float:
    logits = logits.float()
    # Logits far below the largest add nothing; a removed one, -inf, must not make 0 times infinity.
    shifted = (logits - logits.max()).clamp_min(-1e4)
    weights = shifted.exp()
    total = weights.sum()
    return float(total.log() - weights.dot(shifted) / total)


def _read_top(
    count: int, logits: torch.Tensor, numbers: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """The ``count`` most probable tokens of some rows of ``[rows, vocab_size]``, smaller ids first on a tie, and their
    log-probabilities, ``[len(numbers), count]`` each; and the rows' entropies where they cost next to nothing.
    """
    if _is_compiled(logits):
        normalisers, entropies = np.empty((2, len(numbers)), np.float32)
        tokens, values = _largest(count, logits, numbers, normalisers, entropies)
        return tokens, values - normalisers[:, None], entropies
    chosen = logits[list(numbers)].float()
    # A stable sort keeps the smaller id first, which ``topk`` does not.
    ordered, found = torch.sort(chosen, dim=-1, descending=True, stable=True)
    log_probs = ordered[:, :count] - torch.logsumexp(chosen, dim=-1, keepdim=True)
    return found[:, :count].cpu().numpy(), log_probs.cpu().numpy(), None


def _is_compiled(logits: torch.Tensor) -> bool:
    return logits.device.type == "cpu" and logits.dtype in (torch.float32, torch.bfloat16)


def _largest(
    count: int, logits: torch.Tensor, numbers: Sequence[int], normalisers: np.ndarray, entropies: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.empty((len(numbers), count), np.int64)
    values = np.empty((len(numbers), count), np.float32)
    some = np.array(numbers)
    is_half = logits.dtype == torch.bfloat16
    readable = logits.view(torch.int16).numpy().view(np.uint16) if is_half else logits.numpy()
    read(readable, some, tokens, values, normalisers, entropies)
    return tokens, values
