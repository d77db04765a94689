"""The most probable tokens of a row of logits, as a compiled loop on the CPU: one reading in place of a sort."""

from __future__ import annotations

from typing import Any

import numpy as np

from specrag.engine.bfloat16 import exp, widen
from specrag.engine.compiling import reordered_infinite

#: Logits whose largest one tells whether they must be looked at one by one.
_BLOCK = 64
#: Lower than this below the largest, in nats, a logit adds nothing to the normaliser; -inf is one of them.
_FAR = np.float32(-87.0)


@reordered_infinite
def read(logits: Any, rows: Any, tokens: Any, values: Any, normalisers: Any) -> None:
    """Fill, for each of ``rows`` of ``logits``, float32 or bfloat16 by its bits, [rows, vocab_size]: ``tokens`` and
    ``values`` [rows, count], the largest first, smaller ids first on a tie; and ``normalisers`` [rows], unless it is
    empty."""
    size, count = logits.shape[1], tokens.shape[1]
    blocks = (size + _BLOCK - 1) // _BLOCK
    largest = np.empty(blocks, np.float32)
    for place in range(rows.shape[0]):
        row = logits[rows[place]]
        top = np.float32(-np.inf)
        for block in range(blocks):
            best = np.float32(-np.inf)
            for i in range(block * _BLOCK, min((block + 1) * _BLOCK, size)):
                best = max(best, widen(row[i]))
            largest[block] = best
            top = max(top, best)
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
            total = np.float64(0.0)
            for block in range(blocks):
                part = np.float32(0.0)
                for i in range(block * _BLOCK, min((block + 1) * _BLOCK, size)):
                    part += exp(max(widen(row[i]) - top, _FAR))
                total += part
            normalisers[place] = top + np.float32(np.log(total))
