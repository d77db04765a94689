"""The files of an EAGLE head: the public checkpoint format of EAGLE-1 and EAGLE-2 (``yuhuili/EAGLE-*``).

Li et al. 2024, "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty" and "EAGLE-2". Names, shapes
and meaning as in the authors' repository (SafeAILab/EAGLE, ``eagle/model/cnets1.py`` and ``configs.py``).

A head is a folder with ``config.json``, one ``model.safetensors`` and, of our own, an optional
``draft_vocabulary.safetensors``. With ``H`` = hidden_size, ``I`` = intermediate_size, ``V`` = vocab_size (of the
target, padding included), ``D = H / num_attention_heads``, ``K = num_key_value_heads * D``, the tensors (float16,
bfloat16 or float32) are::

    embed_tokens.weight                        [V, H]   may be missing: a frozen copy of the target's embedding
    fc.weight                                  [H, 2H]  reads concat(embedding of the next token, feature)
    fc.bias                                    [H]      only if config "bias" is true or missing
    layers.0.self_attn.q_proj.weight           [H, H]
    layers.0.self_attn.k_proj.weight           [K, H]
    layers.0.self_attn.v_proj.weight           [K, H]
    layers.0.self_attn.o_proj.weight           [H, H]   never a bias
    layers.0.self_attn.{q,k,v}_proj.bias       [H], [K], [K]   only if config "qkv_bias" is true (Qwen2)
    layers.0.mlp.gate_proj.weight              [I, H]
    layers.0.mlp.up_proj.weight                [I, H]
    layers.0.mlp.down_proj.weight              [H, I]
    layers.0.post_attention_layernorm.weight   [H]

There is no input norm, no final norm and no output matrix: a feature is the target's last hidden state *after* its
final norm (what its output matrix reads; ``HiddenState`` ``"final"``), the head's output estimates the next one,
and the target's own output matrix turns it into logits. Row ``i`` reads the feature of position ``i`` and the
token of position ``i + 1``, stands at rotary position ``i`` and estimates the feature of position ``i + 1``.

``config.json`` is that of a Llama of one layer; read are ``hidden_size``, ``intermediate_size``, ``vocab_size``,
``num_attention_heads``, ``num_hidden_layers`` (1), and with these defaults ``num_key_value_heads``
(num_attention_heads), ``rope_theta`` (10000), ``rope_scaling`` (null, nothing else), ``rms_norm_eps`` (1e-6),
``hidden_act`` ("silu"), ``bias`` (true: ``fc`` has one; the LLaMA-3 heads say false), ``qkv_bias`` (false). The
head's number of heads is its own: the Qwen2 heads have as many key and value heads as query heads.

``draft_vocabulary.safetensors`` holds one tensor ``tokens``, int64 ``[n]``, ascending and distinct: the tokens that
the head may propose. Only their rows of the output matrix are computed.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from specrag.errors import InputError, ModelFilesError

CONFIG, WEIGHTS, VOCABULARY = "config.json", "model.safetensors", "draft_vocabulary.safetensors"
#: Name of the tensor in :data:`VOCABULARY`, and of the one in :data:`WEIGHTS` that may be missing.
TOKENS, EMBEDDING = "tokens", "embed_tokens.weight"

_COUNTS = ("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """What is read of :data:`CONFIG`; see the top of this file.

    Raises:
        InputError: a value cannot be used.
    """

    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    bias: bool = True
    qkv_bias: bool = False

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(name, value, "give a positive integer in the head's config.json")
        for name in ("rope_theta", "rms_norm_eps"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 < value < math.inf:
                raise InputError(name, value, "give a positive number in the head's config.json")
        for name in ("bias", "qkv_bias"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(name, getattr(self, name), "give true or false in the head's config.json")
        if self.hidden_size % self.num_attention_heads or self.head_dim % 2:
            sizes = f"{self.num_attention_heads} for hidden_size {self.hidden_size}"
            raise InputError(
                "num_attention_heads", sizes, "heads of equal and even size must fill hidden_size"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            sizes = f"{self.num_key_value_heads} for {self.num_attention_heads} heads"
            raise InputError("num_key_value_heads", sizes, "it must divide num_attention_heads")

    @property
    def head_dim(self) -> int:
        """Size of an attention head."""
        return self.hidden_size // self.num_attention_heads

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors that a head must have, the embedding left out, and their shapes."""
        hidden, wide = self.hidden_size, self.intermediate_size
        keys = self.num_key_value_heads * self.head_dim
        attention, mlp = "layers.0.self_attn.", "layers.0.mlp."
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (hidden, 2 * hidden),
            f"{attention}q_proj.weight": (hidden, hidden),
            f"{attention}k_proj.weight": (keys, hidden),
            f"{attention}v_proj.weight": (keys, hidden),
            f"{attention}o_proj.weight": (hidden, hidden),
            f"{mlp}gate_proj.weight": (wide, hidden),
            f"{mlp}up_proj.weight": (wide, hidden),
            f"{mlp}down_proj.weight": (hidden, wide),
            "layers.0.post_attention_layernorm.weight": (hidden,),
        }
        if self.bias:
            shapes["fc.bias"] = (hidden,)
        if self.qkv_bias:
            for name, size in (("q", hidden), ("k", keys), ("v", keys)):
                shapes[f"{attention}{name}_proj.bias"] = (size,)
        return shapes


def read_head_config(folder: Path) -> HeadConfig:
    """The configuration of a head.

    Raises:
        InputError: a value cannot be used.
        ModelFilesError: ``config.json`` is missing or damaged.
    """
    path = folder / CONFIG
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        values = dict(values.items())
    except FileNotFoundError:
        raise ModelFilesError(
            f"EAGLE head {str(folder)!r} has no {CONFIG}: give the folder of an EAGLE-2 head"
        ) from None
    except (OSError, ValueError, AttributeError) as error:
        raise ModelFilesError(f"EAGLE head's {str(path)!r} is damaged ({error}): fetch it again") from error
    for name, wanted in (("num_hidden_layers", 1), ("hidden_act", "silu"), ("rope_scaling", None)):
        found = values.get(name, wanted)
        if found != wanted:
            raise InputError(name, found, f"an EAGLE-2 head has {json.dumps(wanted)} in its {CONFIG}")
    if "draft_vocab_size" in values:
        raise InputError(
            f"EAGLE head {str(folder)!r}", "EAGLE-3", "only heads of EAGLE-1 and EAGLE-2 are read"
        )
    values.setdefault("num_key_value_heads", values.get("num_attention_heads"))
    missing = [name for name in _COUNTS if values.get(name) is None]
    if missing:
        raise ModelFilesError(f"EAGLE head's {str(path)!r} lacks {', '.join(missing)}: fetch it again")
    return HeadConfig(**{item.name: values[item.name] for item in fields(HeadConfig) if item.name in values})
