"""The memory that a request needs, estimated and checked before its first pass.

The estimate is an upper bound: the keys and values of the request's sessions as :mod:`specrag.engine.kv` allocates
them, and the score matrices of one pass. Weights count too if they are still to be loaded.
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

#: Bytes left for everything else.
RESERVE = 256 * 2**20

_CGROUP = Path("/sys/fs/cgroup")
#: Bytes per weight; int8 also keeps a scale for each row.
_WEIGHT_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "int8": 1.1}


@dataclass(frozen=True, slots=True)
class SessionNeed:
    """A planned session: its model and the most tokens that it will hold."""

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
        """The sum of all three."""
        return self.weights + self.keys_values + self.working


def estimate_memory(sessions: Sequence[SessionNeed], weights: int = 0) -> MemoryNeed:
    """Bytes needed by sessions that live at the same time.

    Args:
        weights: bytes of models still to be loaded (:func:`weights_bytes`).
    """
    return MemoryNeed(
        weights,
        sum(keys_values_bytes(need.model, need.tokens) for need in sessions),
        max((_working_bytes(need.model, need.tokens) for need in sessions), default=0),
    )


def keys_values_bytes(model: SessionModel, tokens: int) -> int:
    """Bytes of one session's keys and values once it holds ``tokens`` tokens; 0 for a model that keeps none.

    Includes the copy of one layer that growing makes.
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
        free: bytes available (:func:`free_bytes`, or a limit of the caller's); ``None`` if unknown.
        what: what needs them, such as ``31,000 tokens``.

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
    """Bytes still free, less :data:`RESERVE`; ``None`` if the system does not say.

    On the CPU, the smaller of what the machine and the process's control group have left.
    """
    place = torch.device(device)
    if place.type == "cuda":
        return max(int(torch.cuda.mem_get_info(place)[0]) - RESERVE, 0)
    known = [amount for amount in (_machine_bytes(), _group_bytes()) if amount is not None]
    return max(min(known) - RESERVE, 0) if known else None


def peak_bytes(device: torch.device | str = "cpu") -> int | None:
    """This process's peak memory so far, loading included; ``None`` if the system does not say."""
    place = torch.device(device)
    if place.type == "cuda":
        return int(torch.cuda.max_memory_allocated(place))
    return _kilobytes(Path("/proc/self/status"), "VmHWM")


def weights_bytes(folder: Path, dtype: str) -> int:
    """Bytes of a model's weights in memory, from the headers of its safetensors files.

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
    """Bytes of one prefill pass: scores and weights of a block of rows, and the rows between two layers."""
    config: Any = getattr(model, "config", None)
    cache = model.new_cache()
    if config is None or not isinstance(cache, KeyValueCache):
        return 0
    scores = 2 * config.num_attention_heads * min(BLOCK_ROWS, tokens) * tokens
    width = 2 * getattr(config, "intermediate_size", 4 * config.hidden_size) + 6 * config.hidden_size
    shape = cache.shape
    # An 8-bit layer is read by copying it to float32, and that copy to the model's type.
    copied = 2 * shape.kv_heads * tokens * shape.head_dim * (4 + shape.dtype.itemsize) if shape.int8 else 0
    return int((scores + min(PREFILL_ROWS, tokens) * width) * shape.dtype.itemsize) + copied


def _machine_bytes() -> int | None:
    found = _kilobytes(Path("/proc/meminfo"), "MemAvailable")
    if found is not None:
        return found
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # macOS has no such count
        return None


def _group_bytes() -> int | None:
    """Bytes left in the control group; reclaimable file pages count as free."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
        idle = next(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
    except (OSError, ValueError, StopIteration):
        return None
    return None if limit == "max" else int(limit) - used + idle


def _kilobytes(path: Path, name: str) -> int | None:
    """The value of a line such as ``VmHWM: 1234 kB`` in a system file, in bytes."""
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _gb(amount: int) -> str:
    return f"{amount / 1e9:.2f} GB"
