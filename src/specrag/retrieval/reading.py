"""The first half of a build: find new, changed and removed documents."""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

from specrag.errors import InputError
from specrag.retrieval.documents.files import FoundFiles, Skipped, SourceFile, find_files, is_utf8
from specrag.retrieval.passage_store import PassageStore, StoredFile

#: Up to this many files, only the documents that they can change are examined.
_FEW = 500


@dataclass(frozen=True, slots=True)
class Entry:
    """A document that is to be in the knowledge base.

    Attributes:
        path: absolute path.
        source: its name.
        found: the file; None if it was not looked for.
        known: the document as it is in the knowledge base; None for a new one.
        changed: whether the file has to be read.
    """

    path: str
    source: str
    found: SourceFile | None
    known: StoredFile | None
    changed: bool

    @property
    def is_elsewhere(self) -> bool:
        """Whether it was not looked for and keeps its path and name."""
        known = self.known
        return (
            self.found is None
            and known is not None
            and (known.path, known.source) == (self.path, self.source)
        )


@dataclass(frozen=True, slots=True)
class Changes:
    """The documents that are to be in the knowledge base, and what happened to the others.

    Attributes:
        entries: the documents, sorted by source.
        roots: the paths indexed so far, absolute; none lies below another.
        removed: documents that are gone.
        skipped: what was found but cannot be a document.
        others: number of further documents, which stay as they are.
    """

    entries: tuple[Entry, ...]
    roots: tuple[str, ...]
    removed: tuple[StoredFile, ...]
    skipped: tuple[Skipped, ...]
    others: int = 0

    @property
    def none(self) -> bool:
        """Whether everything can stay as it is."""
        return not (self.removed or self.renamed or any(entry.changed for entry in self.entries))

    @property
    def renamed(self) -> bool:
        """Whether a known document has another name or path now."""
        return any(
            (entry.known.path, entry.known.source) != (entry.path, entry.source)
            for entry in self.entries
            if entry.known is not None
        )


def find_changes(paths: Sequence[Path], folder: Path, store: PassageStore | None) -> Changes:
    """Compare the files under some paths with the documents of a knowledge base.

    Documents that are gone from these paths, or that a ``.gitignore`` now names, are removed; those that were indexed
    from elsewhere stay. A file with the known size and time is taken as unchanged; with only the known size, its
    content is compared. A document whose file is gone while another file has its name has moved: it is still the same
    document.

    Args:
        paths: as given by a user.
        folder: the knowledge base itself, which is left out.
        store: the knowledge base's content; None if there is nothing yet.

    Raises:
        InputError: a path does not exist, or there is nothing to index.
        KnowledgeBaseError: the knowledge base is damaged.
    """
    given = [_real(path) for path in paths]
    # A file that was indexed by itself may be gone; a missing folder is more likely a mistake.
    missing = [path for path in given if not os.path.lexists(path)]
    gone = {file.path for path in missing if store for file in store.files_at(path) if file.path == path}
    present = [path for path, real in zip(paths, given, strict=True) if real not in gone]
    found = find_files(present, exclude=[folder]) if present or not gone else FoundFiles((), ())
    now = {str(file.path): file for file in found.files}
    roots = _Roots({*(store.state.roots if store else ()), *given})
    asked = _Roots(given)
    known = _known(store, given, now, roots)
    old = {file.path: file for file in known}
    names = {path: roots.name(path) for path in {*old, *now}}
    # A link that was followed last time may point to a file elsewhere below the same root.
    removed = {
        path
        for path in old
        if path not in now
        and asked.hold(path)
        and (_is_gone(path) or any(PurePath(path).is_relative_to(ignored) for ignored in found.ignored))
    }
    arrived = {names[path]: path for path in now if path not in old}
    moved = {
        arrived[names[path]]: old[path]
        for path in old
        if path not in now and names[path] in arrived and _is_gone(path)
    }
    left = removed | {file.path for file in moved.values()}
    kept = {*old, *now} - left
    clashes = Counter(names[path] for path in kept)
    entries = []
    for path in kept:
        source = path if clashes[names[path]] > 1 else names[path]
        file = replace(now[path], source=source) if path in now else None
        earlier = old.get(path) or moved.get(path)
        changed = file is not None and (earlier is None or not _is_unchanged(earlier, file))
        entries.append(Entry(path, source, file, earlier, changed))
    entries.sort(key=lambda entry: entry.source)
    others = store.state.documents - len(known) if store else 0
    if not entries and not others:
        raise InputError(
            "path",
            ", ".join(map(str, paths)),
            "no document would be left; to give the knowledge base up, delete its folder",
        )
    vanished = removed - {file.path for file in moved.values()}
    held = {roots.above(path) or path for path in kept}
    if store and others:
        held |= _roots_left(store, left)
    return Changes(
        entries=tuple(entries),
        roots=tuple(sorted(held)),
        removed=tuple(old[path] for path in sorted(vanished)),
        skipped=found.skipped,
        others=others,
    )


