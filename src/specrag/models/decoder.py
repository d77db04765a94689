"""The lean decoder of the Llama family: Llama, SmolLM, Qwen2, Qwen3, Mistral.

A single function computes a packed pass: the query, key and value projections are fused into one matrix, gate and up
into another, and attention runs over the sessions' own extents. There is no autograd, there are no modules and only few
operations per layer, because on a small model speculation would otherwise merely appear to save time by saving the
operations' overhead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F

from specrag.engine import HiddenState, KeyValueCache, KeyValueShape, Row, Segment
from specrag.engine.attention import AttentionPlan, compile_loops, has_bf16_products, has_loops
from specrag.engine.cpu.spinning import watch_others
from specrag.errors import InputError, ModelFilesError
from specrag.models.fused_layers import DecoderLayer, FusedLayers
from specrag.models.linear import Int8Linear, Linear, build_gated, build_linear
from specrag.models.logits import read_rows
from specrag.models.row_ops import Rotary, interleave, pair_order, row_ops
from specrag.models.weights import FAMILY, supports


class LeanDecoder:
    """A :class:`~specrag.engine.passes.SessionModel` for the Llama family.

    Args:
        config: the model's transformers configuration.
        weights: tensors by transformers' names; emptied while the layers are built, so that memory holds the weights
            only once.
        dtype: type of activations, keys and values: float32, bfloat16 or float16.
        int8: 8-bit weights and activations in the linear layers.
        batch_invariant: a row's bits do not depend on the other rows of the pass (CPU, bf16 or int8).
        int8_kv: keep keys and values in 8 bits.
    """

    def __init__(
        self,
        config: Any,
        weights: dict[str, torch.Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device,
        int8: bool = False,
        batch_invariant: bool = False,
        int8_kv: bool = False,
    ) -> None:
        _check(config, dtype, device, int8, batch_invariant)
        self.config = config
        self.batch_invariant = batch_invariant
        self.device = device
        self.dtype = dtype
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = getattr(config, "num_key_value_heads", None) or self._heads
        self._head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // self._heads
        self._group = self._heads // self._kv_heads
        self._eps: float = config.rms_norm_eps
        self._ops = row_ops(dtype, device)
        self._build = {"int8": int8, "invariant": batch_invariant}
        self._embedding = weights.pop("model.embed_tokens.weight").to(device, copy=True)
        head = weights.pop("lm_head.weight", None)
        self._head = build_linear(
            (self._embedding if head is None else head).to(device=device, dtype=dtype), None, **self._build
        )
        self._norm = weights.pop("model.norm.weight").to(device=device, dtype=dtype, copy=True)
        windows = _windows(config)
        self._layers = [
            self._layer(weights, index, windows[index]) for index in range(config.num_hidden_layers)
        ]
        self._fused = FusedLayers.made_of(self._layers, self._eps)
        self._rotary = Rotary(config, self._head_dim, device)
        self._factors = torch.ones(self._heads + self._kv_heads, device=device)
        self._factors[: self._heads] = self._head_dim**-0.5
        self._shape = KeyValueShape(len(self._layers), self._kv_heads, self._head_dim, dtype, device, int8_kv)
        self._compiled = has_loops(self._shape) and not any(windows) and not batch_invariant
        if self._compiled:
            compile_loops(self._shape, self._group)

    @property
    def attention(self) -> str:
        """How attention is summed where that depends on the processor and not on the pass; else nothing."""
        if not self.batch_invariant:
            return ""
        return "bf16 products" if has_bf16_products(self._shape) else "float32"

    @property
    def vocab_size(self) -> int:
        return int(self._embedding.shape[0])

    @property
    def context_length(self) -> int:
        return int(self.config.max_position_embeddings)

    @property
    def embedding(self) -> torch.Tensor:
        """The embedding matrix, ``[vocab_size, hidden_size]``, in its stored dtype."""
        return self._embedding

    def new_cache(self) -> KeyValueCache:
        return KeyValueCache(self._shape, contiguous=self.batch_invariant)

    @torch.inference_mode()
    def move(self, source: KeyValueCache, first: int, last: int, target: KeyValueCache) -> None:
        """See :class:`~specrag.engine.session.Movable`; computed in float32 and rounded again to the cache's dtype."""
        rows, distance = last - first, target.length - first
        own = target.prepare(rows)
        start = target.length - target.base
        for index in range(len(self._layers)):
            numbers = source.rows(index, first, last)
            keys = self._rotary.moved(numbers[0], distance)
            own.write(index, start, torch.stack([keys, numbers[1]]))
        target.accept(range(rows))

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment]) -> list[list[Row]]:
        watch_others()
        plan = AttentionPlan(segments, self._group, invariant=self.batch_invariant, compiled=self._compiled)
        tokens = torch.tensor([token for segment in segments for token in segment.tokens], device=self.device)
        rotation = self._ops.rotation(self._rotary.turns(plan.positions), self._factors)
        wanted = [outputs for segment in segments for outputs in segment.outputs]
        kept = sorted({name for outputs in wanted for name in outputs.hidden})
        hidden: dict[HiddenState, torch.Tensor] = {}
        x = F.embedding(tokens, self._embedding).to(self.dtype)
        last = len(self._layers) - 1
        qkv = self._queries(0, x)
        with nullcontext() if self._fused is None else self._fused.rows(len(tokens)) as fused:
            advance = self._advance if fused is None else fused.advance
            for index in range(last):
                x, qkv = advance(index, self._attention(index, qkv, rotation, plan), x)
            x = self._layers[last].output(self._attention(last, qkv, rotation, plan), x)
        y = self._ops.norm(x, self._layers[last].mlp_norm, self._eps)
        if "ffn_input" in kept:
            hidden["ffn_input"] = y
        hidden["last"] = x = self._layers[last].down(self._layers[last].gated(y), x)
        hidden["final"] = self._ops.norm(x, self._norm, self._eps)
        rows = iter(read_rows(wanted, hidden, self.logits))
        return [[next(rows) for _ in segment.tokens] for segment in segments]

    def _queries(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """A layer's queries, keys and values, side by side."""
        layer = self._layers[index]
        return layer.qkv(self._ops.norm(x, layer.attention_norm, self._eps))

    def _advance(self, index: int, mixed: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """From a layer's attention to the next one's, an operation after the other (:meth:`FusedRows.advance`)."""
        layer = self._layers[index]
        x = layer.output(mixed, x)
        x = layer.down(layer.gated(self._ops.norm(x, layer.mlp_norm, self._eps)), x)
        return x, self._queries(index + 1, x)

    def _attention(self, index: int, qkv: torch.Tensor, rotation: Any, plan: AttentionPlan) -> torch.Tensor:
        layer, turned = self._layers[index], self._heads + self._kv_heads
        heads = qkv.unflatten(-1, (-1, self._head_dim))  # [rows, heads + 2 * kv_heads, head_dim]
        queries_keys = heads[:, :turned]
        if layer.query_norm is not None and layer.key_norm is not None:
            queries_keys = torch.cat(
                [
                    F.rms_norm(heads[:, : self._heads], (self._head_dim,), layer.query_norm, self._eps),
                    F.rms_norm(heads[:, self._heads : turned], (self._head_dim,), layer.key_norm, self._eps),
                ],
                dim=1,
            )
        queries_keys = self._ops.rotate(queries_keys, rotation)
        plan.write(index, queries_keys[:, self._heads :], heads[:, turned:])
        return plan.attend_rows(index, queries_keys[:, : self._heads], window=layer.window)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the output matrix: ``[rows, hidden_size]`` after the final norm to ``[rows, vocab_size]``."""
        if isinstance(self._head, Int8Linear):
            return self._head.product(hidden)
        return self._head(hidden)

    def _layer(self, weights: dict[str, torch.Tensor], index: int, window: int | None) -> DecoderLayer:
        prefix = f"model.layers.{index}."

        def take(name: str) -> torch.Tensor | None:
            tensor = weights.pop(prefix + name, None)
            if tensor is None:
                return None
            # Copy the tensors that are kept unpacked (the vectors), so that nothing keeps the file mapped.
            return tensor.to(device=self.device, dtype=self.dtype, copy=tensor.dim() == 1)

        def need(name: str) -> torch.Tensor:
            tensor = take(name)
            if tensor is None:
                raise ModelFilesError(
                    f"tensor {prefix + name!r} is missing from the model's files: fetch the model again"
                )
            return tensor

        def joined(
            names: Sequence[str], turned: Mapping[str, int]
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            parts, biases = [], []
            for name in names:
                weight, bias = need(f"{name}.weight"), take(f"{name}.bias")
                if name in turned:
                    weight = interleave(weight, turned[name], self._head_dim)
                    bias = None if bias is None else interleave(bias, turned[name], self._head_dim)
                parts.append(weight)
                biases.append(bias)
            present = [bias for bias in biases if bias is not None]
            if present and len(present) != len(parts):
                present = [
                    torch.zeros(part.shape[0], dtype=self.dtype, device=self.device) if bias is None else bias
                    for part, bias in zip(parts, biases, strict=True)
                ]
            weight = parts[0] if len(parts) == 1 else torch.cat(parts)
            return weight, torch.cat(present) if present else None

        def fuse(names: Sequence[str], turned: Mapping[str, int] | None = None) -> Linear:
            weight, bias = joined(names, turned or {})
            return build_linear(weight, bias, **self._build)

        order = pair_order(self._head_dim).to(self.device)
        gate_up, gate_up_bias = joined(["mlp.gate_proj", "mlp.up_proj"], {})
        query_norm, key_norm = take("self_attn.q_norm.weight"), take("self_attn.k_norm.weight")
        return DecoderLayer(
            attention_norm=need("input_layernorm.weight"),
            qkv=fuse(
                ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
                {"self_attn.q_proj": self._heads, "self_attn.k_proj": self._kv_heads},
            ),
            query_norm=None if query_norm is None else query_norm[order],
            key_norm=None if key_norm is None else key_norm[order],
            output=fuse(["self_attn.o_proj"]),
            mlp_norm=need("post_attention_layernorm.weight"),
            gated=build_gated(gate_up, gate_up_bias, self._ops, **self._build),
            down=fuse(["mlp.down_proj"]),
            window=window,
        )


def _windows(config: Any) -> list[int | None]:
    """The sliding window of each layer, ``None`` for a layer with full attention."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return [window] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _check(config: Any, dtype: torch.dtype, device: torch.device, int8: bool, invariant: bool) -> None:
    if not supports(config):
        raise InputError(
            "model_type", config.model_type, f"the lean decoder knows {', '.join(sorted(FAMILY))}"
        )
    if int8 and device.type != "cpu":
        raise InputError("dtype", "int8", f"8-bit layers run on the CPU, not on {device}; take bf16")
    if int8 and not torch.backends.mkldnn.is_available():
        raise InputError("dtype", "int8", "this torch build lacks oneDNN; take bf16")
    if invariant and not int8 and (dtype != torch.bfloat16 or device.type != "cpu"):
        raise InputError("batch_invariant", True, "it holds on the CPU in bf16 and int8; take one of them")
