"""Where a knowledge base keeps its passages as read by models (``specrag index --read``).

``read/MODEL/ID.safetensors``: a folder for each model that has read passages, with a file for each passage, by id.
:mod:`specrag.methods.block_files` defines the content of the files; this module makes sure that no file outlives its
passage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

READ = "read"


def forget_read(folder: Path, passages: Callable[[], Collection[int]]) -> None:
    """Remove the files of passages that are gone.

    Args:
        folder: the knowledge base.
        passages: returns the ids of the existing passages; called only if there are files.

    Raises:
        OSError: the disk refuses the write.
    """
    files = list((folder / READ).glob("*/*.safetensors"))
    if not files:
        return
    there = {str(passage) for passage in passages()}
    for path in files:
        if path.stem not in there:
            path.unlink(missing_ok=True)