def _real(path: Path) -> str:
    real = os.path.realpath(path)
    if not is_utf8(real):
        raise InputError("path", str(path), "its name, or that of what it leads to, is no UTF-8; rename it")
    return real


def _known(
    store: PassageStore | None, given: Sequence[str], now: Collection[str], roots: _Roots
) -> list[StoredFile]:
    """The documents that files below the given paths can affect; all documents if there are many files.

    These are the documents below the paths, and those that have, or could have, the same name as one of them. A path
    above one that was indexed earlier renames all documents below the earlier one.
    """
    if store is None:
        return []
    above = [f"{path.rstrip('/')}/" for path in given]
    if (
        len(now) > _FEW
        or len(given) > _FEW
        or any(root.startswith(tuple(above)) for root in store.state.roots)
    ):
        return store.files()
    below = {file.path: file for path in given for file in store.files_at(path)}
    if len(below) > _FEW:
        return store.files()
    alike = store.files_named({roots.name(path) for path in {*below, *now}})
    few = below | {file.path: file for file in alike}
    return sorted(few.values(), key=lambda file: (file.source, file.path))  # the order of store.files()


def _roots_left(store: PassageStore, left: Collection[str]) -> set[str]:
    """The paths indexed earlier that still have documents besides those that have left."""
    lost = Counter(_Roots(store.state.roots).above(path) or path for path in left)
    return {root for root in store.state.roots if root not in lost or store.count_at(root) > lost[root]}


class _Roots:
    """The paths that were indexed, absolute.

    Plain strings and a cache by folder are used because pathlib, or checking every folder for each of its files, would
    take most of the time of a small change to a large knowledge base.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths = frozenset(paths)
        self._above: dict[str, str | None] = {}  # by the folder of a file

    def above(self, path: str) -> str | None:
        """The outermost root that is a folder above this file."""
        folder = path.rpartition("/")[0]
        if folder not in self._above:
            self._above[folder] = self._outermost(folder or "/")
        return self._above[folder]

    def hold(self, path: str) -> bool:
        """Whether a file is one of the roots or below one."""
        return path in self._paths or self.above(path) is not None

    def name(self, path: str) -> str:
        """A path below its root; the file's own name if it was indexed by itself."""
        root = self.above(path)
        return path.rpartition("/")[2] if root is None else path[len(root) :].lstrip("/")

    def _outermost(self, folder: str) -> str | None:
        end = 0
        while end >= 0:
            above = folder[: max(end, 1)]
            if above in self._paths:
                return above
            end = folder.find("/", end + 1)
        return folder if folder in self._paths else None


def _is_gone(path: str) -> bool:
    """Whether there is no regular file any more; in a folder that cannot be entered there may still be one."""
    try:
        return not stat.S_ISREG(os.lstat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False


def _is_unchanged(old: StoredFile, new: SourceFile) -> bool:
    if old.size != new.size:
        return False
    if (old.path, old.mtime_ns) == (str(new.path), new.mtime_ns):
        return True
    try:
        with new.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == old.sha256
    except OSError:
        return False  # reading it will say what is wrong


def skipped_by_reader(entry: Entry, skipped: Iterable[Skipped]) -> list[Skipped]:
    """The reader's reasons, with a note if an earlier version of the document stays indexed."""
    if entry.known is None:
        return list(skipped)
    return [replace(item, reason=f"{item.reason}; the version indexed before stays") for item in skipped]


_RECENT_NS = 2 * 10**9


def reliable(mtime_ns: int) -> int:
    """A time stamp to compare with later; 0 (read the file again) if a later change might get the same time stamp."""
    return 0 if time.time_ns() - mtime_ns < _RECENT_NS else mtime_ns
