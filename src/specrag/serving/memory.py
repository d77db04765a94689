"""How a server divides its memory for keys and values: requests that run, and earlier texts that are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specrag.serving.settings import Settings

#: What earlier texts take by default: one part in so many, and no more than so many bytes.
KEPT_PART, MOST_KEPT = 5, 4 * 2**30

#: Bytes for earlier texts where nobody knows how much memory there is.
KEPT_IF_UNKNOWN = 256 * 2**20


@dataclass(frozen=True, slots=True)
class KeyValueMemory:
    """Bytes for keys and values.

    Attributes:
        running: of all requests that run; ``None`` for no limit.
        kept: of earlier texts, for requests that begin with the same tokens.
    """

    running: int | None
    kept: int


def divide(settings: Settings, free: int | None) -> KeyValueMemory:
    """What the settings ``kv_memory_bytes`` and ``prefix_cache_bytes`` come to.

    Args:
        free: bytes that are free once everything is loaded; ``None`` where the system does not say.
    """
    total = settings.kv_memory_bytes
    if total is None and free is not None:
        total = free // 2
    kept = settings.prefix_cache_bytes
    if kept is None:
        kept = KEPT_IF_UNKNOWN if total is None else min(total // KEPT_PART, MOST_KEPT)
    return KeyValueMemory(None if total is None else max(total - kept, 0), kept)
