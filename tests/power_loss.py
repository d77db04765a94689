"""Simulated power losses and failing disks, for the tests of whatever is kept on a disk.

:class:`PowerLoss` runs an action and collects the states in which a power loss during it could leave a folder, by the
rules of a journaling file system:

- a file's content is safe once the file has been synced; what came later is lost, there, or half there;
- a folder's names are safe once the folder has been synced; later changes are lost or there, each folder on its own;
- a rename between two folders is one change of both;
- a transaction that SQLite has committed, in a connection that syncs, is safe, as is what it has closed.

:class:`FailingDisk` lets one operation on a folder fail, or all from one on.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import itertools
import os
import random
import shutil
import sqlite3
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias
from unittest import mock

from specrag.errors import SpecragError
from tests.kills import kills

Names: TypeAlias = Mapping[str, int]

_METADATA = ("rename", "replace", "mkdir", "rmdir", "unlink", "remove", "link")


@dataclass(frozen=True)
class State:
    """What a power loss leaves.

    Attributes:
        folders: their paths.
        files: content and identity by path; two names of one file have the same identity.
    """

    folders: frozenset[str]
    files: Mapping[str, tuple[bytes, int]]

    @property
    def key(self) -> object:
        """Equal for states that nobody can tell apart."""
        return self.folders, frozenset((path, content) for path, (content, _) in self.files.items())

    def write(self, root: Path) -> Path:
        """Put it into a new folder."""
        root.mkdir(parents=True)
        for path in sorted(self.folders):
            (root / path).mkdir(parents=True, exist_ok=True)
        places: dict[int, Path] = {}
        for path, (content, identity) in self.files.items():
            if identity in places:
                os.link(places[identity], root / path)
            else:
                (root / path).write_bytes(content)
                places[identity] = root / path
        return root


@dataclass
class _Disk:
    """What is in a folder now and what of it is safe; files and folders are known by identity, the root by 0."""

    root: Path
    inodes: dict[int, int] = field(default_factory=dict)  # identity of each inode in use
    names: dict[int, Names] = field(default_factory=dict)
    contents: dict[int, bytes] = field(default_factory=dict)
    safe_names: dict[int, Names] = field(default_factory=dict)
    safe_contents: dict[int, bytes] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def look(self) -> None:
        """Read everything anew."""
        seen: dict[int, int] = {self.root.stat().st_ino: 0}
        self.names = {}
        folders = [(self.root, 0)]
        while folders:
            folder, identity = folders.pop()
            names = {}
            for entry in os.scandir(folder):
                inode = entry.inode()
                number = seen.setdefault(inode, self.inodes.get(inode) or next(self.numbers))
                names[entry.name] = number
                if entry.is_dir(follow_symlinks=False):
                    folders.append((Path(entry.path), number))
                else:
                    self.contents[number] = Path(entry.path).read_bytes()
            self.names[identity] = names
        self.inodes = seen  # an inode that is free now may come again as another file

    def sync(self, inode: int, linked: set[int]) -> None:
        """Make a file, or a folder with those that a rename has tied to it, safe."""
        self.look()
        identity = self.inodes.get(inode)
        if identity is None:
            return
        if identity in self.names:
            for folder in {identity, *linked} & self.names.keys():
                self.safe_names[folder] = self.names[folder]
        else:
            self.safe_contents[identity] = self.contents[identity]

    def sync_database(self, path: str) -> None:
        """Make a database safe, with the files that SQLite keeps beside it and their names."""
        self.look()
        place = Path(path)
        folder = self.inodes.get(place.parent.stat().st_ino)
        if folder is None:
            return
        names = self.names[folder]
        for name in (place.name, f"{place.name}-wal", f"{place.name}-journal"):
            kept = dict(self.safe_names.get(folder, {}))
            kept.pop(name, None)
            if name in names:
                kept[name] = names[name]
                self.safe_contents[names[name]] = self.contents[names[name]]
            self.safe_names[folder] = kept

    def sync_all(self) -> None:
        self.look()
        self.safe_names = dict(self.names)
        self.safe_contents = dict(self.contents)

    def states(self, ties: list[set[int]]) -> Iterator[State]:
        """Every state that a power loss could leave now."""
        changed = {folder for folder, names in self.names.items() if names != self.safe_names.get(folder, {})}
        groups = [tied & changed for tied in ties if tied & changed]
        groups += [{folder} for folder in changed if not any(folder in group for group in groups)]
        kept = [set[int](), changed, *groups, *(changed - group for group in groups)]
        for folders in kept:
            for share in (0.0, 0.5, 1.0):
                yield self._state(folders, share)

    def _state(self, kept: set[int], share: float) -> State:
        """The state in which these folders keep their changes, and files this share of what was not synced."""
        folders, files = set(), {}
        waiting: list[tuple[str, int]] = [("", 0)]
        while waiting:
            path, identity = waiting.pop()
            names = self.names[identity] if identity in kept else self.safe_names.get(identity, {})
            for name, number in names.items():
                place = f"{path}/{name}" if path else name
                if number in self.contents:
                    files[place] = (self._content(number, share), number)
                else:
                    folders.add(place)
                    waiting.append((place, number))
        return State(frozenset(folders), files)

    def _content(self, number: int, share: float) -> bytes:
        now, safe = self.contents[number], self.safe_contents.get(number, b"")
        if now == safe or share == 0:
            return safe
        half = len(now) // 2
        return now if share == 1 else now[:half] + safe[half : len(now)]


class PowerLoss:
    """Runs an action and collects what a power loss could leave of a folder.

    Args:
        root: the folder; what it holds in the beginning is safe.

    Attributes:
        during: the states that were possible before the action had ended.
        after: those behind its end: it has promised that its work is safe.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.during: list[State] = []
        self.after: list[State] = []
        self._disk = _Disk(root)
        self._ties: list[set[int]] = []
        self._keys: set[object] = set()

    def run(self, action: Callable[[], object]) -> None:
        """Do it."""
        self._disk.sync_all()
        with contextlib.ExitStack() as stack:
            for name in _METADATA:
                stack.enter_context(mock.patch.object(os, name, self._noted(name, getattr(os, name))))
            stack.enter_context(mock.patch.object(os, "fsync", self._synced(os.fsync)))
            connect = partial(sqlite3.connect, factory=self._connection())
            stack.enter_context(mock.patch.object(sqlite3, "connect", connect))
            action()
        self._note()
        self._disk.look()
        keys: set[object] = set()
        for state in self._disk.states(self._ties):
            if state.key not in keys:
                keys.add(state.key)
                self.after.append(state)

    def _connection(self) -> type[sqlite3.Connection]:
        """Connections whose commits are seen."""
        loss = self

        class Connection(sqlite3.Connection):
            def execute(self, statement: str, *args: Any) -> sqlite3.Cursor:
                cursor = super().execute(statement, *args)
                if statement == "COMMIT":
                    self._synced()
                elif "wal_checkpoint" in statement and self._syncs():
                    loss._disk.sync_database(self._path)
                return cursor

            def __exit__(self, *args: Any) -> Literal[False]:
                left = super().__exit__(*args)
                self._synced()
                return left

            def close(self) -> None:
                synced = self._syncs()
                loss._note()
                super().close()
                if synced:  # SQLite has synced the log before it copied the log into the database
                    loss._disk.sync_database(self._path)
                loss._note()

            def _synced(self) -> None:
                loss._note_database(self._path if self._syncs() else "")

            def _syncs(self) -> bool:
                try:
                    self._path = super().execute("PRAGMA database_list").fetchall()[0][2]
                    return bool(super().execute("PRAGMA synchronous").fetchone()[0])
                except sqlite3.Error:
                    return False

        return Connection

    def _note_database(self, path: str) -> None:
        self._note()
        if path:
            self._disk.sync_database(path)
            self._note()

    def _note(self) -> None:
        self._disk.look()
        for state in self._disk.states(self._ties):
            if state.key not in self._keys:
                self._keys.add(state.key)
                self.during.append(state)

    def _noted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            self._note()
            if name in ("rename", "replace"):
                self._tie(os.path.dirname(args[0]), os.path.dirname(args[1]))
            result = function(*args, **named)
            self._note()
            return result

        return call

    def _tie(self, *folders: str) -> None:
        tied = {self._disk.inodes.get(os.stat(folder).st_ino, -1) for folder in folders}
        if len(tied) > 1 and -1 not in tied:
            self._ties.append(tied)

    def _synced(self, function: Callable[[int], None]) -> Callable[[int], None]:
        def fsync(descriptor: int) -> None:
            self._note()
            function(descriptor)
            inode = os.fstat(descriptor).st_ino
            identity = self._disk.inodes.get(inode)
            linked = set().union(*(tied for tied in self._ties if identity in tied))
            self._ties = [tied for tied in self._ties if identity not in tied]
            self._disk.sync(inode, linked)
            self._note()

        return fsync


