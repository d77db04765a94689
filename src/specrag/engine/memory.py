"""The memory that a request needs, estimated and checked before its first pass.

An estimate from above: the keys and values of its sessions as :mod:`specrag.engine.kv` allocates them, and the score
matrices of one pass. The weights count too where they are still to be loaded.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specrag.engine.attention.products import BLOCK_ROWS
from specrag.engine.kv import GROWTH, ROW_UNIT, KeyValueCache
from specrag.engine.passes import SessionModel
from specrag.engine.session import PREFILL_ROWS
from specrag.errors import InputError

#: Left to everybody else.
RESERVE = 256 * 2**20

_CGROUP = Path("/sys/fs/cgroup")
#: Bytes of a weight; int8 keeps a scale for each row beside it.
_WEIGHT_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "int8": 1.1}


@dataclass(frozen=True, slots=True)
class SessionNeed:
    """A planned session: its model, and the most tokens that it will hold."""

    model: SessionModel
    tokens: int


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes that a request needs.

    Attributes:
        weights: of models that are not loaded yet.
        keys_values: of all sessions.
        working: of the largest pass.
    """

    weights: int
    keys_values: int
    working: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.keys_values + self.working


def estimate_memory(sessions: Sequence[SessionNeed], weights: int = 0) -> MemoryNeed:
    """Bytes that sessions need which live at the same time.

    Args:
        weights: bytes of models still to be loaded (:func:`weights_bytes`).
    """
    return MemoryNeed(
        weights,
        sum(keys_values_bytes(need.model, need.tokens) for need in sessions),
        max((_working_bytes(need.model, need.tokens) for need in sessions), default=0),
    )


def keys_values_bytes(model: SessionModel, tokens: int) -> int:
    """Bytes of one session's keys and values when it has grown to so many tokens; 0 for a model that keeps none.

    The copy of a layer while it grows is included.
    """
    cache = model.new_cache()
    if not isinstance(cache, KeyValueCache):
        return 0
    shape = cache.shape
    rows = math.ceil(tokens * (1 + GROWTH)) + ROW_UNIT
    return rows * shape.bytes_per_token * (shape.layers + 1) // shape.layers


def check_memory(need: MemoryNeed, free: int | None, what: str) -> None:
    """Refuse a request that cannot fit.

    Args:
        free: bytes that there are (:func:`free_bytes`, or a limit of the caller's); ``None`` where nobody knows.
        what: the thing that needs them, such as ``31,000 tokens``.

    Raises:
        InputError: it needs more.
    """
    if free is None or need.total <= free:
        return
    parts = [f"{_gb(need.keys_values)} for keys and values", f"{_gb(need.working)} for a pass"]
    if need.weights:
        parts.insert(0, f"{_gb(need.weights)} for weights")
    remedy = (
        f"it needs {_gb(need.total)} of memory ({', '.join(parts)}) and {_gb(free)} are free; "
        "shorten the context, read only the relevant part (method rag), or take a smaller model"
    )
    raise InputError("context", what, remedy)


def free_bytes(device: torch.device | str = "cpu") -> int | None:
    """Bytes still free, less :data:`RESERVE`; ``None`` where the system does not say.

    On the CPU the smaller of what the machine and what the process's control group has left.
    """
    place = torch.device(device)
    if place.type == "cuda":
        return max(int(torch.cuda.mem_get_info(place)[0]) - RESERVE, 0)
    known = [amount for amount in (_machine_bytes(), _group_bytes()) if amount is not None]
    return max(min(known) - RESERVE, 0) if known else None


def peak_bytes(device: torch.device | str = "cpu") -> int | None:
    """This process's peak memory so far, loading included; ``None`` where the system does not say."""
    place = torch.device(device)
    if place.type == "cuda":
        return int(torch.cuda.max_memory_allocated(place))
    return _kilobytes(Path("/proc/self/status"), "VmHWM")


def weights_bytes(folder: Path, dtype: str) -> int:
    """Bytes of a model's weights in memory, by the headers of its safetensors files.

    Args:
        dtype: ``fp32``, ``bf16``, ``fp16`` or ``int8``.
    """
    count = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        count += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return int(count * _WEIGHT_BYTES[dtype])


def _working_bytes(model: SessionModel, tokens: int) -> int:
    """The matrices of one prefill pass: scores and weights of a block of rows, and the rows between two layers."""
    config: Any = getattr(model, "config", None)
    cache = model.new_cache()
    if config is None or not isinstance(cache, KeyValueCache):
        return 0
    scores = 2 * config.num_attention_heads * min(BLOCK_ROWS, tokens) * tokens
    width = 2 * getattr(config, "intermediate_size", 4 * config.hidden_size) + 6 * config.hidden_size
    shape = cache.shape
    # What is kept in 8 bits is read as a float32 copy of a layer, which then becomes one of the model's type.
    copied = 2 * shape.kv_heads * tokens * shape.head_dim * (4 + shape.dtype.itemsize) if shape.int8 else 0
    return int((scores + min(PREFILL_ROWS, tokens) * width) * shape.dtype.itemsize) + copied


def _machine_bytes() -> int | None:
    found = _kilobytes(Path("/proc/meminfo"), "MemAvailable")
    if found is not None:
        return found
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # macOS does not count them
        return None


def _group_bytes() -> int | None:
    """What the control group leaves; file pages that it can give back do not count as taken."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
        idle = next(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
    except (OSError, ValueError, StopIteration):
        return None
    return None if limit == "max" else int(limit) - used + idle


def _kilobytes(path: Path, name: str) -> int | None:
    """A line such as ``VmHWM: 1234 kB`` of the system's own files, in bytes."""
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _gb(amount: int) -> str:
    return f"{amount / 1e9:.2f} GB"
