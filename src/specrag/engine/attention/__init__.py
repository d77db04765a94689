"""Attention of a packed pass: plans, masks, shared extents, and the backends that compute it."""

from typing import TYPE_CHECKING

from specrag.lazy import lazy_names

if TYPE_CHECKING:
    from specrag.engine.attention.compiled import compile_loops, has_bf16_products, has_loops
    from specrag.engine.attention.plan import AttentionPlan
    from specrag.engine.attention.products import has_tiles
else:
    __getattr__ = lazy_names(__name__)

__all__ = [
    "AttentionPlan",
    "compile_loops",
    "has_bf16_products",
    "has_loops",
    "has_tiles",
]
