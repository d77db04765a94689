"""A file of JSON lines that grows batch by batch, so that a run that ends at any moment goes on where it was."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specrag.errors import SpecragError
from specrag.training.files import write_errors


class LineFile:
    """The lines of a file, which is read when this is made.

    Args:
        path: made with its first lines. A torn last line, which a kill or a full disk leaves, is cut off.

    Raises:
        SpecragError: a line before the last is no JSON object, or the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[dict[str, Any]] = []
        if not path.is_file():
            return
        with write_errors(path, "rows"), path.open("r+b") as file:
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
        with write_errors(self.path, "rows"), self.path.open("ab") as file:
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
