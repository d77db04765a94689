"""The files of an EAGLE head: the public checkpoint format of EAGLE-1 and EAGLE-2 (``yuhuili/EAGLE-*``).

Li et al. 2024, "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty" and "EAGLE-2". Names, shapes
and meanings are those of the authors' repository (SafeAILab/EAGLE, ``eagle/model/cnets1.py`` and ``configs.py``).

A head is a folder with ``config.json``, one ``model.safetensors`` and an optional
``draft_vocabulary.safetensors``, which is our own extension. With ``H`` = hidden_size, ``I`` = intermediate_size,
``V`` = vocab_size (of the target, including padding), ``D = H / num_attention_heads``,
``K = num_key_value_heads * D``, the tensors (float16, bfloat16 or float32) are::

    embed_tokens.weight                        [V, H]   may be missing: a frozen copy of the target's embedding
    fc.weight                                  [H, 2H]  reads concat(embedding of the next token, feature)
    fc.bias                                    [H]      only if config "bias" is true or missing
    layers.0.self_attn.q_proj.weight           [H, H]
    layers.0.self_attn.k_proj.weight           [K, H]
    layers.0.self_attn.v_proj.weight           [K, H]
    layers.0.self_attn.o_proj.weight           [H, H]   never a bias
    layers.0.self_attn.{q,k,v}_proj.bias       [H], [K], [K]   only if config "qkv_bias" is true (Qwen2)
    layers.0.mlp.gate_proj.weight              [I, H]
    layers.0.mlp.up_proj.weight                [I, H]
    layers.0.mlp.down_proj.weight              [H, I]
    layers.0.post_attention_layernorm.weight   [H]

There is no input norm, no final norm and no output matrix. A feature is the target's last hidden state *after* its
final norm (the input of its output matrix; ``HiddenState`` ``"final"``). The head's output estimates the next feature,
and the target's own output matrix turns it into logits. Row ``i`` reads the feature of position ``i`` and the token of
position ``i + 1``, has rotary position ``i`` and estimates the feature of position ``i + 1``.

``config.json`` is that of a one-layer Llama. These entries are read: ``hidden_size``, ``intermediate_size``,
``vocab_size``, ``num_attention_heads``, ``num_hidden_layers`` (must be 1) and, with defaults in brackets,
``num_key_value_heads`` (num_attention_heads), ``rope_theta`` (10000), ``rope_scaling`` (null, nothing else is
accepted), ``rms_norm_eps`` (1e-6), ``hidden_act`` ("silu"), ``bias`` (true: ``fc`` has one; the LLaMA-3 heads say
false), ``qkv_bias`` (false). The head has its own number of attention heads: the Qwen2 heads have as many key and
value heads as query heads.

``draft_vocabulary.safetensors`` holds one tensor ``tokens``, int64 ``[n]``, ascending and distinct: the tokens that
the head may propose. Only their rows of the output matrix are computed.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrag.checks import check_number, check_whole
from specrag.errors import InputError, ModelFilesError
from specrag.models.catalog import resolve
from specrag.models.weights import shipped_folder

if TYPE_CHECKING:
    import torch

CONFIG, WEIGHTS, VOCABULARY = "config.json", "model.safetensors", "draft_vocabulary.safetensors"
#: Name of the tensor in :data:`VOCABULARY`, and of the one in :data:`WEIGHTS` that may be missing.
TOKENS, EMBEDDING = "tokens", "embed_tokens.weight"

_COUNTS = ("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """The entries of :data:`CONFIG` that are read; see the top of this file.

    Raises:
        InputError: a value cannot be used.
    """

    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    bias: bool = True
    qkv_bias: bool = False

    def __post_init__(self) -> None:
        for name in _COUNTS:
            check_whole(name, getattr(self, name), remedy="give a positive integer in the head's config.json")
        for name in ("rope_theta", "rms_norm_eps"):
            remedy = "give a positive number in the head's config.json"
            check_number(name, getattr(self, name), above=0, remedy=remedy)
        for name in ("bias", "qkv_bias"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(name, getattr(self, name), "give true or false in the head's config.json")
        if self.hidden_size % self.num_attention_heads or self.head_dim % 2:
            sizes = f"{self.num_attention_heads} for hidden_size {self.hidden_size}"
            raise InputError(
                "num_attention_heads", sizes, "heads of equal and even size must fill hidden_size"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            sizes = f"{self.num_key_value_heads} for {self.num_attention_heads} heads"
            raise InputError("num_key_value_heads", sizes, "it must divide num_attention_heads")

    @property
    def head_dim(self) -> int:
        """Size of an attention head."""
        return self.hidden_size // self.num_attention_heads

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors that a head must have, without the embedding, and their shapes."""
        hidden, wide = self.hidden_size, self.intermediate_size
        keys = self.num_key_value_heads * self.head_dim
        attention, mlp = "layers.0.self_attn.", "layers.0.mlp."
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (hidden, 2 * hidden),
            f"{attention}q_proj.weight": (hidden, hidden),
            f"{attention}k_proj.weight": (keys, hidden),
            f"{attention}v_proj.weight": (keys, hidden),
            f"{attention}o_proj.weight": (hidden, hidden),
            f"{mlp}gate_proj.weight": (wide, hidden),
            f"{mlp}up_proj.weight": (wide, hidden),
            f"{mlp}down_proj.weight": (hidden, wide),
            "layers.0.post_attention_layernorm.weight": (hidden,),
        }
        if self.bias:
            shapes["fc.bias"] = (hidden,)
        if self.qkv_bias:
            for name, size in (("q", hidden), ("k", keys), ("v", keys)):
                shapes[f"{attention}{name}_proj.bias"] = (size,)
        return shapes


