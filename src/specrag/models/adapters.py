"""LoRA adapters in the ``peft`` format, added to a model's weights.

Reference: Hu et al. 2021, "LoRA", section 4.1: W' = W + s B A with s = alpha / r; rank-stabilised LoRA
(Kalajdzievski 2023) has s = alpha / sqrt(r).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrag.errors import InputError, ModelFilesError
from specrag.models.catalog.sources import SOURCES
from specrag.models.catalog.store import sha256_of
from specrag.models.weights import shipped_folder

if TYPE_CHECKING:
    import torch

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
#: Written by ``specrag train drafter`` next to an adapter or a model: how it was trained.
DRAFTER_RECORD = "drafter.json"

#: Adapters that come with specrag, a folder each.
SHIPPED = shipped_folder("drafters")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_KEY = re.compile(
    r"base_model\.model\.(?P<module>.+)\.(lora_(?P<embedding>embedding_)?(?P<side>[AB])(\.weight)?"
    r"|(?P<base>base_layer)\.weight)"
)

# Options that change the meaning of the two matrices; merging them as plain LoRA would be silently wrong.
_UNSUPPORTED = (
    "use_dora",
    "use_qalora",
    "lora_bias",
    "layer_replication",
    "modules_to_save",
    "target_parameters",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "use_bdlora",
    "velora_config",
)
_PLAIN_STARTS = (None, True, False, "gaussian", "orthogonal", "eva")


def find_adapter(name: str | Path) -> Path:
    """The folder of an adapter, given as a folder or by the name of one that comes with specrag.

    Raises:
        InputError: there is neither.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    shipped = [folder.name for folder in shipped_adapters()]
    if str(name) in shipped:
        return SHIPPED / str(name)
    known = (
        f", or one that comes with specrag: {', '.join(shipped)}" if shipped else "; none comes with specrag"
    )
    remedy = f"there is no such folder; give one written by peft, with an {ADAPTER_CONFIG}{known}"
    raise InputError("adapter", str(name), remedy)


def shipped_adapters(base: str | None = None) -> list[Path]:
    """The folders of the adapters that come with specrag; only those of ``base`` if it is given."""
    folders = sorted(path.parent for path in SHIPPED.glob(f"*/{ADAPTER_CONFIG}"))
    return [each for each in folders if base in (None, _read_config(each).get("base_model_name_or_path"))]


def drafter_form(folder: Path) -> str | None:
    """The form of drafts that ``specrag train drafter`` taught an adapter or a model; ``None`` if it did not train it.

    Raises:
        ModelFilesError: its record is damaged.
    """
    record = folder / DRAFTER_RECORD
    if not record.is_file():
        return None
    try:
        form: str = json.loads(record.read_text(encoding="utf-8"))["settings"].get("form", "paper")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFilesError(
            f"adapter {str(folder)!r}: {DRAFTER_RECORD} is damaged: train it anew"
        ) from error
    return form


def check_adapter(folder: Path, base: str) -> None:
    """Check that an adapter is there and belongs to a model, without reading its weights.

    Raises:
        ModelFilesError: files are missing or damaged, it is not a plain LoRA, or it names another model.
    """
    _check_base(_read_config(folder), folder, base)
    _weights_of(folder)


def adapter_digest(folder: Path) -> str:
    """SHA-256 of everything that decides what a drafter with this adapter writes: weights, config, training record.

    Raises:
        ModelFilesError: files are missing.
    """
    names = (ADAPTER_CONFIG, _weights_of(folder).name, DRAFTER_RECORD)
    digests = [sha256_of(folder / name) if (folder / name).is_file() else "" for name in names]
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()


def merge_adapter(
    state: Mapping[str, torch.Tensor], folder: Path, *, base: str | None = None
) -> dict[str, torch.Tensor]:
    """The weights with a LoRA adapter added; tensors that it does not change are shared with ``state``.

    Sums are computed in fp32 and rounded once to the weight's own dtype, before any fusing or quantisation.

    Args:
        state: a model's tensors under transformers' names.
        folder: holds adapter_config.json and adapter_model.safetensors.
        base: the model's name, compared with the one in the adapter's configuration.

    Raises:
        ModelFilesError: files are missing or damaged, the adapter is not a plain LoRA, or it fits another model.
    """
    config = _read_config(folder)
    _check_base(config, folder, base)
    pairs = _read_pairs(folder)
    merged = dict(state)
    for module, pair in pairs.items():
        name = f"{module}.weight"
        if name not in merged:
            raise ModelFilesError(f"adapter {str(folder)!r} changes {module!r}, which this model lacks")
        # peft saves the embedding along with its adapter, since training may have added tokens to it.
        weight = pair.get("base", merged[name])
        delta = _delta(pair, _scale(config, module, rank=pair["A"].shape[0]))
        # The rows of an embedding are tokens, those of a Conv1D (GPT-2) are inputs: both are transposed linear layers.
        if "embedding" in pair or config.get("fan_in_fan_out"):
            delta = delta.T
        target = merged[name]
        if not delta.shape == weight.shape == target.shape:
            raise ModelFilesError(
                f"adapter {str(folder)!r} has shape {list(delta.shape)} for {module!r}, the model has "
                f"{list(target.shape)}: it belongs to another model"
            )
        merged[name] = (weight.to(target.device).float() + delta.to(target.device)).to(target.dtype)
    return merged


