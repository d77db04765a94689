"""Finding, reading and checking an EAGLE head; what it consists of stands in ``eagle_files.py``.

Everything is checked before a tensor is read: another model's head, a missing or foreign tensor and a truncated file
end with one line that names them. Only safetensors are ever read: the public pickles must be converted elsewhere.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specrag.errors import InputError, ModelFilesError
from specrag.models.catalog import resolve
from specrag.models.eagle_files import (
    CONFIG,
    EMBEDDING,
    TOKENS,
    VOCABULARY,
    WEIGHTS,
    HeadConfig,
    read_head_config,
)

if TYPE_CHECKING:
    import torch

#: Heads that come with specrag, a folder each.
SHIPPED = Path(__file__).parent / "heads"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

#: A head's embedding may differ from the target's by this share: they are rounded to different types, or the target
#: was quantised once. Two models' embeddings differ by more than 1.
_SAME_EMBEDDING = 0.1
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_FLOATS = ("F16", "BF16", "F32")
#: Tensors that only heads of EAGLE-3 have.
_EAGLE_3 = ("d2t", "t2d", "midlayer.")


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """A head as it was read and checked.

    Attributes:
        config: its sizes.
        weights: the tensors of :meth:`HeadConfig.shapes`, as they are stored.
        vocabulary: int64 ``[n]``, ascending: the tokens that it may propose; ``None`` for all.
    """

    config: HeadConfig
    weights: dict[str, torch.Tensor]
    vocabulary: torch.Tensor | None


def shipped_heads() -> list[str]:
    """Names of the heads that come with specrag: those of the models they belong to."""
    return sorted(path.parent.name for path in SHIPPED.glob(f"*/{CONFIG}"))


def head_folder(name: str) -> Path:
    """Where a head lies.

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
    """Read a head and make sure that it belongs to a target.

    Args:
        folder: the head's.
        embedding: the target's, ``[vocab_size, hidden_size]``; it tells models of the same sizes apart.

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
    """The tensors, after all names, types and shapes were found to be right."""
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
    # A few thousand rows tell as much as all of them, which are most of the file.
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
