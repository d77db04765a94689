"""Writing of long runs: a kill leaves the old file or the new one, and a full disk is told in one line."""

from __future__ import annotations

import contextlib
import errno
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from specrag.errors import SpecragError
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
