"""Names, and what a user reads when a name or a folder does not do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING

from specrag.errors import InputError, ModelFilesError
from specrag.models import catalog
from specrag.models.catalog import ModelFiles
from specrag.models.catalog.names import catalog_name
from specrag.models.catalog.sources import HUB, SOURCES
from specrag.models.weights import read_config, read_config_json, read_weights
from tests.models import tiny


def local_copy(files: ModelFiles, folder: Path) -> Path:
    shutil.copytree(files.folder, folder)
    return folder


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("smollm2-135", "smollm2-135m"),
        ("SmolLM2-136M", "smollm2-135m"),
        ("qwen3:40b", "qwen3-4b"),
        ("qwen-coder-1.5b", "qwen2.5-coder-1.5b"),
    ],
)
def test_unknown_name_suggests_the_nearest(name: str, nearest: str, own_home: Path) -> None:
    with pytest.raises(InputError, match=f"did you mean '{nearest}'") as caught:
        catalog.resolve(name)
    assert all(known in str(caught.value) for known in SOURCES)


@pytest.mark.parametrize(
    ("spelling", "known"),
    [
        ("qwen3:4b", "qwen3-4b"),
        ("llama3.2:1b", "llama-3.2-1b"),
        ("SmolLM2:135M", "smollm2-135m"),
        ("qwen2.5-coder:1.5b", "qwen2.5-coder-1.5b"),
        ("Qwen/Qwen3-4B", "Qwen/Qwen3-4B"),
        (".", "."),
    ],
)
def test_names_may_be_spelled_as_ollama_does(spelling: str, known: str) -> None:
    assert catalog_name(spelling) == known


def test_configurations_of_the_hub_are_transformers_own() -> None:
    assert {model.model_type for model in HUB.values()} <= set(CONFIG_MAPPING)
    assert not HUB.keys() & SOURCES.keys()


def test_a_name_of_the_hub_is_looked_for_there(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def download(repository: str, **_: object) -> str:
        asked.append(repository)
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ModelFilesError, match=r"meta-llama/Llama-3\.2-1B-Instruct"):
        catalog.resolve("llama3.2:1b")
    with pytest.raises(ModelFilesError, match="Qwen3-8B"):
        catalog.pull("qwen3-8b")
    assert asked == ["meta-llama/Llama-3.2-1B-Instruct", "Qwen/Qwen3-8B"]


def test_the_default_is_what_memory_and_disk_carry(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"memory": 10**11, "disk": 10**12}
    monkeypatch.setattr("specrag.engine.memory.free_bytes", lambda _device: free["memory"])
    monkeypatch.setattr("shutil.disk_usage", lambda _path: SimpleNamespace(free=free["disk"]))
    assert catalog.default_model() == "smollm2-135m"  # SPECRAG_MODEL of these tests
    monkeypatch.delenv("SPECRAG_MODEL")
    assert catalog.default_model() == "qwen2.5-coder-1.5b"
    free["disk"] = 10**9
    assert catalog.default_model() == "smollm2-135m"
    free.update(disk=10**12, memory=10**9)
    assert catalog.default_model() == "smollm2-135m"


def test_missing_paths(own_home: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match=r"none\.gguf.*does not exist"):
        catalog.resolve(tmp_path / "none.gguf")
    with pytest.raises(InputError, match="no such folder or file"):
        catalog.resolve(tmp_path / "none")


def test_local_folder(tiny_files: ModelFiles, tmp_path: Path) -> None:
    files = catalog.resolve(local_copy(tiny_files, tmp_path / "mine"))
    assert files.name == "mine"
    assert read_weights(files).keys() == read_weights(tiny_files).keys()


def test_sharded_folder(tiny_files: ModelFiles, tmp_path: Path) -> None:
    folder = local_copy(tiny_files, tmp_path / "sharded")
    weights = {name: tensor.clone() for name, tensor in read_weights(tiny_files).items()}
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    shards = {"model-1.safetensors": names[:5], "model-2.safetensors": names[5:]}
    for file, held in shards.items():
        save_file({name: weights[name] for name in held}, folder / file)
    index = {"weight_map": {name: file for file, held in shards.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    files = catalog.resolve(folder)
    read = read_weights(files)
    assert all(torch.equal(read[name], weights[name]) for name in names)
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(ModelFilesError, match=r"model-2\.safetensors' is missing"):
        catalog.resolve(folder)


@pytest.mark.parametrize("pickle", ["pytorch_model.bin", "model.pt"])
def test_pickle_is_refused(pickle: str, tiny_files: ModelFiles, tmp_path: Path) -> None:
    folder = local_copy(tiny_files, tmp_path / "pickled")
    (folder / "model.safetensors").unlink()
    torch.save({"weight": torch.zeros(1)}, folder / pickle)
    with pytest.raises(ModelFilesError, match=f"{pickle}.*never loaded"):
        catalog.resolve(folder)


def test_folder_with_a_gguf_only(tiny_gguf: Path) -> None:
    with pytest.raises(ModelFilesError, match=r"give the path of the GGUF file itself.*tiny\.gguf"):
        catalog.resolve(tiny_gguf.parent)


def test_truncated_safetensors_is_named(tiny_files: ModelFiles, tmp_path: Path) -> None:
    folder = local_copy(tiny_files, tmp_path / "cut")
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(50_000)
    with pytest.raises(ModelFilesError, match=r"cut/model\.safetensors' is truncated or damaged"):
        read_weights(catalog.resolve(folder))


def test_damaged_config_is_named(tiny_files: ModelFiles, tmp_path: Path) -> None:
    folder = local_copy(tiny_files, tmp_path / "cut")
    (folder / "config.json").write_text('{"model_type": "lla')
    for read in (read_config, read_config_json):
        with pytest.raises(ModelFilesError, match=r"cut/config\.json"):
            read(catalog.resolve(folder))


def test_hub_id_from_the_cache(tiny_files: ModelFiles, tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--some--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    folder = local_copy(tiny_files, repository / "snapshots" / ("0" * 40))
    extra = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = tiny.specrag(
        "models", "path", "some/tiny", "--json", environment=tiny.environment(tmp_path / "home") | extra
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"name": "some/tiny", "path": str(folder)}


def test_hub_out_of_reach_is_one_line(tmp_path: Path) -> None:
    extra = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = tiny.specrag(
        "models", "pull", "some/model", environment=tiny.environment(tmp_path / "home") | extra
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: model 'some/model' cannot be fetched from the hub")
    assert len(done.stderr.splitlines()) == 1


def test_encoder_is_a_folder_of_its_own(model_home: Path) -> None:
    files = catalog.resolve("minilm-l6-v2")
    assert read_config_json(files)["hidden_size"] == 384
    assert len(read_weights(files)) > 100


def test_command_line_list(own_home: Path) -> None:
    done = tiny.specrag("models", "list", "--json", environment=tiny.environment(own_home))
    assert done.returncode == 0, done.stderr
    listed = {model["name"]: model for model in json.loads(done.stdout)}
    assert listed.keys() == SOURCES.keys()
    assert not any(model["pulled"] for model in listed.values())
    assert not own_home.exists()
    table = tiny.specrag("models", "list", environment=tiny.environment(own_home)).stdout
    assert all(name in table for name in SOURCES)


def test_command_line_pull_and_path(model_home: Path, smollm2_files: ModelFiles) -> None:
    environment = tiny.environment(model_home)
    pulled = tiny.specrag("models", "pull", "smollm2-135m", "--json", environment=environment)
    assert pulled.returncode == 0, pulled.stderr
    assert json.loads(pulled.stdout)["folder"] == str(smollm2_files.folder)
    where = tiny.specrag("models", "path", "smollm2-135m", environment=environment)
    assert where.stdout == f"{smollm2_files.folder}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("pull", "smolm2-135m"), "did you mean 'smollm2-135m'"),
        (("path", "gemma-3-270m"), "has not been pulled: run `specrag models pull gemma-3-270m`"),
        (("pull", "./missing.gguf"), "does not exist"),
    ],
)
def test_command_line_errors(arguments: tuple[str, ...], message: str, own_home: Path) -> None:
    done = tiny.specrag("models", *arguments, environment=tiny.environment(own_home))
    assert done.returncode == 1
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


@pytest.mark.parametrize("command", ["list", "pull", "path"])
def test_help_shows_an_example(command: str, own_home: Path) -> None:
    done = tiny.specrag("models", command, "--help", environment=tiny.environment(own_home))
    assert f"Example: specrag models {command}" in done.stdout
