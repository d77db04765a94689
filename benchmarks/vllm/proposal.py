"""What the drafter takes for a proposal, without vLLM: ``python -m benchmarks.vllm.proposal``.

Microseconds of this thread a row and step. In each step one token comes, the last guesses are compared with it, and
others are made. The texts are drawn, words about as frequent as in natural text, and go on with a copy of themselves.
"""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace

import numpy as np

from specrag.integrations.vllm import Drafter

_STEPS = 380
_INDEXED = 4096  # tokens of all rows in a step, at most


def microseconds(length: int, rows: int) -> float:
    """A row's share of a proposal: the 25th percentile of some hundred steps.

    Args:
        length: tokens of each row before.
        rows: in the batch.
    """
    tokens = np.random.default_rng(7).zipf(1.3, (rows, length + 2 * _STEPS)).astype(np.int64) % 5000
    tokens[:, length:] = tokens[:, 50 : 50 + 2 * _STEPS]
    tokens = tokens.astype(np.int32)
    model = SimpleNamespace(max_model_len=10**6, tokenizer="", model="", get_vocab_size=lambda: 10**6)
    config = SimpleNamespace(speculative_config=SimpleNamespace(num_speculative_tokens=8), model_config=model)
    now = [0.0]
    drafter = Drafter(config, clock=lambda: now[0])
    lengths = np.full(rows, length)
    for _ in range(2 + rows * length // _INDEXED):
        drafter.propose([[]] * rows, lengths, tokens)
    spent = []
    for step in range(1, _STEPS + 1):
        now[0] += 0.02
        sampled = [[int(row[length + step - 1])] for row in tokens]
        began = time.thread_time()
        drafter.propose(sampled, lengths + step, tokens)
        spent.append(1e6 * (time.thread_time() - began) / rows)
    if drafter.stats.reasons["pays"] < 0.8 * _STEPS:
        raise AssertionError(f"hardly anything was guessed: {drafter.stats.line()}")
    return float(np.percentile(spent, 25))


def main() -> None:
    """Print a table; each figure is the least of three."""
    sys.stdout.write("| rows | tokens | microseconds a row |\n|---:|---:|---:|\n")
    for rows in (1, 8, 16):
        for length in (8_192, 100_000):
            least = min(microseconds(length, rows) for _ in range(3))
            sys.stdout.write(f"| {rows} | {length:,} | {least:.0f} |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
