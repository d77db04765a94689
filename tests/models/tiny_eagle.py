"""Tiny targets, EAGLE heads in exactly the public files' names and shapes, and a slow plain reference."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from specrag.engine.executor import run
from specrag.engine.outputs import Outputs
from specrag.engine.session import Session
from specrag.models.decoder import LeanDecoder
from specrag.models.eagle_files import HeadFiles, read_head
from specrag.models.eagle_head import EagleHead

VOCAB, HIDDEN = 61, 32


def write_head(
    folder: Path, kind: str, embedding: torch.Tensor, *, dtype: torch.dtype, seed: int = 0
) -> Path:
    """Write a head as ``yuhuili/EAGLE-*`` hold theirs.

    Args:
        kind: ``llama`` (grouped keys, no biases, as for LLaMA-3), ``vicuna`` (bias in ``fc``, sizes left to their
            defaults) or ``qwen2`` (biases in ``fc`` and in attention, as many key heads as query heads).
        embedding: the target's.
        dtype: of the tensors.
    """
    vocab, hidden = embedding.shape
    heads, wide = 4, 48
    keys = hidden // 2 if kind == "llama" else hidden
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": wide,
        "max_position_embeddings": 2048,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": 1,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.28.1",
        "use_cache": True,
        "vocab_size": vocab,
    }
    shapes = {
        "embed_tokens.weight": (vocab, hidden),
        "fc.weight": (hidden, 2 * hidden),
        "layers.0.self_attn.q_proj.weight": (hidden, hidden),
        "layers.0.self_attn.k_proj.weight": (keys, hidden),
        "layers.0.self_attn.v_proj.weight": (keys, hidden),
        "layers.0.self_attn.o_proj.weight": (hidden, hidden),
        "layers.0.mlp.gate_proj.weight": (wide, hidden),
        "layers.0.mlp.up_proj.weight": (wide, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, wide),
        "layers.0.post_attention_layernorm.weight": (hidden,),
    }
    if kind == "llama":
        config |= {"num_key_value_heads": heads // 2, "rope_theta": 500_000.0, "bias": False}
    else:
        shapes["fc.bias"] = (hidden,)
    if kind == "qwen2":
        config |= {
            "num_key_value_heads": heads,
            "rope_theta": 1_000_000.0,
            "qkv_bias": True,
            "rope_scaling": None,
        }
        for name in ("q", "k", "v"):
            shapes[f"layers.0.self_attn.{name}_proj.bias"] = (hidden,)
    draw = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=draw) * 0.3 for name, shape in shapes.items()}
    tensors["layers.0.post_attention_layernorm.weight"] += 1.0
    tensors["embed_tokens.weight"] = embedding.float()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def fit_head(folder: Path, target: LeanDecoder) -> None:
    """Make a head guess well without training: ``fc`` solves least squares on random text, the layer adds nothing."""
    draw = torch.Generator().manual_seed(1)
    read, estimated = [], []
    for tokens in torch.randint(0, target.vocab_size, (5, 200), generator=draw).tolist():
        rows = run(Session(target).extend(tokens, Outputs(hidden=("final",))))
        features = torch.stack([row.hidden["final"] for row in rows]).float()
        read.append(torch.cat([target.embedding[tokens[1:-1]].float(), features[:-1]], dim=1))
        estimated.append(features[1:])
    tensors = load_file(folder / "model.safetensors")
    dtype = tensors["fc.weight"].dtype
    solution = torch.linalg.lstsq(torch.cat(read), torch.cat(estimated)).solution
    tensors["fc.weight"] = solution.T.to(dtype).contiguous()
    for name in ("layers.0.self_attn.o_proj.weight", "layers.0.mlp.down_proj.weight", "fc.bias"):
        if name in tensors:
            tensors[name] = torch.zeros_like(tensors[name])
    save_file(tensors, folder / "model.safetensors")


def tiny_target(
    kind: str, *, dtype: torch.dtype = torch.float32, batch_invariant: bool = False
) -> LeanDecoder:
    """A random target of two layers; ``qwen2`` has biases and its own output matrix, ``llama`` shares it."""
    import transformers as tf

    make = tf.Qwen2Config if kind == "qwen2" else tf.LlamaConfig
    config = make(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=kind != "qwen2",
    )
    torch.manual_seed(len(kind))
    module = tf.AutoModelForCausalLM.from_config(config)
    for parameter in module.parameters():
        # The initial weights are so small that every token would look alike.
        torch.nn.init.normal_(parameter, std=0.3)
    weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    if kind != "qwen2":
        del weights["lm_head.weight"]
    return LeanDecoder(
        config, weights, dtype=dtype, device=torch.device("cpu"), batch_invariant=batch_invariant
    )


def output_matrix(target: LeanDecoder) -> torch.Tensor:
    """``[vocab_size, hidden_size]``, read off its products with unit vectors."""
    with torch.inference_mode():
        return target.logits(torch.eye(HIDDEN, dtype=target.dtype)).T.float().clone()


@dataclass(frozen=True)
class HeadCase:
    """A target, a head's files, and the network made of them."""

    target: LeanDecoder
    folder: Path
    files: HeadFiles
    head: EagleHead


