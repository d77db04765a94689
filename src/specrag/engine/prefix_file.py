"""Prefix files: the keys and values of a session's first tokens on disk, for another process to resume from.

A prefix file is a safetensors file with a checksum over its contents and the identity of the model that computed it. A
file from any other model, or a damaged one, is refused: wrong keys and values give fluent wrong answers.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from specrag.artifacts import Refusal, disk_errors, fsync, make_folder, rename
from specrag.engine.kv import SCALE_BYTES, KeyValueCache, KeyValueShape, dequantize, quantize
from specrag.engine.passes import SessionModel
from specrag.engine.session import Session
from specrag.errors import SpecragError

FORMAT = "specrag-prefix-1"

_STARTED = time.time() - 1  # seconds since 1970, less one for the coarse clocks of file systems


class PrefixFileError(SpecragError):
    """A prefix file is damaged, belongs to another model, or cannot be written."""


def save_prefix(
    path: Path, session: Session, length: int, identity: Mapping[str, str], *, int8: bool = False
) -> None:
    """Write the first ``length`` tokens, with the keys and values of all but the newest of them.

    The file appears complete or not at all.

    Args:
        session: a session that has fed them.
        identity: of the model: everything that changes its keys and values.
        int8: write 8 bits (:func:`~specrag.engine.kv.quantize`), whatever type the model keeps: half the size, but no
            longer the exact numbers.

    Raises:
        PrefixFileError: the model keeps no keys and values, or the disk refuses.
    """
    cache = session.cache
    if not isinstance(cache, KeyValueCache):
        raise PrefixFileError(f"prefix: {type(cache).__name__} holds no keys and values; take another model")
    rows = length - 1
    if not 0 < rows <= cache.length:
        raise PrefixFileError(
            f"prefix: {length} tokens of a session that has fed {cache.length}; read it first"
        )
    tensors = {"tokens": torch.tensor(session.tokens[:length])}
    for index in range(cache.shape.layers):
        layer = _layer(cache, index, rows).cpu()
        tensors[f"layer.{index}"] = quantize(layer) if int8 and not cache.shape.int8 else layer
    # A folder, since safetensors writes to a name of its own choosing beside the file and renames that.
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")

    def described(refusal: Refusal) -> PrefixFileError:
        return PrefixFileError(
            f"prefix: {str(path)!r} cannot be written ({refusal.reason}): choose a folder with room"
        )

    metadata = {
        "format": FORMAT,
        "identity": json.dumps(dict(sorted(identity.items()))),
        "checksum": _checksum(tensors.values()),
    }
    with disk_errors(path.parent, described, also=(SafetensorError,)):
        make_folder(path.parent)
        remove_unfinished(path.parent)
        unfinished.mkdir(exist_ok=True)
        try:
            written = unfinished / path.name
            save_file(tensors, written, metadata)
            fsync(written)
            rename(written, path)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def load_prefix(path: Path, model: SessionModel, identity: Mapping[str, str]) -> Session:
    """Load a session that :func:`save_prefix` wrote.

    Args:
        identity: of ``model``, in the form given when the file was written.

    Raises:
        FileNotFoundError: there is no such file.
        PrefixFileError: the file belongs to another model, or is damaged.
    """
    cache = model.new_cache()
    if not isinstance(cache, KeyValueCache):
        raise PrefixFileError(f"prefix: {type(cache).__name__} takes no keys and values; leave it out")
    if not path.is_file():
        raise FileNotFoundError(path)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            _check_identity(path, metadata, identity)
            names = ["tokens", *(f"layer.{index}" for index in range(cache.shape.layers))]
            if sorted(file.keys()) != sorted(names):
                raise _damaged(path, "its parts are not those of this model")
            tensors = [file.get_tensor(name) for name in names]
    except (SafetensorError, OSError) as error:
        raise _damaged(path, " ".join(str(error).split())[:120]) from error
    if _checksum(tensors) != metadata.get("checksum"):
        raise _damaged(path, "its checksum is wrong")
    tokens = [int(token) for token in tensors[0]]
    _fill(path, cache, tensors[1:], len(tokens) - 1)
    return Session(model, cache, tokens)


def remove_unfinished(folder: Path) -> None:
    """Remove folders that killed processes left half-written."""
    for path in folder.glob(".*.safetensors.*"):
        writer = path.suffix.removeprefix(".")
        with contextlib.suppress(OSError):
            if writer.isdigit() and not _writes(int(writer), path.stat().st_mtime):
                shutil.rmtree(path)


def _writes(process: int, changed: float) -> bool:
    """Whether a process may still be writing to a folder last modified at the time ``changed``."""
    if process == os.getpid():
        return changed >= _STARTED  # in a container, every server has the same process id
    return _runs(process)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # it runs, as another user
    return True


def _layer(cache: KeyValueCache, index: int, rows: int) -> torch.Tensor:
    """The first rows of a layer, ``[2, kv_heads, rows, stored_width]``, gathered from the chain of extents."""
    parts = [run.extent.layers[index][:, :, : run.rows] for run in cache.runs]
    if cache.own is not None:
        parts.append(cache.own.layers[index][:, :, : cache.length - cache.base])
    return torch.cat(parts, dim=2)[:, :, :rows].contiguous()


def _fill(path: Path, cache: KeyValueCache, layers: Sequence[torch.Tensor], rows: int) -> None:
    shape: KeyValueShape = cache.shape
    if rows > 0 and not shape.int8 and all(layer.dtype == torch.int8 for layer in layers):
        width = shape.head_dim + SCALE_BYTES
        layers = [dequantize(layer, shape.dtype) if layer.shape[-1] == width else layer for layer in layers]
    expected = (2, shape.kv_heads, rows, shape.stored_width)
    if rows < 1 or any(
        tuple(layer.shape) != expected or layer.dtype != shape.stored_dtype for layer in layers
    ):
        raise _damaged(path, "its shapes are not those of this model")
    own = cache.prepare(rows)
    with torch.inference_mode():
        for buffer, layer in zip(own.layers, layers, strict=True):
            buffer[:, :, :rows] = layer.to(shape.device)
    cache.accept(range(rows))


def _check_identity(path: Path, metadata: Mapping[str, str], identity: Mapping[str, str]) -> None:
    if metadata.get("format") != FORMAT:
        raise _damaged(path, f"it is no file of the format {FORMAT}")
    found: dict[str, str] = json.loads(metadata.get("identity", "{}"))
    for field in sorted(found.keys() | identity.keys()):
        if found.get(field) != identity.get(field):
            raise PrefixFileError(
                f"prefix: {str(path)!r} was computed with {field} {found.get(field)!r}, "
                f"here it is {identity.get(field)!r}: remove the file, or use the model that wrote it"
            )


def _checksum(tensors: Iterable[torch.Tensor]) -> str:
    digest = xxhash.xxh3_128()
    for tensor in tensors:
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _damaged(path: Path, what: str) -> PrefixFileError:
    return PrefixFileError(f"prefix: {str(path)!r} is damaged ({what}): remove it, and the text is read anew")
