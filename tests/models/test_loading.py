"""A model by name or folder, with every dtype and with an adapter, against transformers and peft."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from specrag.engine.attention.products import has_tiles
from specrag.engine.executor import run
from specrag.engine.outputs import LOGITS
from specrag.engine.session import Session
from specrag.errors import InputError, ModelFilesError
from specrag.models.decoder import LeanDecoder
from specrag.models.loading import DTYPES, LoadedModel, load_model
from specrag.models.transformers import TransformersModel

# peft asks the model under a name that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

TOKENS = [3, 14, 15, 9, 2, 6, 5, 35, 8, 9]


def _logits(loaded: LoadedModel) -> np.ndarray:
    """Logits after every token but the last, ``[len(TOKENS) - 1, vocab_size]``."""
    rows = run(Session(loaded.model).extend(TOKENS, LOGITS))
    return np.stack([row.logits for row in rows if row.logits is not None])


@torch.inference_mode()
def _oracle(module: torch.nn.Module) -> np.ndarray:
    logits: np.ndarray = module(torch.tensor([TOKENS])).logits[0, :-1].float().numpy()
    return logits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Path:
    """A tiny Llama with weights large enough that every token matters, saved by transformers."""
    path = tmp_path_factory.mktemp("tiny-llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    module = AutoModelForCausalLM.from_config(config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    module.save_pretrained(path)
    PreTrainedTokenizerFast(tokenizer_file=str(smollm2 / "tokenizer.json")).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Path:
    """A LoRA adapter of every linear layer, with both matrices filled."""
    path = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(1)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(r=4, lora_alpha=64, target_modules=targets)
    module = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config)
    for name, parameter in module.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    module.save_pretrained(path)
    return path


def _adapted(folder: Path, adapter: Path) -> torch.nn.Module:
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    adapted: torch.nn.Module = peft.PeftModel.from_pretrained(module, adapter).eval()
    return adapted


def test_a_folder_of_transformers_loads_as_it_is(folder: Path) -> None:
    loaded = load_model(folder, dtype="fp32")
    assert isinstance(loaded.model, LeanDecoder)
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    np.testing.assert_allclose(_logits(loaded), _oracle(module), atol=1e-4)


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != "auto"])
def test_an_adapter_is_merged_into_fused_and_quantised_weights(
    dtype: str, folder: Path, adapter: Path
) -> None:
    expected = _oracle(_adapted(folder, adapter))
    ours = _logits(load_model(folder, dtype=dtype, adapter=adapter))
    without = _oracle(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    spread = np.abs(expected - without).mean()
    assert spread > 0.1, "the adapter must matter for the comparison to mean something"
    allowed = {"fp32": 1e-4, "fp16": 0.02 * spread, "bf16": 0.15 * spread, "int8": 0.3 * spread}[dtype]
    assert np.abs(ours - expected).mean() < allowed


def test_another_architecture_runs_as_transformers_module(tmp_path: Path, folder: Path) -> None:
    from transformers import GPT2Config

    torch.manual_seed(2)
    config = GPT2Config(
        vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=1
    )
    module = AutoModelForCausalLM.from_config(config).eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    module.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    loaded = load_model(tmp_path, dtype="fp32")
    assert isinstance(loaded.model, TransformersModel)
    np.testing.assert_allclose(_logits(loaded), _oracle(module), atol=1e-4)
    with pytest.raises(InputError, match=r"dtype.*int8.*gpt2"):
        load_model(tmp_path, dtype="int8")
    usual = load_model(tmp_path, device="cpu")
    assert usual.dtype in ("bf16", "fp32")
    assert not usual.batch_invariant
    assert "may part" in usual.exactness


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch lacks oneDNN")
def test_on_the_cpu_the_default_is_8_bits_and_equal_bits(folder: Path) -> None:
    usual = load_model(folder, device="cpu")
    assert usual.dtype == "int8"
    assert usual.batch_invariant is not has_tiles()
    chosen = load_model(folder, dtype="int8", device="cpu", batch_invariant=not has_tiles())
    np.testing.assert_array_equal(_logits(usual), _logits(chosen))
    assert not load_model(folder, device="cpu", batch_invariant=False).batch_invariant


def test_a_missing_tensor_is_named(tmp_path: Path, folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    with pytest.raises(ModelFilesError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(tmp_path)


def test_values_that_cannot_be_used_are_named(folder: Path) -> None:
    with pytest.raises(InputError, match=r"dtype: 'fp8'.*fp32, bf16, fp16, int8"):
        load_model(folder, dtype="fp8")
    with pytest.raises(InputError, match="device: 'abacus'"):
        load_model(folder, device="abacus")
    with pytest.raises(InputError, match="batch_invariant"):
        load_model(folder, dtype="fp32", batch_invariant=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and torch sees none here")
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_gpu_gives_the_same_logits(dtype: str, folder: Path) -> None:
    expected = _logits(load_model(folder, dtype="fp32", device="cpu"))
    ours = _logits(load_model(folder, dtype=dtype, device="cuda:0"))
    assert np.abs(ours - expected).mean() < {"fp32": 1e-3, "bf16": 0.3, "fp16": 0.05}[dtype]
