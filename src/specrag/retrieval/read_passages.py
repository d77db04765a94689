"""Where a knowledge base keeps what models have read of its passages (``specrag index --read``).

``read/MODEL/ID.safetensors``: a folder for each model that has read, a file for each passage, by its id. What is in the
files is the business of :mod:`specrag.methods.block_files`; that none outlives its passage is this module's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

READ = "read"


def forget_read(folder: Path, passages: Callable[[], Collection[int]]) -> None:
    """Remove what was read of passages that are gone.

    Args:
        folder: the knowledge base.
        passages: the ids of those that are there; asked if anything was read.

    Raises:
        OSError: the disk refuses.
    """
    files = list((folder / READ).glob("*/*.safetensors"))
    if not files:
        return
    there = {str(passage) for passage in passages()}
    for path in files:
        if path.stem not in there:
            path.unlink(missing_ok=True)
