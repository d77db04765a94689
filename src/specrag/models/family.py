"""Which configurations the lean decoder computes; needs no torch."""

from __future__ import annotations

from typing import Any

#: Values of ``config.model_type`` that the lean decoder computes.
FAMILY = frozenset({"llama", "qwen2", "qwen3", "mistral"})


def supports(config: Any) -> bool:
    """Whether the lean decoder computes this configuration; else transformers' own module does."""
    return (
        config.model_type in FAMILY
        and getattr(config, "hidden_act", "silu") == "silu"
        and (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0) == 1.0
    )
