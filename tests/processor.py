"""What this processor can do: how fast it is, and which products it has."""

from __future__ import annotations

import time

import pytest

from specrag.models.linear import PackedLinear

#: In bf16 such a processor is ten times slower, and equality of bits in bf16 rests on the packed product.
PACKED_BF16 = pytest.mark.skipif(
    not PackedLinear.available(), reason="this processor has no packed bf16 product"
)

#: Seconds for a million squares in CPython 3.11 on a Zen 5 core, where the limits in milliseconds were set.
_ZEN_5 = 0.05


def slowness() -> float:
    """How many times longer than on the processor where limits were set Python takes here, now; at least 1.

    Ask beside what is measured: what else the machine does slows the yardstick as well.
    """

    def squares() -> float:
        began = time.thread_time()
        sum(number * number for number in range(10**6))
        return time.thread_time() - began

    return max(1.0, min(squares() for _ in range(3)) / _ZEN_5)