def read_head_config(folder: Path) -> HeadConfig:
    """The configuration of a head.

    Raises:
        InputError: a value cannot be used.
        ModelFilesError: ``config.json`` is missing or damaged.
    """
    path = folder / CONFIG
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        values = dict(values.items())
    except FileNotFoundError:
        raise ModelFilesError(
            f"EAGLE head {str(folder)!r} has no {CONFIG}: give the folder of an EAGLE-2 head"
        ) from None
    except (OSError, ValueError, AttributeError) as error:
        raise ModelFilesError(f"EAGLE head's {str(path)!r} is damaged ({error}): fetch it again") from error
    for name, wanted in (("num_hidden_layers", 1), ("hidden_act", "silu"), ("rope_scaling", None)):
        found = values.get(name, wanted)
        if found != wanted:
            raise InputError(name, found, f"an EAGLE-2 head has {json.dumps(wanted)} in its {CONFIG}")
    if "draft_vocab_size" in values:
        raise InputError(
            f"EAGLE head {str(folder)!r}", "EAGLE-3", "only heads of EAGLE-1 and EAGLE-2 are read"
        )
    values.setdefault("num_key_value_heads", values.get("num_attention_heads"))
    missing = [name for name in _COUNTS if values.get(name) is None]
    if missing:
        raise ModelFilesError(f"EAGLE head's {str(path)!r} lacks {', '.join(missing)}: fetch it again")
    return HeadConfig(**{item.name: values[item.name] for item in fields(HeadConfig) if item.name in values})


#: Heads that come with specrag, a folder each.
SHIPPED = shipped_folder("heads")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

#: A head's embedding may differ from the target's by this share, because they are rounded to different types or the
#: target was once quantised. The embeddings of two different models differ by more than 1.
_SAME_EMBEDDING = 0.1
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_FLOATS = ("F16", "BF16", "F32")
#: Tensors that only EAGLE-3 heads have.
_EAGLE_3 = ("d2t", "t2d", "midlayer.")


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """A head that has been read and checked.

    Attributes:
        config: its sizes.
        weights: the tensors of :meth:`HeadConfig.shapes`, in the stored dtype.
        vocabulary: int64 ``[n]``, ascending: the tokens that it may propose; ``None`` for all.
    """

    config: HeadConfig
    weights: dict[str, torch.Tensor]
    vocabulary: torch.Tensor | None


def shipped_heads() -> list[str]:
    """Names of the heads that come with specrag; each has the name of its target model."""
    return sorted(path.parent.name for path in SHIPPED.glob(f"*/{CONFIG}"))


def head_folder(name: str) -> Path:
    """The folder of a head.

    Args:
        name: a folder, the name of a head that comes with specrag, or a hub id ``org/name``.

    Raises:
        InputError: there is no such head.
        ModelFilesError: it cannot be fetched.
    """
    shipped = shipped_heads()
    if name in shipped:
        return SHIPPED / name
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if _HUB_ID.fullmatch(name):
        return resolve(name).folder
    known = f"one of {', '.join(shipped)}, " if shipped else ""
    raise InputError(
        "drafter", f"eagle:{name}", f"give {known}the folder of an EAGLE-2 head, or a hub id org/name"
    )


