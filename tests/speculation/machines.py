"""What passes take on machines that are made up, and cost models that know one."""

from __future__ import annotations

import random

from specrag.engine.passes import Others
from specrag.speculation.schedule.cost_model import CostModel


def machine(rows: int, context: int) -> float:
    """A CPU's passes, seconds."""
    return 0.020 + 0.0009 * rows + 0.000003 * context + 0.0000002 * rows * context


def taught(cost: object = machine, rounds: int = 200, noise: float = 0.05) -> CostModel:
    rng = random.Random(1)
    model = CostModel()
    for _ in range(rounds):
        rows, context = rng.choice((1, 1, 2, 5, 9, 17, 33, 61)), rng.choice((100, 500, 1000, 4000))
        model.observe(rows, context, cost(rows, context) * rng.gauss(1, noise))  # type: ignore[operator]
    return model


def crowd(requests: int, *, rows: int = 3, context: int = 400) -> Others:
    return Others(requests, requests * rows, requests * context, requests * rows * context)


def packed(rows: int, context: int, others: Others) -> float:
    """What a CPU's pass of several sessions takes, seconds."""
    beside = 0.0009 * others.rows + 0.000003 * others.context + 0.0000002 * others.row_context
    return machine(rows, context) + beside
