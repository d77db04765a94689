"""EAGLE heads on disk: what is read, and what is refused before any work, by name, shape and remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specrag.engine.outputs import Outputs
from specrag.engine.passes import Segment
from specrag.errors import InputError, ModelFilesError, SpecragError
from specrag.models import eagle_files
from specrag.models.decoder import LeanDecoder
from specrag.models.eagle_files import HeadConfig, head_folder, read_head
from specrag.models.eagle_head import load_head
from specrag.models.loading import LoadedModel, load_model
from specrag.models.toy import ToyModel
from tests.models.tiny_eagle import SlowHead, write_head

EMBEDDING = torch.randn(61, 32, generator=torch.Generator().manual_seed(5))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_head(tmp_path / "head", "qwen2", EMBEDDING, dtype=torch.float16)


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | values
    kept = {name: value for name, value in config.items() if value != "left out"}
    path.write_text(json.dumps(kept), encoding="utf-8")


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def refusal(folder: Path, embedding: torch.Tensor = EMBEDDING) -> str:
    """The error, which must be one line that says what to do."""
    with pytest.raises(SpecragError) as caught:
        read_head(folder, embedding)
    message = str(caught.value)
    assert "\n" not in message
    assert ": " in message
    return message


# -- what is read ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["llama", "vicuna", "qwen2"])
def test_the_public_kinds_are_read(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    files = read_head(write_head(tmp_path, kind, EMBEDDING, dtype=dtype), EMBEDDING)
    assert files.config == HeadConfig(
        hidden_size=32,
        intermediate_size=48,
        vocab_size=61,
        num_attention_heads=4,
        num_key_value_heads=2 if kind == "llama" else 4,
        rope_theta={"llama": 500_000.0, "vicuna": 10_000.0, "qwen2": 1_000_000.0}[kind],
        rms_norm_eps=1e-5,
        bias=kind != "llama",
        qkv_bias=kind == "qwen2",
    )
    assert {name: tuple(tensor.shape) for name, tensor in files.weights.items()} == files.config.shapes()
    assert all(tensor.dtype == dtype for tensor in files.weights.values())
    assert files.vocabulary is None


def test_the_embedding_may_be_missing(folder: Path) -> None:
    before = read_head(folder, EMBEDDING)
    change_tensors(folder, lambda tensors: tensors.pop("embed_tokens.weight"))
    after = read_head(folder, EMBEDDING)
    assert after.config == before.config
    assert after.weights.keys() == before.weights.keys()


def test_a_head_is_found_by_its_folder_its_name_or_its_id(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert head_folder(str(folder)) == folder
    write_head(tmp_path / "heads" / "tiny", "llama", EMBEDDING, dtype=torch.float32)
    monkeypatch.setattr(eagle_files, "SHIPPED", tmp_path / "heads")
    assert head_folder("tiny") == tmp_path / "heads" / "tiny"
    with pytest.raises(InputError, match=r"eagle:tinny.*one of tiny, the folder"):
        head_folder("tinny")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InputError, match="no/such/head"):
        head_folder("no/such/head")


# -- a head for another model ---------------------------------------------------------------------------------


def test_another_hidden_size_or_vocabulary_is_refused(folder: Path) -> None:
    message = refusal(folder, torch.zeros(61, 64))
    assert "hidden_size 32" in message
    assert "the target has 64" in message
    message = refusal(folder, torch.zeros(70, 32))
    assert "vocab_size 61" in message
    assert "the target has 70" in message


def test_another_model_of_the_same_sizes_is_refused(folder: Path) -> None:
    other = torch.randn(61, 32, generator=torch.Generator().manual_seed(6))
    assert "embed_tokens.weight" in refusal(folder, other)
    # Rounded to 8 bits it is still the same model.
    step = EMBEDDING.abs().amax(dim=1, keepdim=True) / 127
    read_head(folder, (EMBEDDING / step).round() * step)


# -- tensors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(HeadConfig(32, 48, 61, 4, 4, qkv_bias=True).shapes()))
def test_every_missing_tensor_is_named(folder: Path, name: str) -> None:
    shape = list(HeadConfig(32, 48, 61, 4, 4, qkv_bias=True).shapes()[name])
    change_tensors(folder, lambda tensors: tensors.pop(name))
    message = refusal(folder)
    assert repr(name) in message
    assert str(shape) in message


def test_a_tensor_of_another_shape_is_named(folder: Path) -> None:
    name = "layers.0.self_attn.k_proj.weight"
    change_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(16, 32)}))
    message = refusal(folder)
    for part in (name, "[16, 32]", "[32, 32]"):
        assert part in message


def test_a_tensor_of_another_type_is_named(folder: Path) -> None:
    change_tensors(
        folder, lambda tensors: tensors.update({"fc.weight": torch.zeros(32, 64, dtype=torch.int8)})
    )
    message = refusal(folder)
    for part in ("fc.weight", "I8 [32, 64]", "F16"):
        assert part in message


def test_a_tensor_too_many_is_named(folder: Path) -> None:
    change_tensors(
        folder, lambda tensors: tensors.update({"layers.0.input_layernorm.weight": torch.ones(32)})
    )
    message = refusal(folder)
    assert "layers.0.input_layernorm.weight" in message
    assert "[32]" in message


def test_a_configuration_without_the_files_biases_is_refused(folder: Path) -> None:
    change_config(folder, qkv_bias=False)
    assert "layers.0.self_attn.k_proj.bias" in refusal(folder)


def test_heads_of_eagle_3_are_refused(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.update({"d2t": torch.zeros(9, dtype=torch.int64)}))
    assert "EAGLE-3" in refusal(folder)
    change_config(folder, draft_vocab_size=32_000)
    assert "EAGLE-3" in refusal(folder)


# -- files ----------------------------------------------------------------------------------------------------


def test_a_truncated_file_is_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    content = file.read_bytes()
    for length in (0, 5, 100, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:length])
        assert "truncated or damaged" in refusal(folder)


def test_a_pickle_is_never_loaded(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    message = refusal(folder)
    for part in ("pytorch_model.bin", "never loaded", "safetensors.torch.save_file"):
        assert part in message


def test_an_empty_folder_is_refused(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "no config.json" in refusal(tmp_path / "empty")
    (folder / "model.safetensors").unlink()
    assert "no model.safetensors" in refusal(folder)


@pytest.mark.parametrize("content", ["", "[1, 2]", "{", '"text"', "null"])
def test_a_damaged_configuration_is_refused(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content, encoding="utf-8")
    assert "config.json" in refusal(folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_size", "left out"),
        ("hidden_size", "32"),
        ("hidden_size", True),
        ("intermediate_size", 0),
        ("vocab_size", None),
        ("vocab_size", 61.0),
        ("num_attention_heads", 5),
        ("num_attention_heads", 32),
        ("num_key_value_heads", 3),
        ("num_key_value_heads", -4),
        ("num_hidden_layers", 2),
        ("rope_theta", 0),
        ("rope_theta", "10000"),
        ("rms_norm_eps", -1e-5),
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
        ("hidden_act", "gelu"),
        ("bias", "yes"),
        ("qkv_bias", 1),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(folder: Path, name: str, value: object) -> None:
    change_config(folder, **{name: value})
    assert name in refusal(folder)


@pytest.mark.parametrize(
    "tensors",
    [
        {"tokens": torch.tensor([1.0, 2.0])},
        {"tokens": torch.tensor([1, 2], dtype=torch.int32)},
        {"tokens": torch.tensor([[1, 2]])},
        {"tokens": torch.empty(0, dtype=torch.int64)},
        {"tokens": torch.tensor([2, 1])},
        {"tokens": torch.tensor([1, 1])},
        {"tokens": torch.tensor([-1, 1])},
        {"tokens": torch.tensor([1, 61])},
        {"ids": torch.tensor([1, 2])},
        {"tokens": torch.tensor([1, 2]), "more": torch.tensor([1])},
    ],
)
def test_a_vocabulary_that_cannot_be_is_refused(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    file = folder / "draft_vocabulary.safetensors"
    save_file({"tokens": torch.tensor([0, 5, 60])}, file)
    read_head(folder, EMBEDDING)
    save_file(tensors, file)
    assert "draft_vocabulary.safetensors" in refusal(folder)
    file.write_bytes(file.read_bytes()[:-3])
    assert "draft_vocabulary.safetensors" in refusal(folder)


# -- with a model's own files ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loaded(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECRAG_HOME", str(tmp_path_factory.mktemp("home")))
        return load_model(tiny_gguf, dtype="fp32", device="cpu")


def test_a_head_is_loaded_for_a_model(loaded: LoadedModel, tmp_path: Path) -> None:
    target = loaded.model
    assert isinstance(target, LeanDecoder)
    folder = write_head(tmp_path / "head", "llama", target.embedding, dtype=torch.float32)
    tokens = torch.arange(3, 200, 7)
    save_file({"tokens": tokens}, folder / "draft_vocabulary.safetensors")
    head = load_head(str(folder), loaded)
    assert (head.vocab_size, head.context_length) == (target.vocab_size, target.context_length)
    feature = torch.randn(64, generator=torch.Generator().manual_seed(0))
    segment = Segment(head.new_cache(), [9], None, [Outputs(top_k=4)], [feature])
    row = head.forward([segment])[0][0]
    slow = SlowHead(read_head(folder, target.embedding), target.embedding, target.embedding.float())
    expected = torch.topk(slow.log_probs(slow.feature([9], [feature]), tokens), 4)
    assert row.top_tokens is not None
    assert row.top_tokens.tolist() == tokens[expected.indices].tolist()
    torch.testing.assert_close(torch.from_numpy(row.top_log_probs), expected.values, atol=1e-4, rtol=1e-4)


def test_only_the_lean_decoders_models_have_heads(loaded: LoadedModel, folder: Path) -> None:
    with pytest.raises(InputError, match="Llama, Qwen and Mistral"):
        load_head(str(folder), replace(loaded, model=ToyModel()))


def test_the_head_of_another_model_is_not_loaded(loaded: LoadedModel, folder: Path) -> None:
    with pytest.raises(InputError, match="hidden_size 32"):
        load_head(str(folder), loaded)


def test_errors_of_files_are_of_their_own_class(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelFilesError):
        read_head(folder, EMBEDDING)