def read_head(folder: Path, embedding: torch.Tensor) -> HeadFiles:
    """Read a head and check that it belongs to a target.

    Args:
        folder: the head's folder.
        embedding: the target's embedding, ``[vocab_size, hidden_size]``; it tells models of the same size apart.

    Raises:
        InputError: the head is for another model, or of another kind.
        ModelFilesError: files or tensors are missing, damaged, or not what the configuration says.
    """
    config = read_head_config(folder)
    for name, size in (("hidden_size", embedding.shape[1]), ("vocab_size", embedding.shape[0])):
        if getattr(config, name) != size:
            raise InputError(
                f"EAGLE head {str(folder)!r}",
                f"{name} {getattr(config, name)}",
                f"the target has {size}; take the head that was trained for it",
            )
    weights = _read_tensors(_weights_file(folder), config)
    own = weights.pop(EMBEDDING, None)
    if own is not None:
        _check_embedding(folder, own, embedding)
    return HeadFiles(config, weights, _read_vocabulary(folder, config))


def _weights_file(folder: Path) -> Path:
    file = folder / WEIGHTS
    if file.is_file():
        return file
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
    if pickles:
        raise ModelFilesError(
            f"EAGLE head {str(folder)!r} has no {WEIGHTS}, only {pickles[0]!r}, a pickle, which is never loaded: "
            "convert it elsewhere, with torch.load and safetensors.torch.save_file"
        )
    raise ModelFilesError(f"EAGLE head {str(folder)!r} has no {WEIGHTS}: fetch it again")


def _read_tensors(file: Path, config: HeadConfig) -> dict[str, torch.Tensor]:
    """Read the tensors after checking all names, types and shapes."""
    from safetensors import SafetensorError, safe_open

    required = config.shapes()
    known = required | {EMBEDDING: (config.vocab_size, config.hidden_size)}
    head = f"EAGLE head {str(file)!r}"
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            names = set(opened.keys())
            if any(name.startswith(_EAGLE_3) for name in names):
                raise InputError(head, "EAGLE-3", "only heads of EAGLE-1 and EAGLE-2 are read")
            for name in sorted(names - set(known)):
                raise ModelFilesError(
                    f"{head} has a tensor {name!r} of shape {opened.get_slice(name).get_shape()}, "
                    "which an EAGLE-2 head of its configuration lacks: it is of another kind, or config.json is"
                )
            for name, shape in known.items():
                if name not in names:
                    if name == EMBEDDING:
                        continue
                    raise ModelFilesError(
                        f"{head} lacks the tensor {name!r} of shape {list(shape)}: fetch it again"
                    )
                found = opened.get_slice(name)
                if tuple(found.get_shape()) != shape or found.get_dtype() not in _FLOATS:
                    raise ModelFilesError(
                        f"{head}: tensor {name!r} is {found.get_dtype()} {list(found.get_shape())}, expected "
                        f"{' or '.join(_FLOATS)} {list(shape)}: it does not fit its config.json, or is quantised"
                    )
            return {name: opened.get_tensor(name) for name in known if name in names}
    except (SafetensorError, OSError) as error:
        raise ModelFilesError(f"{head} is truncated or damaged ({error}): fetch it again") from error


def _check_embedding(folder: Path, own: torch.Tensor, target: torch.Tensor) -> None:
    # A few thousand rows tell as much as all of them, which make up most of the file.
    step = max(own.shape[0] // 4096, 1)
    ours = own[::step].float()
    theirs = target[::step].to(device=ours.device).float()
    difference = float((ours - theirs).norm() / theirs.norm().clamp_min(1e-12))
    if not difference <= _SAME_EMBEDDING:
        raise InputError(
            f"EAGLE head {str(folder)!r}",
            EMBEDDING,
            f"it differs from the target's by {difference:.0%}; take the head that was trained for this model",
        )


def _read_vocabulary(folder: Path, config: HeadConfig) -> torch.Tensor | None:
    from safetensors import SafetensorError, safe_open

    file = folder / VOCABULARY
    if not file.is_file():
        return None
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            names = list(opened.keys())
            if names != [TOKENS]:
                raise ModelFilesError(f"{str(file)!r}: it has the tensors {names}, expected {TOKENS!r} alone")
            found = opened.get_slice(TOKENS)
            kind, shape = found.get_dtype(), list(found.get_shape())
            if kind != "I64" or len(shape) != 1 or not shape[0]:
                raise ModelFilesError(f"{str(file)!r}: tensor {TOKENS!r} is {kind} {shape}, expected I64 [n]")
            tokens: torch.Tensor = opened.get_tensor(TOKENS)
    except (SafetensorError, OSError) as error:
        raise ModelFilesError(f"{str(file)!r} is truncated or damaged ({error}): fetch it again") from error
    if bool((tokens[1:] <= tokens[:-1]).any()) or int(tokens[0]) < 0 or int(tokens[-1]) >= config.vocab_size:
        raise ModelFilesError(
            f"{str(file)!r}: its tokens must ascend, be distinct and lie from 0 to {config.vocab_size - 1}"
        )
    return tokens
