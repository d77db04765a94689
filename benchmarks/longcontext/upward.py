"""A smaller target for upward speculation: a checkpoint without some of its layers, since no smaller sister is at hand.

Layers two thirds up change a model least when they are left out (Gromov et al., "The unreasonable ineffectiveness of
the deeper layers", 2024); without any healing it still writes worse than a model that was trained at this size.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from specrag.models.catalog import resolve
from specrag.models.weights import read_config_json, read_weights

_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def without_layers(name: str, left_out: Sequence[int], parent: Path) -> Path:
    """A model's folder without these layers, made on first use.

    Args:
        name: of the whole model.
        left_out: numbers of layers, from 0.
        parent: where the folder is kept.
    """
    import torch
    from safetensors.torch import save_file

    files = resolve(name)
    folder = parent / f"{files.name}-without-{left_out[0]}-{left_out[-1]}"
    if (folder / "config.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = dict(read_config_json(files))
    kept = [layer for layer in range(int(config["num_hidden_layers"])) if layer not in left_out]
    weights: dict[str, torch.Tensor] = {}
    for key, tensor in read_weights(files).items():
        found = _LAYER.match(key)
        if found is None:
            weights[key] = tensor
        elif (layer := int(found[1])) in kept:
            weights[key.replace(f".{layer}.", f".{kept.index(layer)}.", 1)] = tensor
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    for path in files.folder.glob("*.json"):
        if path.name not in ("config.json", "model.safetensors.index.json"):
            shutil.copy(path, folder)
    config["num_hidden_layers"] = len(kept)
    if "layer_types" in config:
        config["layer_types"] = [config["layer_types"][layer] for layer in kept]
    # Last, so that a folder that has it is whole.
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