def make_case(kind: str, folder: Path, *, dtype: torch.dtype = torch.float32) -> HeadCase:
    """A head of random weights for a tiny target."""
    target = tiny_target(kind, dtype=dtype)
    write_head(folder, kind, target.embedding, dtype=dtype)
    files = read_head(folder, target.embedding)
    return HeadCase(target, folder, files, EagleHead(files, target))


class SlowHead:
    """One head, one path, no cache, no packing: the formulas as EAGLE's section 4.1 and Llama's layer have them."""

    def __init__(self, files: HeadFiles, embedding: torch.Tensor, output: torch.Tensor) -> None:
        self._config = files.config
        self._weights = {name: tensor.float() for name, tensor in files.weights.items()}
        self._embedding = embedding.float()
        self._output = output

    def feature(self, tokens: Sequence[int], features: Sequence[torch.Tensor]) -> torch.Tensor:
        """The estimate behind the last of these rows, ``[hidden_size]``."""
        fused = torch.cat([self._embedding[list(tokens)], torch.stack(list(features)).float()], dim=-1)
        x = self._linear("fc", fused)
        y = self._linear("layers.0.self_attn.o_proj", self._mixed(x))
        x = x + y
        norm = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._config.rms_norm_eps)
        y = norm * self._weights["layers.0.post_attention_layernorm.weight"]
        gate = self._linear("layers.0.mlp.gate_proj", y)
        inner = gate * torch.sigmoid(gate) * self._linear("layers.0.mlp.up_proj", y)
        return (x + self._linear("layers.0.mlp.down_proj", inner))[-1]

    def log_probs(self, feature: torch.Tensor, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Of the next token, ``[vocab_size]``, or of some tokens alone."""
        output = self._output if tokens is None else self._output[tokens]
        return torch.log_softmax(output @ feature, dim=-1)

    def _mixed(self, x: torch.Tensor) -> torch.Tensor:
        heads, kv_heads = self._config.num_attention_heads, self._config.num_key_value_heads
        size = self._config.hidden_size // heads
        queries = self._turned(self._linear("layers.0.self_attn.q_proj", x).view(-1, heads, size))
        keys = self._turned(self._linear("layers.0.self_attn.k_proj", x).view(-1, kv_heads, size))
        values = self._linear("layers.0.self_attn.v_proj", x).view(-1, kv_heads, size)
        mixed = torch.empty_like(queries)
        for head in range(heads):
            other = head * kv_heads // heads
            scores = queries[:, head] @ keys[:, other].T / size**0.5
            later = torch.ones_like(scores, dtype=torch.bool).triu(1)
            mixed[:, head] = torch.softmax(scores.masked_fill(later, -torch.inf), dim=-1) @ values[:, other]
        return mixed.flatten(1)

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        """Rotary positions 0, 1, ...: the halves of a head are the parts of complex numbers."""
        half = x.shape[-1] // 2
        frequencies = self._config.rope_theta ** (-torch.arange(half) / half)
        angles = torch.arange(x.shape[0])[:, None, None] * frequencies
        first, second = x[..., :half], x[..., half:]
        return torch.cat(
            [
                first * angles.cos() - second * angles.sin(),
                second * angles.cos() + first * angles.sin(),
            ],
            dim=-1,
        )

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        y = x @ self._weights[f"{name}.weight"].T
        bias = self._weights.get(f"{name}.bias")
        return y if bias is None else y + bias
