"""Writing of long runs: a kill leaves the old file or the new one, and a full disk is told in one line."""

from __future__ import annotations

import contextlib
import errno
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from specrag.errors import InputError, SpecragError
from specrag.retrieval.disk import replace_file

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextlib.contextmanager
def write_errors(path: Path, what: str) -> Iterator[None]:
    """Turn the refusals of a disk into one-line errors.

    Args:
        path: what is written.
        what: its name in the error, such as ``checkpoint``.

    Raises:
        SpecragError: the disk is full, or the file cannot be written.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            reason, remedy = "no space is left", "free some space"
        else:
            reason, remedy = f"it cannot be written ({error.strerror or error})", "make it writable"
        raise SpecragError(
            f"{what}: {str(path)!r}: {reason}: {remedy} and run the same command again; "
            "what was written before is intact and is gone on from"
        ) from error


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Hold the folder of a run, made if need be, against other processes.

    Raises:
        InputError: another process holds it.
        SpecragError: the folder cannot be written.
    """
    with write_errors(out, "folder"):
        (out / "work").mkdir(parents=True, exist_ok=True)
        lock = FileLock(out / "work" / ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            remedy = "another process trains there; wait for it or take another folder"
            raise InputError("--out", str(out), remedy) from None
    try:
        yield
    finally:
        lock.release()


def replace_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write an object as JSON, whole or not at all."""
    replace_file(path, f"{json.dumps(content, indent=2)}\n".encode())


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; ``None`` where there is no file.

    Raises:
        SpecragError: it holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise SpecragError(f"{str(path)!r} is damaged ({error}): take another --out") from error
    if not isinstance(content, dict):
        raise SpecragError(f"{str(path)!r} is damaged (no object): take another --out")
    return content


def replace_tensors(
    path: Path, tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None
) -> None:
    """Write torch tensors as safetensors, whole or not at all.

    Raises:
        OSError: the disk refuses; the old file, if there is one, is intact.
    """
    from safetensors.torch import save

    # Not save_file: its files are readable by their owner alone, and its errors hide the system's number.
    replace_file(path, save(dict(tensors), dict(metadata) if metadata else None))
