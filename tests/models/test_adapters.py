"""Merging a LoRA adapter gives what peft's own merge gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from specrag.errors import ModelFilesError
from specrag.models.adapters import merge_adapter
from specrag.models.catalog import ModelFiles
from specrag.models.weights import read_weights

# peft asks the model under a name that transformers has renamed.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning"),
]


def small_llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def small_gpt2() -> Any:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64))


def with_adapter(model: Any, folder: Path, **options: Any) -> Any:
    """A peft model whose adapter is random (both matrices), saved in ``folder``."""
    adapted = get_peft_model(model, LoraConfig(**options))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    adapted.save_pretrained(folder)
    return adapted


LLAMA_CASES: dict[str, dict[str, Any]] = {
    "attention": {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "everything": {"r": 8, "lora_alpha": 4, "target_modules": "all-linear"},
    "rank-stabilised": {
        "r": 8,
        "lora_alpha": 16,
        "use_rslora": True,
        "target_modules": ["o_proj", "up_proj"],
    },
    "patterns": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "k_proj", "down_proj"],
        "rank_pattern": {"layers.1.self_attn.q_proj": 2, "k_proj": 6},
        "alpha_pattern": {"k_proj": 32, r".*layers\.0\.mlp\.down_proj": 3},
    },
    "stabilised patterns": {
        "r": 4,
        "lora_alpha": 8,
        "use_rslora": True,
        "target_modules": ["q_proj", "k_proj"],
        "rank_pattern": {"k_proj": 6},
    },
    "embedding and head": {"r": 4, "lora_alpha": 8, "target_modules": ["embed_tokens", "lm_head", "q_proj"]},
}


@pytest.mark.parametrize("case", LLAMA_CASES)
def test_equals_peft_on_a_llama(case: str, tmp_path: Path) -> None:
    state = {name: tensor.clone() for name, tensor in small_llama().state_dict().items()}
    adapted = with_adapter(small_llama(), tmp_path, **LLAMA_CASES[case])
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert_merged(state, adapted, tmp_path, changed=sum("lora_" in name for name in saved) // 2)


def test_equals_peft_on_a_gpt2(tmp_path: Path) -> None:
    state = {name: tensor.clone() for name, tensor in small_gpt2().state_dict().items()}
    options = {"r": 4, "lora_alpha": 16, "target_modules": ["c_attn"], "fan_in_fan_out": True}
    assert_merged(state, with_adapter(small_gpt2(), tmp_path, **options), tmp_path, changed=2)


def assert_merged(state: dict[str, torch.Tensor], adapted: Any, folder: Path, *, changed: int) -> None:
    before = {name: tensor.clone() for name, tensor in state.items()}
    merged = merge_adapter(state, folder)
    expected = adapted.merge_and_unload().state_dict()
    assert merged.keys() == expected.keys()
    different = [name for name in merged if not torch.equal(merged[name], before[name])]
    assert len(different) == changed
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-6)
        assert torch.equal(state[name], before[name])  # the given weights are left alone


def test_equals_peft_on_smollm2(smollm2_files: ModelFiles, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(smollm2_files.folder, dtype=torch.float32)
    adapted = with_adapter(model, tmp_path, r=4, lora_alpha=8, target_modules=["q_proj", "gate_proj"])
    weights = read_weights(smollm2_files)
    merged = merge_adapter(weights, tmp_path)
    expected = adapted.merge_and_unload().state_dict()
    different = 0
    for name, tensor in merged.items():
        assert tensor.dtype == torch.bfloat16
        # fp32 sums rounded once; peft's may differ in the last fp32 bit, which can cross a rounding border.
        torch.testing.assert_close(tensor.float(), expected[name], rtol=2**-8, atol=0)
        different += not torch.equal(tensor, weights[name])
    assert different == 60


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer_replication": [[0, 2], [0, 2]]}, "layer_replication"),
        ({"use_dora": True}, "use_dora=True, which is not supported"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]"),
        ({"bias": "all"}, "bias='all'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
    ],
)
def test_refuses_what_is_not_plain_lora(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = small_llama()
    with_adapter(model, tmp_path, r=4, target_modules=["q_proj"], **options)
    with pytest.raises(ModelFilesError, match=message):
        merge_adapter(small_llama().state_dict(), tmp_path)


def test_refuses_another_kind_of_adapter(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    with pytest.raises(ModelFilesError, match="type 'IA3'"):
        merge_adapter({}, tmp_path)


def test_refuses_an_adapter_of_another_model(tmp_path: Path) -> None:
    with_adapter(small_llama(), tmp_path, r=4, target_modules=["q_proj"])
    state = dict(small_llama().state_dict())
    name = "model.layers.1.self_attn.q_proj.weight"
    with pytest.raises(ModelFilesError, match="belongs to another model"):
        merge_adapter(state | {name: torch.zeros(16, 32)}, tmp_path)
    del state[name]
    with pytest.raises(ModelFilesError, match=r"layers\.1\.self_attn\.q_proj', which this model lacks"):
        merge_adapter(state, tmp_path)


def test_refuses_a_pickle(tmp_path: Path) -> None:
    with_adapter(small_llama(), tmp_path, r=4, target_modules=["q_proj"])
    (tmp_path / "adapter_model.safetensors").unlink()
    torch.save({}, tmp_path / "adapter_model.bin")
    with pytest.raises(ModelFilesError, match=r"adapter_model\.bin, a pickle, which is never loaded"):
        merge_adapter(small_llama().state_dict(), tmp_path)


def test_refuses_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match=r"no adapter_config\.json"):
        merge_adapter({}, tmp_path)
    with_adapter(small_llama(), tmp_path, r=4, target_modules=["q_proj"])
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file(
        {name: tensor for name, tensor in tensors.items() if "layers.0" not in name or "lora_A" in name}, path
    )
    with pytest.raises(ModelFilesError, match="one of the two matrices"):
        merge_adapter(small_llama().state_dict(), tmp_path)
    save_file(tensors | {"base_model.model.extra.weight": torch.zeros(1)}, path)
    with pytest.raises(ModelFilesError, match=r"extra\.weight', which is no LoRA matrix"):
        merge_adapter(small_llama().state_dict(), tmp_path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ModelFilesError, match=r"adapter_model\.safetensors' cannot be read"):
        merge_adapter(small_llama().state_dict(), tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config)[:40])
    with pytest.raises(ModelFilesError, match=r"adapter_config\.json' cannot be read"):
        merge_adapter({}, tmp_path)
