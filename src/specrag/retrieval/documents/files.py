"""Find the files under a list of paths; everything left out is reported with a reason."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specrag.errors import InputError
from specrag.retrieval.documents.ignored import IgnoreFile, why_ignored

_HIDDEN = "hidden; give its path itself to index it"
_NO_UTF8 = "its name is no UTF-8; rename it"
_SPECIAL = "neither a file nor a folder"


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file to read.

    Args:
        path: absolute path without symbolic links.
        source: its name in the knowledge base: the POSIX path relative to the given folder, or the file's own name if
            the file itself was given; the absolute path if two files would have the same name.
        size: size in bytes when it was found.
        mtime_ns: modification time when it was found.
    """

    path: Path
    source: str
    size: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Skipped:
    """Something left out, with the reason as a one-line sentence fragment."""

    source: str
    reason: str


@dataclass(frozen=True, slots=True)
class FoundFiles:
    """The files found under some paths.

    Attributes:
        files: files to read, sorted by source.
        skipped: what was left out, sorted by source.
        ignored: existing files and folders that are not to be indexed, as absolute paths.
    """

    files: tuple[SourceFile, ...]
    skipped: tuple[Skipped, ...]
    ignored: tuple[Path, ...] = ()


def find_files(paths: Sequence[Path], exclude: Sequence[Path] = ()) -> FoundFiles:
    """Find all regular files under some paths; folders are searched recursively.

    Left out with a reason: names that start with a dot (a hidden folder is one entry), everything named by a
    ``.gitignore`` in the folder or below it, ``node_modules``, ``__pycache__`` and virtual environments, names that are
    not UTF-8, folders that cannot be listed, devices and pipes, links that leave the folder or lead nowhere, links to
    something inside that is indexed under its own name, empty folders, and ``exclude``. A link that was itself given is
    followed, and so is a link to a file inside the folder that would otherwise be missed.

    Args:
        paths: files and folders; a file that is reached twice is found once.
        exclude: files and folders to leave out, such as the knowledge base itself.

    Raises:
        InputError: there is no path, a path does not exist or cannot be used, or there is nothing to index. Raised
            before any file is read.
    """
    if not paths:
        raise InputError("path", list(paths), "give at least one file or folder")
    walk = _Walk([Path(os.path.realpath(path)) for path in exclude])
    for path in paths:
        _check(path)
    for path in paths:
        walk.start(path)
    if not walk.files:
        shown = str(paths[0]) if len(paths) == 1 else [str(path) for path in paths]
        raise InputError("path", shown, _nothing(walk.skipped))
    files = sorted(_distinct(list(walk.files.values())), key=lambda file: file.source)
    skipped = sorted(walk.skipped, key=lambda entry: entry.source)
    return FoundFiles(tuple(files), tuple(skipped), tuple(walk.ignored))


