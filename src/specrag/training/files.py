"""File writing for long runs: a kill leaves the old file or the new one, and a full disk gives a one-line error."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specrag import artifacts
from specrag.artifacts import Remedies, atomic_write, atomic_write_json, exclusive_lock, make_folder
from specrag.errors import InputError, SpecragError

_AGAIN = "and run the same command again; what was written before is intact and is gone on from"
_REMEDIES = Remedies(f"free some space {_AGAIN}", f"make it writable {_AGAIN}")


def write_errors(path: Path, what: str) -> contextlib.AbstractContextManager[None]:
    """Turn disk errors into one-line errors.

    Args:
        path: the file that is written.
        what: its name in the error, such as ``checkpoint``.

    Raises:
        SpecragError: the disk is full, or the file cannot be written.
    """
    return artifacts.write_errors(path, what, SpecragError, _REMEDIES)


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Lock the folder of a run, created if needed, against other processes.

    Raises:
        InputError: another process holds it.
        SpecragError: the folder cannot be written.
    """

    def busy() -> None:
        remedy = "another process trains there; wait for it or take another folder"
        raise InputError("--out", str(out), remedy)

    with contextlib.ExitStack() as stack:
        with write_errors(out, "folder"):
            make_folder(out / "work")
            stack.enter_context(exclusive_lock(out / "work" / ".lock", busy))
        yield


def replace_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write an object as JSON, completely or not at all."""
    atomic_write_json(path, content, indent=2)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; ``None`` if there is no file.

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
    """Write torch tensors as safetensors, completely or not at all.

    Raises:
        OSError: the disk refuses; the old file, if any, is intact.
    """
    from safetensors.torch import save

    # Not save_file: only their owner can read its files, and its errors hide the system's error number.
    atomic_write(path, save(dict(tensors), dict(metadata) if metadata else None))


class LineFile:
    """JSON objects, one per line, in a file that grows batch by batch and is read on construction.

    Args:
        path: created with its first lines. An incomplete last line, left by a kill or a full disk, is cut off.
        what: the lines' name in errors.

    Raises:
        SpecragError: a line before the last is not a JSON object, or the file cannot be read.
    """

    def __init__(self, path: Path, what: str = "rows") -> None:
        self.path = path
        self._what = what
        self.lines: list[dict[str, Any]] = []
        if not path.is_file():
            return
        with write_errors(path, what), path.open("r+b") as file:
            data = file.read()
            good = 0
            for number, line in enumerate(data.splitlines(keepends=True), 1):
                values = _parse(line)
                if values is not None:
                    self.lines.append(values)
                    good += len(line)
                elif good + len(line) < len(data):
                    raise SpecragError(f"line {number} of {str(path)!r} is damaged: take another --out")
            file.truncate(good)

    @property
    def identifiers(self) -> set[str]:
        """The ``id`` of every line."""
        return {str(line.get("id")) for line in self.lines}

    def add(self, lines: Sequence[str]) -> None:
        """Append JSON objects; they are on the disk when this returns.

        Raises:
            SpecragError: the disk refuses; what was added before is intact.
        """
        if not lines:
            return
        with write_errors(self.path, self._what), self.path.open("ab") as file:
            file.write("".join(f"{line}\n" for line in lines).encode())
            file.flush()
            os.fsync(file.fileno())
        self.lines += [json.loads(line) for line in lines]


def _parse(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        values = json.loads(line)
    except ValueError:
        return None
    return values if isinstance(values, dict) else None