def check_power_loss(
    root: Path,
    action: Callable[[], object],
    seen: Callable[[Path], object],
    *,
    before: Collection[object],
    after: object,
) -> int:
    """Make sure that a power loss leaves the old or the new content, and behind the action's end the new one.

    Args:
        root: the folder that the action writes in.
        action: writes.
        seen: opens a copy of the folder, as a program would, and gives its content.
        before: what ``seen`` may give of a power loss during the action, beside ``after``.
        after: what it gives of the new state.

    Returns:
        The number of states that were looked at.
    """
    loss = PowerLoss(root)
    loss.run(action)
    for states, right in ((loss.during, [*before, after]), (loss.after, [after])):
        for state in states:
            copy = state.write(root.with_name(f"{root.name}-after-power-loss"))
            found = seen(copy)
            shutil.rmtree(copy)
            when = "during the action" if states is loss.during else "after its end"
            assert found in right, f"{when}: {str(found)[:200]!r} of {sorted(state.files)}"
    return len(loss.during)


@dataclass
class FailingDisk:
    """Lets an operation below a folder fail: opening a file to write, writing, syncing, renaming, making a folder.

    A write that fails writes half of its data. Only what goes through Python is seen.

    Args:
        root: the folder.
        at: number of the operation that fails, from 1; None lets all go through.
        number: of the error.
        lasting: whether all operations from there on fail too.
    """

    root: Path
    at: int | None
    number: int = errno.EIO
    lasting: bool = False
    count: int = 0

    def __post_init__(self) -> None:
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> FailingDisk:
        for name in ("rename", "replace", "mkdir", "link"):
            self._stack.enter_context(mock.patch.object(os, name, self._checked(getattr(os, name))))
        self._stack.enter_context(mock.patch.object(os, "fsync", self._checked(os.fsync)))
        opened = self._opened(builtins.open)
        self._stack.enter_context(mock.patch.object(builtins, "open", opened))
        self._stack.enter_context(mock.patch.object(io, "open", opened))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def failed(self) -> bool:
        """Whether the operation has come."""
        return self.at is not None and self.count >= self.at

    def step(self, place: object) -> None:
        """Count an operation; one that is to fail raises."""
        if isinstance(place, int):
            place = os.readlink(f"/proc/self/fd/{place}")
        if not os.path.abspath(os.fsdecode(place)).startswith(f"{self.root}{os.sep}"):  # type: ignore[arg-type]
            return
        self.count += 1
        if self.count == self.at or (self.lasting and self.failed):
            raise OSError(self.number, os.strerror(self.number), str(place))

    def _checked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            if named.get("dir_fd") is None:
                self.step(args[0])
            return function(*args, **named)

        return call

    def _opened(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: Any, mode: str = "r", *args: Any, **named: Any) -> Any:
            if isinstance(file, int) or not set(mode) & set("wax+"):
                return function(file, mode, *args, **named)
            self.step(file)
            return _FailingFile(function(file, mode, *args, **named), self, file)

        return call


