"""Writing so that a kill leaves the old file or the new one, and saying in one line why a disk refuses."""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import xxhash

from specrag.errors import SpecragError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_BLOCK = 1 << 20


class KnowledgeBaseError(SpecragError):
    """A knowledge base is damaged, of another kind than asked for, in use, or cannot be written."""


@contextlib.contextmanager
def write_errors(folder: Path) -> Iterator[None]:
    """Turn the refusals of a disk into one-line errors.

    Args:
        folder: the knowledge base that is written.

    Raises:
        KnowledgeBaseError: the disk is full, or the folder cannot be written.
    """
    try:
        yield
    except OSError as error:
        # numpy's short write has no number.
        full = error.errno in _FULL or (error.errno is None and "requested" in str(error))
        raise _refusal(folder, full, error.strerror or str(error)) from error
    except sqlite3.OperationalError as error:
        # SQLite reports a failed write as "disk I/O error" or "database or disk is full".
        full = error.sqlite_errorcode == sqlite3.SQLITE_FULL or _is_full(folder)
        raise _refusal(folder, full, str(error)) from error
    except RuntimeError as error:  # faiss has no other
        full = _is_full(folder) or any(os.strerror(number) in str(error) for number in _FULL)
        raise _refusal(folder, full, " ".join(str(error).split())[-160:]) from error


def _refusal(folder: Path, full: bool, reason: str) -> KnowledgeBaseError:
    if full:
        what, remedy = "no space is left", "free some space, or choose a folder on a larger disk"
    else:
        what, remedy = f"cannot be written ({reason})", "make it writable, or choose another folder"
    return KnowledgeBaseError(
        f"knowledge base: {str(folder)!r}: {what}: {remedy}, and run it again; what was there is intact"
    )


def _is_full(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        status = os.statvfs(folder)
        return status.f_bavail * status.f_frsize < _BLOCK
    return False


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes) -> None:
    """Give a file new content, whole or not at all."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_bytes(data)
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


def checksum(path: Path) -> str:
    """The 128-bit xxh3 checksum of a file's content, in hexadecimal: finds damage, at the disk's speed."""
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
