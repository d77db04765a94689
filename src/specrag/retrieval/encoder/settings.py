"""Settings read from a sentence-transformers model: pooling, token limit, prompts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from specrag.errors import InputError, ModelFilesError
from specrag.models import read_config_json
from specrag.models.catalog import ModelFiles, Store, home, sha256_of

Pooling = Literal["mean", "cls"]

_MODULES = "modules.json"
_TRUSTED = "sentence_transformers."
#: E5 models were trained with these prefixes (Wang et al., 2022), but their files do not say so.
_E5 = re.compile(r"(?:^|[/_-])e5-(?:small|base|large)", re.IGNORECASE)
_E5_PROMPTS: dict[str | None, str] = {"query": "query: ", "passage": "passage: "}

_PICKLED = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class EncoderSettings:
    """Settings of an encoder.

    Attributes:
        pooling: ``mean`` or ``cls``; None for anything else, which only sentence-transformers computes.
        max_tokens: longer texts are truncated.
        query_prompt, passage_prompt: prepended to every query and passage.
    """

    pooling: Pooling | None
    max_tokens: int
    query_prompt: str
    passage_prompt: str


def read_settings(name: str | Path, files: ModelFiles) -> EncoderSettings:
    """Read the settings; refuse models that are not sentence encoders or would run foreign code.

    Raises:
        InputError: it has no list of modules, or a module that is not sentence-transformers' own.
        ModelFilesError: a file is missing, damaged, or a pickle.
    """
    folder = files.folder
    if not (folder / _MODULES).is_file():
        remedy = f"it is no sentence encoder: give a model made by sentence-transformers ({_MODULES})"
        raise InputError("encoder", str(name), remedy)
    if not (folder / "tokenizer.json").is_file():
        raise ModelFilesError(
            f"encoder: {str(folder)!r} has no tokenizer.json: save it with a fast tokenizer"
        )
    modules = check_modules("encoder", name, folder)
    saved = _read_object(folder / "config_sentence_transformers.json")
    prompts = saved.get("prompts") or (_E5_PROMPTS if _E5.search(files.name) else {})
    default = prompts.get(saved.get("default_prompt_name"), "")
    passage = next((prompts[key] for key in ("document", "passage", "corpus") if key in prompts), default)
    query = prompts.get("query", default)
    return EncoderSettings(
        pooling=_read_pooling(folder, modules, prompted=bool(query or passage)),
        max_tokens=_read_max_tokens(folder, read_config_json(files)),
        query_prompt=query or "",
        passage_prompt=passage or "",
    )


def check_modules(field: str, name: str | Path, folder: Path) -> Sequence[Mapping[str, str]]:
    """The entries of modules.json, each checked to be safe to load; empty without the file.

    Args:
        field: what the model is used as, for error messages.

    Raises:
        InputError: a module is the model's own code.
        ModelFilesError: the file is damaged, or a module's weights are a pickle.
    """
    path = folder / _MODULES
    modules = _read_json(path) if path.is_file() else []
    if not isinstance(modules, list) or not all(_is_module(module) for module in modules):
        raise ModelFilesError(f"{field}: {str(path)!r} is damaged: fetch the model again")
    for module in modules:
        if not module["type"].startswith(_TRUSTED):
            remedy = f"its module {module['type']} is code of its own, which is never run"
            raise InputError(field, str(name), remedy)
        _refuse_pickles(field, folder / module["path"])
    return modules


def _read_pooling(folder: Path, modules: Sequence[Mapping[str, str]], *, prompted: bool) -> Pooling | None:
    """The pooling, if the modules are only a transformer, a pooling known here, and possibly a normalisation."""
    kinds = [module["type"].rsplit(".", 1)[-1] for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        return None
    config = _read_object(folder / modules[1]["path"] / "config.json")
    if prompted and not config.get("include_prompt", True):
        return None
    mode = config.get("pooling_mode")
    if mode is None:
        prefix = "pooling_mode_"
        on = [key for key, value in config.items() if key.startswith(prefix) and value is True]
        mode = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}.get("".join(on))
    return cast("Pooling", mode) if mode in ("mean", "cls") else None


def _read_max_tokens(folder: Path, config: Mapping[str, Any]) -> int:
    """The model's own token limit, else the limit set by its positions and its tokenizer."""
    limits = [
        _read_object(folder / "sentence_bert_config.json").get("max_seq_length"),
        config.get("max_position_embeddings"),
        _read_object(folder / "tokenizer_config.json").get("model_max_length"),
    ]
    numbers = [limit for limit in limits if isinstance(limit, int) and limit > 0]
    if isinstance(limits[0], int) and limits[0] > 0:
        numbers = [limit for limit in limits[:2] if isinstance(limit, int)]
    if not numbers:
        raise ModelFilesError(f"encoder: {str(folder)!r} does not say how many tokens it reads")
    return min(numbers)


def _refuse_pickles(field: str, folder: Path) -> None:
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    pickled = [name for name in names if name.endswith(_PICKLED)]
    if pickled and not any(name.endswith(".safetensors") for name in names):
        raise ModelFilesError(
            f"{field}: {str(folder / pickled[0])!r} is a pickle, which is never loaded: save the model as safetensors"
        )


def _is_module(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    path = value.get("path")
    inside = isinstance(path, str) and not Path(path).is_absolute() and ".." not in Path(path).parts
    return inside and isinstance(value.get("type"), str)


def _read_json(path: Path) -> object:
    try:
        content: object = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFilesError(
            f"encoder: {str(path)!r} is damaged ({error}): fetch the model again"
        ) from error
    return content


def _read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one if there is no such file."""
    content = _read_json(path) if path.is_file() else {}
    if not isinstance(content, dict):
        raise ModelFilesError(f"encoder: {str(path)!r} is damaged: fetch the model again")
    return content


def checksums(files: ModelFiles) -> dict[str, str]:
    """The sha256 of every file that the vectors depend on; for catalog models they are taken from the manifest."""
    store = Store(home())
    manifest = store.manifest(files.name) if files.folder == store.folder(files.name).resolve() else None
    known = {} if manifest is None else {name: record.sha256 for name, record in manifest.files.items()}
    kinds = ("*.safetensors", "tokenizer.json", _MODULES, "config.json")
    paths = sorted({path for kind in kinds for path in files.folder.rglob(kind)})
    names = {path.relative_to(files.folder).as_posix(): path for path in paths}
    return {name: known.get(name) or sha256_of(path) for name, path in names.items()}