class _FailingFile:
    """A file whose writes are counted."""

    def __init__(self, file: Any, disk: FailingDisk, path: object) -> None:
        self._file, self._disk, self._path = file, disk, path

    def write(self, data: Any) -> Any:
        try:
            self._disk.step(self._path)
        except OSError:
            self._file.write(data[: len(data) // 2])
            with contextlib.suppress(OSError):
                self._file.flush()
            raise
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _FailingFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def attempt(disk: FailingDisk, action: Callable[[], object]) -> str:
    """Run an action on a disk; the error's text, empty without one."""
    try:
        with disk:
            action()
    except (OSError, SpecragError) as error:
        return str(error)
    return ""


def each_failure(root: Path, *, few: int | None = None) -> Iterator[FailingDisk]:
    """Disks on which nothing fails, then the first operation, the second, and so on.

    The caller runs the same action on each, from the same state of the folder.

    Args:
        root: the folder that the action writes in.
        few: take so many of the operations, at random; by default all.
    """
    for number, lasting in ((errno.EIO, False), (errno.ENOSPC, True)):
        whole = FailingDisk(root, None)
        yield whole
        assert whole.count > 1
        points = range(1, whole.count + 1)
        for at in points if few is None else random.sample(points, min(kills(few), whole.count)):
            disk = FailingDisk(root, at, number, lasting)
            yield disk
            assert disk.failed