class _Walk:
    """Collects files by real path, so that none is read twice and loops of links end."""

    def __init__(self, exclude: Sequence[Path]) -> None:
        self.exclude = exclude
        self.files: dict[Path, SourceFile] = {}
        self.skipped: list[Skipped] = []
        self.ignored: list[Path] = []

    def start(self, path: Path) -> None:
        """Add one of the given paths: a file, or a folder with its content."""
        root = Path(os.path.realpath(path))
        if root.is_file():
            self._file(root, path.name or root.name)
            return
        before = len(self.files) + len(self.skipped)
        links: list[Path] = []
        folders: list[tuple[Path, tuple[IgnoreFile, ...]]] = [(root, ())]
        while folders:
            folder, rules = folders.pop()
            own = IgnoreFile.of(folder)
            rules = rules if own is None else (*rules, own)
            folders.extend((inner, rules) for inner in self._folder(folder, root, rules, links))
        for link in links:
            self._link(link, root)
        if len(self.files) + len(self.skipped) == before:
            self.skipped.append(Skipped(_shown(path.as_posix()), "an empty folder"))

    def _folder(self, folder: Path, root: Path, rules: Sequence[IgnoreFile], links: list[Path]) -> list[Path]:
        """Add the files of a folder; returns its subfolders and collects its links in ``links``."""
        if self._excluded(folder):
            self._skip(folder, root, "left out as asked")
            return []
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: os.fsencode(entry.name))
        except OSError as error:
            self._skip(folder, root, f"cannot be listed: {error.strerror}")
            return []
        folders: list[Path] = []
        for entry in entries:
            path, is_folder = folder / entry.name, entry.is_dir(follow_symlinks=False)
            if not is_utf8(entry.name):
                self._skip(path, root, _NO_UTF8)
            elif entry.name.startswith("."):
                self._skip(path, root, _HIDDEN)
            elif reason := why_ignored(path, rules, is_folder=is_folder):
                self._skip(path, root, reason)
                self.ignored.append(path)
            elif entry.is_symlink():
                links.append(path)
            elif is_folder:
                folders.append(path)
            else:
                self._file(path, path.relative_to(root).as_posix())
        return folders

    def _file(self, path: Path, source: str) -> None:
        if path in self.files:
            return
        if self._excluded(path):
            self.skipped.append(Skipped(source, "left out as asked"))
            return
        try:
            status = path.stat()
        except OSError as error:
            self.skipped.append(Skipped(source, f"cannot be read: {error.strerror}"))
            return
        if stat.S_ISREG(status.st_mode):
            self.files[path] = SourceFile(path, source, status.st_size, status.st_mtime_ns)
        else:
            self.skipped.append(Skipped(source, _SPECIAL))

    def _link(self, link: Path, root: Path) -> None:
        target = Path(os.path.realpath(link))
        if not target.is_relative_to(root):
            self._skip(link, root, f"a link that leaves the folder, to {_shown(str(target))}")
        elif not target.exists():
            self._skip(link, root, "a link to nothing, or to itself")
        elif target.is_dir():
            inside = _shown(target.relative_to(root).as_posix())
            self._skip(link, root, f"a link to the folder {inside}; links to folders are not followed")
        elif target in self.files:
            self._skip(link, root, f"a link to {self.files[target].source}, which is indexed itself")
        else:
            self._file(target, link.relative_to(root).as_posix())

    def _excluded(self, path: Path) -> bool:
        return any(path == excluded or path.is_relative_to(excluded) for excluded in self.exclude)

    def _skip(self, path: Path, root: Path, reason: str) -> None:
        source = path.relative_to(root) if path != root else path
        self.skipped.append(Skipped(_shown(source.as_posix()), reason))


def _check(path: Path) -> None:
    if not is_utf8(str(path)):
        raise InputError("path", str(path), _NO_UTF8)
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise InputError("path", str(path), "there is no such file or folder") from None
    except OSError as error:
        raise InputError("path", str(path), f"it cannot be read: {error.strerror}") from None
    except ValueError:  # a NUL in the name
        raise InputError("path", str(path), "no path looks like this") from None
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise InputError("path", str(path), f"it is {_SPECIAL}")


def _nothing(skipped: Sequence[Skipped]) -> str:
    if all(entry.reason == "an empty folder" for entry in skipped):
        return "there is nothing to index: it holds no files"
    first = skipped[0]
    return f"there is nothing to index: all {len(skipped)} entries are left out, first {first.source}: {first.reason}"


def _distinct(files: list[SourceFile]) -> list[SourceFile]:
    count = Counter(file.source for file in files)
    return [replace(file, source=file.path.as_posix()) if count[file.source] > 1 else file for file in files]


def is_utf8(name: str) -> bool:
    """Whether a name can be encoded as UTF-8; a file's name may consist of any bytes."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(name: str) -> str:
    r"""The name with each byte that is not UTF-8 written as ``\\xff``, safe for a terminal and a database."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")
