"""From the last hidden states of a pass to what each row asked for: logits, argmax, entropy, most probable tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from specrag.engine import HiddenState, Outputs, Row, fastmath_infinite
from specrag.engine.cpu.bfloat16 import exp, widen

#: Logits whose largest one tells whether they must be looked at one by one.
_BLOCK = 64
#: Logits whose weights are added in float32 before they join the others in float64.
_SUMMED = 1024
#: Lower than this below the largest, in nats, a logit adds nothing to the normaliser; -inf is one of them.
_FAR = np.float32(-87.0)


@fastmath_infinite
def _read_compiled(  # noqa: C901 - one compiled loop over the row
    logits: Any, rows: Any, tokens: Any, values: Any, normalisers: Any, entropies: Any
) -> None:
    """Find the largest logits of some rows in one reading, in place of a sort.

    Args:
        logits: float32, or bfloat16 by its bits, ``[all rows, vocab_size]``.
        rows: numbers of the rows to read.
        tokens, values: filled, ``[rows, count]``: the largest first, smaller ids first on a tie.
        normalisers, entropies: filled, ``[rows]``, in nats, unless they are empty.
    """
    size, count = logits.shape[1], tokens.shape[1]
    blocks = (size + _BLOCK - 1) // _BLOCK
    largest = np.empty(blocks, np.float32)
    for place in range(rows.shape[0]):
        row = logits[rows[place]]
        # Loops over slices, from 0 on: numba sees that no index is negative, and they become wide instructions.
        for block in range(blocks):
            piece = row[block * _BLOCK : (block + 1) * _BLOCK]
            best = np.float32(-np.inf)
            for i in range(piece.shape[0]):
                value = widen(piece[i])
                best = value if value > best else best
            largest[block] = best
        found = 0
        for block in range(blocks):
            if found == count and not largest[block] > values[place, count - 1]:
                continue
            for i in range(block * _BLOCK, min((block + 1) * _BLOCK, size)):
                value = widen(row[i])
                if found == count and not value > values[place, count - 1]:
                    continue
                # Ascending ids: an equal one that is there already stays in front.
                at = min(found, count - 1)
                while at > 0 and values[place, at - 1] < value:
                    values[place, at] = values[place, at - 1]
                    tokens[place, at] = tokens[place, at - 1]
                    at -= 1
                values[place, at] = value
                tokens[place, at] = i
                found = min(found + 1, count)
        if normalisers.shape[0]:
            top = values[place, 0]
            total, mixed = np.float64(0.0), np.float64(0.0)
            for start in range(0, size, _SUMMED):
                piece = row[start : start + _SUMMED]
                part, part_mixed = np.float32(0.0), np.float32(0.0)
                for i in range(piece.shape[0]):
                    below = widen(piece[i]) - top
                    below = below if below > _FAR else _FAR
                    weight = exp(below)
                    part += weight
                    part_mixed += weight * below
                total += part
                mixed += part_mixed
            normalisers[place] = top + np.float32(np.log(total))
            if entropies.shape[0]:
                entropies[place] = np.float32(np.log(total) - mixed / total)


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
    by_count: dict[int, list[int]] = {}
    for number, (outputs, row) in enumerate(zip(wanted, rows, strict=True)):
        _read_row(outputs, row, logits[number])
        if outputs.top_k or outputs.argmax:
            by_count.setdefault(min(outputs.top_k, logits.shape[1]), []).append(number)
    for count, numbers in by_count.items():
        if not count:
            for number, token in zip(numbers, _argmax(logits, numbers), strict=True):
                rows[number].argmax = token
            continue
        found, log_probs, entropies = _read_top(count, logits, numbers)
        for place, number in enumerate(numbers):
            outputs, row = wanted[number], rows[number]
            row.top_tokens, row.top_log_probs = found[place], log_probs[place]
            if outputs.entropy and entropies is not None:
                row.entropy_of = partial(float, entropies[place])
            if outputs.argmax:
                row.argmax = int(found[place, 0])


def _read_row(outputs: Outputs, row: Row, logits: torch.Tensor) -> None:
    """What a row asks for beside its most probable tokens, from its logits, ``[vocab_size]``."""
    if outputs.logits:
        row.logits = logits.float().cpu().numpy()
    if outputs.entropy:
        row.entropy_of = partial(_entropy, logits)
    if outputs.log_probs_of:
        log_probs = torch.log_softmax(logits.float(), dim=-1)
        row.log_probs = log_probs[list(outputs.log_probs_of)].cpu().numpy()


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
    """The most probable tokens of some rows of ``[rows, vocab_size]``.

    Returns:
        The ``count`` most probable tokens, smaller ids first on a tie, and their log-probabilities,
        ``[len(numbers), count]`` each; and the rows' entropies where they cost next to nothing.
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
    _read_compiled(readable, some, tokens, values, normalisers, entropies)
    return tokens, values
