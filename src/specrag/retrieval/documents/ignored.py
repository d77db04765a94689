"""What is left out of a folder by default: files named by a ``.gitignore``, and folders that programs fill."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

_NAME = ".gitignore"
_FILLED = {
    "node_modules": "packages of Node.js; give its path itself to index it",
    "__pycache__": "compiled Python; give its path itself to index it",
}
_ENVIRONMENT = "a virtual environment of Python; give its path itself to index it"


@dataclass(frozen=True, slots=True)
class IgnoreFile:
    """The patterns of a ``.gitignore``; they apply below its folder."""

    folder: Path
    spec: GitIgnoreSpec

    @classmethod
    def of(cls, folder: Path) -> IgnoreFile | None:
        """The ``.gitignore`` of a folder; ``None`` if there is none that can be read."""
        try:
            text = (folder / _NAME).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        from pathspec import GitIgnoreSpec

        return cls(folder, GitIgnoreSpec.from_lines(_usable(text)))


def why_ignored(path: Path, rules: Sequence[IgnoreFile], *, is_folder: bool) -> str | None:
    """Why an entry of a folder is left out; ``None`` if it is not.

    Args:
        path: the entry.
        rules: the rules that apply there, the outermost folder's first; as in git, the innermost rule that matches
            decides.
        is_folder: whether it is a folder, since patterns that end with a slash match only folders.
    """
    if is_folder and path.name in _FILLED:
        return _FILLED[path.name]
    if is_folder and os.path.isfile(path / "pyvenv.cfg"):  # False if the folder may not be entered
        return _ENVIRONMENT
    for rule in reversed(rules):
        relative = path.relative_to(rule.folder).as_posix()
        included = rule.spec.check_file(f"{relative}/" if is_folder else relative).include
        if included is not None:
            return "left out by .gitignore; give its path itself to index it" if included else None
    return None


def _usable(text: str) -> Iterator[str]:
    """The lines that are valid patterns; git also skips the others."""
    from pathspec import GitIgnoreSpec

    for line in text.splitlines():
        try:
            GitIgnoreSpec.from_lines([line])
        except ValueError:
            continue
        yield line
