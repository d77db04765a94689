"""Generations: each change makes a new folder, and nobody's folder is removed while he reads it.

A reader holds a shared lock on the folder of its generation. Who removes a generation needs the lock alone, and
leaves the folder to the next writer where a reader holds it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
import weakref
from pathlib import Path

from specrag.retrieval.disk import KnowledgeBaseError
from specrag.retrieval.manifest import GENERATIONS, Manifest

_ATTEMPTS = 100
_WAIT = 0.02  # seconds; a writer holds the lock alone only while it deletes


class Generation:
    """A generation that stays on the disk as long as this object is open. Made by :meth:`open`."""

    def __init__(self, folder: Path, manifest: Manifest, descriptor: int) -> None:
        self.folder = folder
        self.manifest = manifest
        self._close = weakref.finalize(self, os.close, descriptor)

    @classmethod
    def open(cls, folder: Path) -> Generation:
        """The current generation of a knowledge base.

        Raises:
            KnowledgeBaseError: there is none, or it is damaged.
        """
        for _ in range(_ATTEMPTS):
            manifest = Manifest.read(folder)
            descriptor = _lock(manifest.generation_folder(folder), fcntl.LOCK_SH)
            if descriptor is not None:
                # Between manifest and lock a writer may have replaced the one and removed the other.
                if Manifest.read(folder).generation == manifest.generation:
                    generation = cls(manifest.generation_folder(folder), manifest, descriptor)
                    manifest.check_sizes(folder)
                    return generation
                os.close(descriptor)
            elif Manifest.read(folder).generation == manifest.generation:
                manifest.check_sizes(folder)  # says which file is missing
            time.sleep(_WAIT)
        raise KnowledgeBaseError(
            f"knowledge base: {str(manifest.generation_folder(folder))!r} cannot be opened: "
            "make it readable, or stop the process that holds it"
        )

    def close(self) -> None:
        """Let the generation go."""
        self._close()


def _lock(folder: Path, kind: int) -> int | None:
    """A descriptor that holds a lock on a folder; None where it cannot be opened or the lock is taken."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:  # a file system without locks: readers go on, nothing is removed below them
        if kind == fcntl.LOCK_SH:
            return descriptor
        os.close(descriptor)
        return None
    return descriptor


def remove_others(folder: Path, keep: int | None) -> None:
    """Remove the generations that nobody reads, except number ``keep``. Only the writer may call it."""
    generations = folder / GENERATIONS
    if not generations.is_dir():
        return
    for old in sorted(generations.iterdir()):
        if keep is not None and old.name == f"{keep:06d}":
            continue
        descriptor = _lock(old, fcntl.LOCK_EX)
        if descriptor is not None:
            with contextlib.suppress(OSError):  # what cannot be removed now is for the next writer
                shutil.rmtree(old)
            os.close(descriptor)
