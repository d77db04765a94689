"""One writer at a time: a second one is refused at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from specrag.retrieval.disk import KnowledgeBaseError

LOCK = "writer.lock"


@contextlib.contextmanager
def writer_lock(folder: Path) -> Iterator[None]:
    """Hold the right to write a knowledge base; it ends with the process at the latest.

    Raises:
        KnowledgeBaseError: another process writes there.
        OSError: the folder cannot be written.
    """
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise KnowledgeBaseError(
            f"knowledge base: {str(folder)!r} is being written by another process: "
            "wait for it to end, or choose another folder"
        ) from None
    try:
        yield
    finally:
        lock.release()
