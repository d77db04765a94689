"""The module to tune, with a LoRA adapter from ``peft`` or all weights trainable, and its files."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specrag.errors import InputError
from specrag.models import ADAPTER_CONFIG, ADAPTER_WEIGHTS, build_module, read_config, read_weights
from specrag.models.catalog import ModelFiles
from specrag.training.drafter.run import TuningSettings
from specrag.training.files import replace_json, replace_tensors, write_errors

WEIGHTS = "model.safetensors"
#: Files in a model's folder other than its weights.
_BESIDE = ("*.json", "*.jinja", "*.txt", "tokenizer.model")
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Tuned:
    """A module and its trained parameters.

    Attributes:
        module: takes ``input_ids`` and ``logits_to_keep``, as transformers' causal language models do.
        trained: the parameters that are trained, fp32, by name.
        adapter: the adapter's configuration in peft's form; ``None`` if all weights are trained.
    """

    module: Any
    trained: Mapping[str, torch.nn.Parameter]
    adapter: Mapping[str, Any] | None

    @property
    def device(self) -> torch.device:
        """The device that it computes on."""
        return next(iter(self.trained.values())).device


def build(files: ModelFiles, settings: TuningSettings, device: torch.device) -> Tuned:
    """Build the module as it is before its first step, when it still computes what the base model computes.

    Raises:
        ModelFilesError: the model's files are damaged.
        InputError: the model has no linear layers that an adapter fits.
    """
    half = settings.precision == "bf16" and not settings.full
    with _seeded(settings.seed):
        dtype = torch.bfloat16 if half else torch.float32
        module = build_module(read_config(files), read_weights(files), dtype)
        module.config.use_cache = False
        adapter = None
        if not settings.full:
            module, adapter = _with_adapter(module, files.name, settings)
    module.to(device)
    trained = {name: value for name, value in module.named_parameters() if value.requires_grad}
    return Tuned(module, trained, adapter)


def _with_adapter(module: Any, name: str, settings: TuningSettings) -> tuple[Any, dict[str, Any]]:
    from peft import LoraConfig, get_peft_model

    wanted = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=0.0,  # randomness within a step would have to be resumed
        bias="none",
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    try:
        with warnings.catch_warnings():  # peft uses a name that transformers has deprecated
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            adapted = get_peft_model(module, wanted)
    except ValueError as error:
        reason = " ".join(str(error).split())[:160]
        raise InputError(
            "--model", name, f"peft finds no layers for an adapter ({reason}); take --full"
        ) from error
    # The adapted model's own configuration lists the layers that "all-linear" stands for. It also holds the model's
    # folder, which means nothing on another machine and is replaced.
    return adapted, _plain(adapted.peft_config["default"].to_dict()) | {"base_model_name_or_path": name}


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as plain JSON values, identical for identical adapters: sets become sorted lists."""
    ready = {key: sorted(value) if isinstance(value, set) else value for key, value in values.items()}
    plain: dict[str, Any] = json.loads(json.dumps(ready, default=str))
    return plain | {"inference_mode": True}


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed torch's global generator, for code that accepts no other; its state is restored afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def write_tuned(
    out: Path, files: ModelFiles, adapter: Mapping[str, Any] | None, weights: Mapping[str, torch.Tensor]
) -> None:
    """Write what the engine loads, in bf16: an adapter in peft's format, or a model.

    Args:
        out: a folder; created if needed.
        adapter: the adapter's configuration; ``None`` for a model.
        weights: by the names in :attr:`Tuned.trained`.

    Raises:
        SpecragError: the disk refuses.
    """
    half = {
        name.replace(".default.", "."): tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in weights.items()
    }
    with write_errors(out, "weights"):
        out.mkdir(parents=True, exist_ok=True)
        if adapter is not None:
            replace_tensors(out / ADAPTER_WEIGHTS, half, {"format": "pt"})
            replace_json(out / ADAPTER_CONFIG, adapter)
            return
        replace_tensors(out / WEIGHTS, half, {"format": "pt"})
        for pattern in _BESIDE:
            for path in files.folder.glob(pattern):
                if path.name != _INDEX:
                    shutil.copyfile(path, out / path.name)
