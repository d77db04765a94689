"""The most probable tokens of a row of logits, as a compiled loop on the CPU: one reading in place of a sort."""

from __future__ import annotations

from typing import Any

import numpy as np

from specrag.engine.bfloat16 import exp, widen
from specrag.engine.compiling import reordered_infinite

#: Logits whose largest one tells whether they must be looked at one by one.
_BLOCK = 64
#: Logits whose weights are added in float32 before they join the others in float64.
_SUMMED = 1024
#: Lower than this below the largest, in nats, a logit adds nothing to the normaliser; -inf is one of them.
_FAR = np.float32(-87.0)


@reordered_infinite
def read(logits: Any, rows: Any, tokens: Any, values: Any, normalisers: Any, entropies: Any) -> None:
    """Fill, for each of ``rows`` of ``logits``, float32 or bfloat16 by its bits, [rows, vocab_size]: ``tokens`` and
    ``values`` [rows, count], the largest first, smaller ids first on a tie; and ``normalisers`` and ``entropies``
    [rows], in nats, unless they are empty.
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
