"""Load a model by name, ready to decode."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from specrag.engine import in_own_thread
from specrag.errors import InputError, ModelFilesError
from specrag.models.adapters import drafter_form, find_adapter, merge_adapter
from specrag.models.catalog import ModelFiles, resolve
from specrag.models.tokenizer import Tokenizer
from specrag.models.weights import read_config, read_config_json, read_weights, supports

if TYPE_CHECKING:
    import torch

    from specrag.engine import SessionModel

#: Values of ``dtype``; int8 means 8-bit weights and activations in the linear layers and bf16 elsewhere, auto means
#: :func:`default_dtype`.
DTYPES = ("auto", "fp32", "bf16", "fp16", "int8")

#: Values of ``kv_dtype``: keys and values in the dtype that they are computed in, or in 8 bits.
KV_DTYPES = ("auto", "int8")


@dataclass(frozen=True)
class LoadedModel:
    """A model with its tokenizer, its files and how it was loaded.

    Attributes:
        name: the name that was asked for.
        files: its files.
        model: computes passes.
        tokenizer: the tokenizer from the same files.
        dtype: one of :data:`DTYPES`, never auto.
        device: such as ``cpu`` or ``cuda:0``.
        adapter: the folder of the adapter that was merged into the weights.
        kv_dtype: one of :data:`KV_DTYPES`.
    """

    name: str
    files: ModelFiles
    model: SessionModel
    tokenizer: Tokenizer
    dtype: str
    device: str
    adapter: Path | None = None
    kv_dtype: str = "auto"

    @property
    def batch_invariant(self) -> bool:
        """Whether a token's distribution has the same bits whatever else is in its pass.

        Only then do all lossless methods write exactly the same text; otherwise two of them may diverge where two
        tokens are almost equally likely.
        """
        return bool(getattr(self.model, "batch_invariant", False))

    @property
    def exactness(self) -> str:
        """What is guaranteed about its texts, in one line."""
        where = f"{self.dtype}, {self.device}"
        if self.batch_invariant:
            return f"every lossless method writes the same text ({where})"
        return (
            f"in {where} two methods may part where two tokens are almost equally likely; on the CPU "
            "dtype=int8 with batch_invariant=true gives one text"
        )

    @property
    def drafter_form(self) -> str | None:
        """The form of drafts that ``specrag train drafter`` taught it, ``paper`` or ``cited``; ``None`` if it did not.

        The record is looked for beside the adapter, or beside the model if there is no adapter.
        """
        return drafter_form(self.adapter or self.files.folder)


def load_model(
    name: str | Path,
    *,
    dtype: str = "auto",
    device: str | None = None,
    adapter: str | Path | None = None,
    batch_invariant: bool | None = None,
    kv_dtype: str = "auto",
    progress: bool = False,
) -> LoadedModel:
    """Load a model for decoding; fetch it first if it is in the catalog and not here yet.

    Args:
        name: a catalog name, a folder, a GGUF file, or a hub id.
        dtype: one of :data:`DTYPES`.
        device: a torch device; by default the first GPU if there is one, else the CPU.
        adapter: a folder with a LoRA adapter, or the name of one that comes with specrag; merged into the weights.
        batch_invariant: a row's bits do not depend on the other rows of its pass (CPU, bf16 or int8); the default if
            that costs little (:func:`default_invariance`).
        kv_dtype: one of :data:`KV_DTYPES`; ``int8`` halves the memory of keys and values.
        progress: show a progress bar while fetching and converting.

    Raises:
        InputError: a value cannot be used.
        ModelFilesError: the model's files cannot be obtained or are damaged.
    """
    if dtype not in DTYPES:
        raise InputError("dtype", dtype, f"take one of {', '.join(DTYPES)}")
    if kv_dtype not in KV_DTYPES:
        raise InputError("kv_dtype", kv_dtype, f"take one of {', '.join(KV_DTYPES)}")
    import torch

    place = find_device(device)
    merged = None if adapter is None else find_adapter(adapter)
    files = resolve(name, progress=progress)
    tokenizer = Tokenizer(files)
    dtype = default_dtype(files, place) if dtype == "auto" else dtype
    invariant = default_invariance(files, dtype, place) if batch_invariant is None else batch_invariant
    kind = _Kind(_TORCH[dtype](torch), place, dtype == "int8", invariant, kv_dtype == "int8")
    model = in_own_thread(lambda: _build(files, kind, merged))
    return LoadedModel(str(name), files, model, tokenizer, dtype, str(place), merged, kv_dtype)


@dataclass(frozen=True, slots=True)
class _Kind:
    """How a model computes."""

    dtype: torch.dtype
    device: torch.device
    int8: bool
    batch_invariant: bool
    int8_kv: bool


_TORCH = {
    "fp32": lambda torch: torch.float32,
    "bf16": lambda torch: torch.bfloat16,
    "fp16": lambda torch: torch.float16,
    "int8": lambda torch: torch.bfloat16,
}


def default_dtype(files: ModelFiles, device: torch.device) -> str:
    """The dtype that serves best: bf16 on a GPU, 8-bit weights on the CPU.

    On the CPU, decoding is bound by reading the weights, and 8-bit products are exact for any number of rows. A model
    that runs as transformers' own module has no 8-bit layers on the CPU: it takes bf16 if the processor can multiply
    it, else fp32.
    """
    from specrag.models.linear import PackedLinear

    if device.type != "cpu":
        return "bf16"
    if is_lean(files) and _has_onednn():
        return "int8"
    return "bf16" if PackedLinear.available() else "fp32"


def default_invariance(files: ModelFiles, dtype: str, device: torch.device) -> bool:
    """Whether batch invariance is possible and costs little; with matrix tiles it would forgo their fast attention."""
    from specrag.engine.attention import has_tiles

    return dtype == "int8" and device.type == "cpu" and is_lean(files) and not has_tiles()


def is_lean(files: ModelFiles) -> bool:
    """Whether the lean decoder supports this model."""
    return supports(SimpleNamespace(**{"model_type": "", **read_config_json(files)}))


def _has_onednn() -> bool:
    import torch

    return bool(torch.backends.mkldnn.is_available())


def find_device(name: str | None) -> torch.device:
    """A torch device by name; by default the first GPU if there is one, else the CPU.

    Raises:
        InputError: there is no such device.
    """
    import torch

    if name is None:
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError("device", name, "give a torch device such as cpu or cuda:0") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError("device", name, "torch sees no GPU here; take cpu")
    return device


def _build(files: ModelFiles, kind: _Kind, adapter: Path | None) -> SessionModel:
    from specrag.models.decoder import LeanDecoder

    config = _plain_config(files) or read_config(files)
    weights = read_weights(files)
    if adapter is not None:
        weights = merge_adapter(weights, adapter, base=files.name)
    if supports(config):
        return LeanDecoder(
            config,
            weights,
            dtype=kind.dtype,
            device=kind.device,
            int8=kind.int8,
            batch_invariant=kind.batch_invariant,
            int8_kv=kind.int8_kv,
        )
    if kind.int8 or kind.batch_invariant:
        field, value = ("dtype", "int8") if kind.int8 else ("batch_invariant", "true")
        raise InputError(
            field,
            value,
            f"{files.name} ({config.model_type}) runs as transformers' module; take bf16 or fp32",
        )
    return _transformers(config, weights, kind)


def _plain_config(files: ModelFiles) -> SimpleNamespace | None:
    """The configuration without importing transformers (two seconds), if the file says everything; else ``None``.

    Files of older versions leave defaults to transformers' classes, and scaled rotary embeddings are computed by
    transformers' own functions: such configurations are read with transformers.
    """
    values = read_config_json(files)
    rope = values.get("rope_parameters") or {}
    complete = set(_LEAN_FIELDS) <= set(values) and rope.get("rope_type") == "default"
    config = SimpleNamespace(**values)
    return config if complete and supports(config) else None


_LEAN_FIELDS = (
    "model_type", "hidden_act", "hidden_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "rms_norm_eps", "max_position_embeddings", "rope_parameters",
)  # fmt: skip


def _transformers(config: object, weights: dict[str, torch.Tensor], kind: _Kind) -> SessionModel:
    from specrag.models.transformers import TransformersModel

    module = build_module(config, weights, kind.dtype).to(kind.device)
    return TransformersModel(module, int8_kv=kind.int8_kv)


def build_module(config: object, weights: dict[str, torch.Tensor], dtype: torch.dtype) -> Any:
    """Transformers' own module with these weights, on the CPU.

    Raises:
        ModelFilesError: tensors are missing.
    """
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    missing = module.load_state_dict(
        {name: tensor.to(dtype) for name, tensor in weights.items()}, strict=False
    ).missing_keys
    module.tie_weights()
    lost = [name for name in missing if module.get_parameter(name).data_ptr() not in _tied(module)]
    if lost:
        raise ModelFilesError(f"model tensors are missing, such as {lost[0]!r}: fetch the model again")
    return module


def _tied(module: torch.nn.Module) -> set[int]:
    """Addresses of the parameters that the files contain under another name."""
    embeddings = (module.get_input_embeddings(), module.get_output_embeddings())  # type: ignore[operator]
    if embeddings[1] is None or embeddings[0].weight is not embeddings[1].weight:
        return set()
    return {embeddings[0].weight.data_ptr()}