def _check_base(config: Mapping[str, Any], folder: Path, base: str | None) -> None:
    """Refuse an adapter that names another model; shapes alone do not tell a model from its chat version.

    Names are compared if both are catalog names or both are hub ids. A folder may have any name.
    """
    wanted = config.get("base_model_name_or_path")
    if not base or not isinstance(wanted, str) or wanted == base:
        return
    of_catalog = wanted in SOURCES and base in SOURCES
    of_hub = bool(_HUB_ID.fullmatch(wanted) and _HUB_ID.fullmatch(base))
    if of_catalog or (of_hub and wanted.split("/")[1].lower() != base.split("/")[1].lower()):
        raise ModelFilesError(
            f"adapter {str(folder)!r} was trained for {wanted!r} and cannot be added to {base!r}: "
            f"load it with {wanted!r}, or give an adapter of {base!r}"
        )


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / ADAPTER_CONFIG
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelFilesError(
            f"adapter {str(folder)!r} has no adapter_config.json: give a folder written by peft"
        ) from error
    except (ValueError, OSError) as error:
        raise ModelFilesError(f"adapter file {str(path)!r} cannot be read ({error})") from error
    if config.get("peft_type") != "LORA":
        kind = config.get("peft_type")
        raise ModelFilesError(f"adapter {str(folder)!r} is of type {kind!r}: only LORA is supported")
    for option in _UNSUPPORTED:
        if config.get(option):
            raise ModelFilesError(
                f"adapter {str(folder)!r} uses {option}={config[option]!r}, which is not supported: "
                "merge it with peft's merge_and_unload and give the merged model"
            )
    if config.get("bias", "none") != "none" or config.get("init_lora_weights") not in _PLAIN_STARTS:
        raise ModelFilesError(
            f"adapter {str(folder)!r} has bias={config.get('bias')!r} and "
            f"init_lora_weights={config.get('init_lora_weights')!r}, which change the base weights: "
            "merge it with peft's merge_and_unload and give the merged model"
        )
    return config


def _read_pairs(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The matrices A and B by module.

    The pair of an embedding also has the key ``embedding``; one saved with the layer's own weight has the key ``base``.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = _weights_of(folder)
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ModelFilesError(
            f"adapter file {str(path)!r} cannot be read ({error}); fetch it anew"
        ) from error
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = _KEY.fullmatch(name)
        if match is None:
            raise ModelFilesError(
                f"adapter file {str(path)!r} holds {name!r}, which is no LoRA matrix: "
                "merge it with peft's merge_and_unload and give the merged model"
            )
        pair = pairs.setdefault(match["module"], {})
        pair[match["side"] or "base"] = tensor
        if match["embedding"]:
            pair["embedding"] = tensor
    for module, pair in pairs.items():
        if not {"A", "B"} <= pair.keys():
            raise ModelFilesError(
                f"adapter file {str(path)!r} has one of the two matrices of {module!r} only"
            )
    return pairs


def _weights_of(folder: Path) -> Path:
    path = folder / ADAPTER_WEIGHTS
    if not path.is_file():
        pickled = (folder / "adapter_model.bin").is_file()
        what = "only adapter_model.bin, a pickle, which is never loaded" if pickled else "no weights"
        raise ModelFilesError(f"adapter {str(folder)!r} has {what}: save it with peft's `save_pretrained`")
    return path


def _delta(pair: Mapping[str, torch.Tensor], scale: float) -> torch.Tensor:
    """The change of a linear layer's weight, s B A, in fp32, [outputs, inputs]."""
    # A: [r, inputs], B: [outputs, r]
    return scale * (pair["B"].float() @ pair["A"].float())


def _scale(config: Mapping[str, Any], module: str, *, rank: int) -> float:
    alpha = _by_pattern(config.get("alpha_pattern") or {}, module, config.get("lora_alpha", 8))
    rank = int(_by_pattern(config.get("rank_pattern") or {}, module, rank))
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def _by_pattern(patterns: Mapping[str, float], module: str, default: float) -> float:
    """The value of the first pattern that matches the end of a module's name (peft's ``get_pattern_key``)."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default
