"""Read a model's folder: its configuration and its tensors. Only safetensors files are ever read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrag.errors import ModelFilesError

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

    from specrag.models.catalog import ModelFiles

#: Values of ``config.model_type`` that the lean decoder computes.
FAMILY = frozenset({"llama", "qwen2", "qwen3", "mistral"})


def supports(config: Any) -> bool:
    """Whether the lean decoder supports this configuration; if not, transformers' own module is used."""
    return (
        config.model_type in FAMILY
        and getattr(config, "hidden_act", "silu") == "silu"
        and (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0) == 1.0
    )


INDEX = "model.safetensors.index.json"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")


def shipped_folder(kind: str) -> Path:
    """The folder of the weights that come with specrag: ``weights/`` in the installed package, or in the checkout.

    Args:
        kind: ``heads`` or ``drafters``.
    """
    installed = Path(__file__).parents[1] / "weights"
    checkout = Path(__file__).parents[3] / "weights"
    return (installed if installed.is_dir() else checkout) / kind


def check_folder(folder: Path) -> None:
    """Check that a folder has a configuration and safetensors.

    Raises:
        ModelFilesError: it lacks one of them.
    """
    weight_files(folder)
    if not (folder / "config.json").is_file():
        raise ModelFilesError(
            f"model folder {str(folder)!r} has no config.json: give a folder made by transformers"
        )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that together hold a model's weights.

    Raises:
        ModelFilesError: there are none, or one that the index names is missing.
    """
    index = folder / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelFilesError(
                f"model file {str(index)!r} is damaged ({error}): fetch it again"
            ) from error
        files = [folder / name for name in names]
    else:
        single = folder / "model.safetensors"
        files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    for file in files:
        if not file.is_file():
            raise ModelFilesError(f"model file {str(file)!r} is missing: fetch the model again")
    if not files:
        raise ModelFilesError(f"model folder {str(folder)!r} {_what_instead(folder)}")
    return files


def read_config_json(files: ModelFiles) -> dict[str, Any]:
    """The raw content of config.json, for loaders that know their architecture.

    Importing transformers, which ``read_config`` needs, takes longer than loading a small model.

    Raises:
        ModelFilesError: config.json is missing or damaged.
    """
    path = files.folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFilesError(f"model file {str(path)!r} is damaged ({error}): fetch it again") from error
    return config


def read_config(files: ModelFiles) -> PretrainedConfig:
    """The transformers configuration of a model.

    Raises:
        ModelFilesError: config.json is damaged or of an unknown architecture.
    """
    from transformers import AutoConfig

    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            files.folder, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:160]
        path = str(files.folder / "config.json")
        raise ModelFilesError(
            f"model file {path!r} cannot be used ({reason}): fetch the model again, or update transformers"
        ) from error
    return config


def read_weights(files: ModelFiles, *, device: str = "cpu") -> dict[str, torch.Tensor]:
    """All tensors of a model under transformers' names, in their stored dtype.

    On the CPU they are views of memory-mapped files: nothing is read until it is used.

    Raises:
        ModelFilesError: a file is missing, truncated or damaged.
    """
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, torch.Tensor] = {}
    for file in weight_files(files.folder):
        try:
            with safe_open(file, framework="pt", device=device) as opened:
                for name in opened.keys():  # noqa: SIM118 - not a dict
                    tensors[name] = opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelFilesError(
                f"model file {str(file)!r} is truncated or damaged ({error}): fetch the model again"
            ) from error
    return tensors


def _what_instead(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    pickled = [name for name in names if name.endswith(_PICKLED)]
    ggufs = [name for name in names if name.endswith(".gguf")]
    if pickled:
        return (
            f"has no safetensors, only {pickled[0]!r}, a pickle, which is never loaded: "
            "convert it with transformers' `save_pretrained`"
        )
    if ggufs:
        return f"has no safetensors: give the path of the GGUF file itself, {str(folder / ggufs[0])!r}"
    return "has no safetensors: give a folder with model.safetensors"
