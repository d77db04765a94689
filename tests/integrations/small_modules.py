"""transformers' modules with random weights, small enough for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers as tf

from specrag.integrations.transformers import Speculate

VOCAB = 61
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": 1,
}
GPT2: dict[str, Any] = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: tf.LlamaConfig(**SMALL),
    "gemma3": lambda: tf.Gemma3TextConfig(
        **SMALL, head_dim=16, sliding_window=16, layer_types=["sliding_attention", "full_attention"]
    ),
    "gpt2": lambda: tf.GPT2Config(**GPT2, bos_token_id=0, eos_token_id=None, pad_token_id=1),
    "mixtral": lambda: tf.MixtralConfig(**SMALL, num_local_experts=4, sliding_window=None),
    # Computed by transformers in a way that the packed pass does not follow.
    "granite": lambda: tf.GraniteConfig(**SMALL, logits_scaling=4.0),
    "bloom": lambda: tf.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4),
    "mamba": lambda: tf.MambaConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4, use_mambapy=False
    ),
}
ROW = [5, 9, 33, 7, 5, 9, 33, 7, 5, 9]


def build(name: str) -> Any:
    torch.manual_seed(len(name))
    module = tf.AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager").eval()
    for parameter in module.parameters():
        # The initial weights are so small that every token would look alike.
        torch.nn.init.normal_(parameter, std=0.3)
    return module


def batch(*rows: Sequence[int]) -> dict[str, torch.Tensor]:
    """Rows padded on the left."""
    length = max(map(len, rows))
    ids = [[1] * (length - len(row)) + list(row) for row in rows]
    mask = [[0] * (length - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def check_equal(module: Any, speculation: Speculate, inputs: dict[str, Any], **options: Any) -> Any:
    """The output, which is that of ``generate`` alone."""
    expected = module.generate(**inputs, **options)
    found = module.generate(**inputs, **options, custom_generate=speculation)
    assert found.tolist() == expected.tolist()
    assert found.dtype == expected.dtype
    return found
