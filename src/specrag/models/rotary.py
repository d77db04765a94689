"""Rotary position embedding, as a product of complex numbers.

The weights of queries and keys are reordered at load so that the two numbers of a rotated pair are neighbours;
attention scores do not change, and the rotation is one complex product in fp32.
"""

from __future__ import annotations

from typing import Any

import torch


def pair_order(head_dim: int) -> torch.Tensor:
    """For each place of the reordered head, the place that it had: ``[head_dim]``."""
    half = head_dim // 2
    return torch.stack([torch.arange(half), torch.arange(half) + half], dim=1).flatten()


def interleave(weight: torch.Tensor, heads: int, head_dim: int) -> torch.Tensor:
    """Reorder a projection's outputs, ``[heads * head_dim, ...]``."""
    shaped = weight.unflatten(0, (heads, head_dim))
    turned: torch.Tensor = shaped[:, pair_order(head_dim)]
    return turned.flatten(0, 1)


class Rotary:
    """Angles of every position.

    Args:
        config: a transformers configuration; its rope parameters, scaled kinds included, are read by
            transformers' own functions.
        head_dim: size of a head, all of it rotated.
    """

    def __init__(self, config: Any, head_dim: int, device: torch.device) -> None:
        parameters = dict(getattr(config, "rope_parameters", None) or {})
        kind = parameters.get("rope_type", "default")
        self.scaling = 1.0
        if kind == "default":
            theta = parameters.get("rope_theta", getattr(config, "rope_theta", 10_000.0))
            exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
            self.inverse = (1.0 / theta**exponents).to(device)
        else:
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            inverse, self.scaling = ROPE_INIT_FUNCTIONS[kind](config, device)
            self.inverse = inverse.to(device)

    def turns(self, positions: list[int]) -> torch.Tensor:
        """What the pairs of a row at each position are multiplied by, complex ``[rows, head_dim / 2]``."""
        angles = (
            torch.tensor(positions, dtype=torch.float32, device=self.inverse.device)[:, None] * self.inverse
        )
        return torch.polar(torch.full_like(angles, self.scaling), angles)
