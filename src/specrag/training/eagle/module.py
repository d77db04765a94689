"""The EAGLE head as a module with gradients; its state dict has the names of the public format.

The top of :mod:`specrag.models.eagle_files` describes the format and what each tensor means. Texts lie side by side in
``T`` rows, each a feature of the target and the token after it; ``lengths`` are the rows of each text. Attention runs
text by text, so that nothing is computed for padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from specrag.models import HeadConfig


def head_config(target: Any) -> HeadConfig:
    """The configuration of a head for a target: one of the target's layers, with biases only in ``fc``.

    Args:
        target: its transformers configuration.

    Raises:
        InputError: its hidden size cannot be divided among its attention heads.
    """
    heads = int(target.num_attention_heads)
    rope = getattr(target, "rope_parameters", None) or {}
    return HeadConfig(
        hidden_size=int(target.hidden_size),
        intermediate_size=int(target.intermediate_size),
        vocab_size=int(target.vocab_size),
        num_attention_heads=heads,
        num_key_value_heads=int(getattr(target, "num_key_value_heads", None) or heads),
        rope_theta=float(rope.get("rope_theta") or 10_000.0),
        rms_norm_eps=float(target.rms_norm_eps),
    )


@dataclass(frozen=True, slots=True)
class KeysValues:
    """Keys and values of the rows of one step: ``[T, kv_heads, head_dim]`` each."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class Estimate:
    """The result of a step: the estimated next features ``[T, hidden_size]``, and what later steps attend to."""

    features: torch.Tensor
    memory: KeysValues


class TrainableHead(nn.Module):
    """Estimates the next feature from a feature and the token after it (EAGLE, section 4.1)."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.bias)
        self.layers = nn.ModuleList([_Layer(config)])

    def forward(
        self,
        embeddings: torch.Tensor,
        features: torch.Tensor,
        lengths: Sequence[int],
        earlier: Sequence[KeysValues] = (),
    ) -> Estimate:
        """Run one step for every row.

        Args:
            embeddings: of the token after each row's feature, ``[T, hidden_size]``.
            features: the target's in the first step; later the previous step's estimates, each from one row further up,
                ``[T, hidden_size]``.
            lengths: rows of each text.
            earlier: keys and values of the earlier steps. Step ``d`` (from 0) sees the target's features up to ``d``
                rows before it and, behind them, one estimate of each earlier step, as a draft of depth ``d`` does.
                The first ``d`` rows of a text are meaningless.
        """
        read = torch.cat([embeddings, features.to(embeddings.dtype)], dim=-1)
        mixed = self.fc(read.to(self.fc.weight.dtype)).float()  # sums stay in fp32
        layer: _Layer = self.layers[0]  # type: ignore[assignment]
        estimate: Estimate = layer(mixed, lengths, earlier)
        return estimate


class _Layer(nn.Module):
    """A Llama layer without the norm in front."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = _FeedForward(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x: torch.Tensor, lengths: Sequence[int], earlier: Sequence[KeysValues]) -> Estimate:
        memory = self.self_attn.offer(x, lengths)
        x = x + self.self_attn(x, lengths, [*earlier, memory])
        return Estimate(x + self.mlp(self.post_attention_layernorm(x)), memory)


class _FeedForward(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gated: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return gated


class _Attention(nn.Module):
    inverse: torch.Tensor

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self._config = config
        size, kv_size = config.hidden_size, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(size, size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(size, kv_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(size, kv_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(size, size, bias=False)
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        self.register_buffer("inverse", config.rope_theta**-exponents, persistent=False)

    def offer(self, x: torch.Tensor, lengths: Sequence[int]) -> KeysValues:
        """Keys and values of these rows."""
        keys = self.k_proj(x).unflatten(-1, (-1, self._config.head_dim))
        values = self.v_proj(x).unflatten(-1, (-1, self._config.head_dim))
        return KeysValues(self._rotate(keys, lengths), values)

    def forward(
        self, x: torch.Tensor, lengths: Sequence[int], memories: Sequence[KeysValues]
    ) -> torch.Tensor:
        """Mix the values that each row sees; the last memory is the rows' own."""
        queries = self._rotate(self.q_proj(x).unflatten(-1, (-1, self._config.head_dim)), lengths)
        group = self._config.num_attention_heads // self._config.num_key_value_heads
        # [memories, keys and values, heads, T, head_dim]
        seen = torch.stack([torch.stack([memory.keys, memory.values]) for memory in memories])
        seen = seen.repeat_interleave(group, dim=3).transpose(2, 3).to(queries.dtype)
        parts = zip(
            queries.transpose(0, 1).split(list(lengths), 1), seen.split(list(lengths), 3), strict=True
        )
        mixed = [_attend(text, memory) for text, memory in parts]
        out: torch.Tensor = self.o_proj(torch.cat(mixed, dim=1).transpose(0, 1).flatten(1))
        return out

    def _rotate(self, x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Rotary positions: a row has the position of its feature (Su et al. 2021, equation 34)."""
        positions = torch.cat([torch.arange(length, device=x.device) for length in lengths])
        angles = torch.outer(positions.float(), self.inverse)[:, None]
        first, second = x.float().chunk(2, dim=-1)
        turned = torch.cat(
            [
                first * angles.cos() - second * angles.sin(),
                second * angles.cos() + first * angles.sin(),
            ],
            dim=-1,
        )
        return turned.to(x.dtype)


def _attend(queries: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Attention within one text.

    Args:
        queries: ``[heads, rows, head_dim]``.
        seen: ``[steps, 2, heads, rows, head_dim]``; :meth:`TrainableHead.forward` says which of these a row sees.
    """
    depth = seen.shape[0] - 1
    if depth == 0:
        return F.scaled_dot_product_attention(queries, seen[0, 0], seen[0, 1], is_causal=True)
    rows, scale = queries.shape[1], queries.shape[2] ** -0.5
    scores = queries @ seen[0, 0].transpose(-1, -2) * scale
    future = torch.ones(rows, rows, dtype=torch.bool, device=queries.device).triu(1 - depth)
    scores = scores.masked_fill(future, float("-inf"))
    # A row sees the estimate of step d that belongs to its own draft, which is (depth - d) rows before it.
    drafts = [seen[step].roll(depth - step, dims=2) for step in range(1, depth + 1)]
    own = torch.stack([(queries * draft[0]).sum(-1) * scale for draft in drafts], dim=-1)
    weights = torch.softmax(torch.cat([scores, own], dim=-1).float(), dim=-1).to(queries.dtype)
    mixed = weights[..., :rows] @ seen[0, 1]
    for number, draft in enumerate(drafts):
        mixed = mixed + weights[..., rows + number, None] * draft[1]
    return mixed
