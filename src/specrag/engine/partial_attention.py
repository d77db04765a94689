"""Attention over one part of a row's keys, and joining the parts: one softmax in pieces.

With the logarithm of a part's sum of exponentials beside its weighted mean of values, the parts join to the attention
over all keys (Dao et al. 2022, FlashAttention, section 3.1). So every part is read by torch's fused kernel where it
lies, and no matrix of scores is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Part(NamedTuple):
    """Attention of some rows over a part of their keys.

    Attributes:
        mixed: ``[kv_heads, rows, head_dim]``, the values under a softmax over this part alone.
        log_sum: fp32 ``[kv_heads, rows]``, the logarithm of the sum of the exponentials of the part's scores.
    """

    mixed: torch.Tensor
    log_sum: torch.Tensor

    def rows(self, rows: slice) -> Part:
        """Some of the rows."""
        return Part(self.mixed[:, rows], self.log_sum[:, rows])


def attend_part(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None = None
) -> Part:
    """Attention over a part, on the CPU.

    Args:
        queries: ``[kv_heads, rows, head_dim]``, already scaled.
        keys: ``[kv_heads, keys, head_dim]``; ``values`` alike.
        mask: added to the scores, ``[rows, keys]``; every row sees a key.
    """
    mixed, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        queries[None], keys[None], values[None], 0.0, False, attn_mask=mask, scale=1.0
    )
    return Part(mixed[0], log_sum[0])


def join(parts: Sequence[Part]) -> torch.Tensor:
    """The attention over all parts' keys: ``[kv_heads, rows, head_dim]``."""
    shares = torch.softmax(torch.stack([part.log_sum for part in parts]), dim=0)
    mixed = torch.stack([part.mixed for part in parts])
    joined: torch.Tensor = (mixed * shares[..., None]).sum(dim=0).to(mixed.dtype)
    return joined
