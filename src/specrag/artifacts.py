"""Files that survive kills and power losses: atomic writes, checksums, locks, and folders of numbered generations.

Everything specrag keeps on disk is written through this module, in one of three ways:

- a small file with :func:`atomic_write`;
- a whole folder with :func:`new_folder`: filled under a temporary name, then renamed;
- a folder that is updated while others read it with :func:`publish_generation`. Its layout::

    manifest.json           a :class:`GenerationManifest`: which generation is current, its files and checksums
    generations/000007/     the files of that generation
    building/               leftovers of an unfinished build, for its rerun
    writer.lock             held by the process that writes

Content is flushed to disk before it gets its final name, so a crash leaves either the old content or the new.
:func:`write_errors` reports a full or read-only disk in one line.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import xxhash
from filelock import FileLock, Timeout

from specrag.errors import InputError, SpecragError

MANIFEST = "manifest.json"
GENERATIONS = "generations"
BUILDING = "building"
LOCK = "writer.lock"

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_BLOCK = 1 << 20
_ATTEMPTS = 100
_WAIT = 0.02  # seconds; a writer locks out readers only while it deletes


# -- files ------------------------------------------------------------------------------------------------------


def fsync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(folder: Path) -> None:
    """Wait until a folder and everything below it is on disk."""
    for path in folder.rglob("*"):
        fsync(path)
    fsync(folder)


def atomic_write(path: Path, data: bytes | memoryview, *, shared: bool = False) -> None:
    """Replace a file's content, whole or not at all; it is on disk when this returns.

    Args:
        path: the file.
        data: its new content.
        shared: other processes may write the same file at the same time; by default the caller must rule that out.

    Raises:
        OSError: the disk refuses the write; the old content stays.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new" if shared else f".{path.name}.new")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    fsync(path.parent)


def atomic_write_json(path: Path, content: object, *, indent: int = 1, shared: bool = False) -> None:
    """Write an object as JSON with :func:`atomic_write`."""
    atomic_write(path, f"{json.dumps(content, indent=indent)}\n".encode(), shared=shared)


def rename(source: Path, target: Path) -> None:
    """Rename a file, replacing ``target``; the change is on disk when this returns.

    Raises:
        OSError: the disk refuses the write.
    """
    source.replace(target)
    fsync(target.parent)
    if source.parent != target.parent:
        fsync(source.parent)


def make_folder(folder: Path) -> None:
    """Make a folder and any missing parents; they are on disk when this returns.

    Raises:
        OSError: the disk refuses the write.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):
        fsync(path.parent)


def checksum(path: Path) -> str:
    """The 128-bit xxh3 checksum of a file's content, in hexadecimal: detects damage as fast as the disk reads."""
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


# -- folders ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def new_folder(target: Path, partial: Path) -> Iterator[Path]:
    """An empty folder to fill: it becomes ``target`` if the block ends without an error, else it is removed.

    An existing ``target`` is replaced by two renames. A crash between them leaves neither.

    Args:
        target: the folder's final name.
        partial: its name until then, in the same parent folder; leftovers of a crash under this name are removed.

    Raises:
        OSError: the disk refuses the write; ``target`` is unchanged, or new.
    """
    replaced = partial.with_name(f"{partial.name}.old")
    for leftover in (partial, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        make_folder(target.parent)
        partial.mkdir()
        yield partial
        fsync_tree(partial)
        if target.exists():
            target.rename(replaced)
        try:
            partial.rename(target)
        except OSError:
            if replaced.exists():
                replaced.rename(target)
            raise
        fsync(target.parent)
    finally:
        for leftover in (partial, replaced):
            shutil.rmtree(leftover, ignore_errors=True)


@contextlib.contextmanager
def exclusive_lock(path: Path, busy: Callable[[], None]) -> Iterator[None]:
    """Hold a lock file against all other processes; it is released when the process ends at the latest.

    Args:
        path: the lock file.
        busy: called if another process holds the lock: it raises to give up, or returns to wait.

    Raises:
        OSError: the file cannot be written.
    """
    lock = FileLock(path)
    with contextlib.suppress(Timeout):
        lock.acquire(timeout=0)
    if not lock.is_locked:
        busy()
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


# -- refusals of the disk ---------------------------------------------------------------------------------------


class Refusal(NamedTuple):
    """Why a disk refused a write: it is ``full``, or another ``reason`` in the system's words."""

    full: bool
    reason: str


@contextlib.contextmanager
def disk_errors(
    place: Path, described: Callable[[Refusal], SpecragError], also: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Turn write errors of a disk into one-line errors.

    Args:
        place: what is being written.
        described: makes the error to raise.
        also: exceptions with which libraries report a failed write: ``sqlite3.OperationalError``, faiss's
            ``RuntimeError``.
    """
    refusals: tuple[type[Exception], ...] = (OSError, *also)
    try:
        yield
    except refusals as error:
        raise described(_refusal(error, place)) from error


class Remedies(NamedTuple):
    """The ends of two messages: what to do about a ``full`` disk, and about one that ``refused`` otherwise."""

    full: str
    refused: str


def write_errors(
    path: Path,
    what: str,
    error: Callable[[str], SpecragError],
    remedies: Remedies,
    doing: str = "",
    also: tuple[type[Exception], ...] = (),
) -> contextlib.AbstractContextManager[None]:
    """:func:`disk_errors` in the words that all messages share.

    Args:
        path: what is being written.
        what: its kind, such as ``knowledge base``.
        error: makes the error to raise of a message.
        remedies: the messages' ends.
        doing: why it is written, such as ``making NAME``.
        also: see :func:`disk_errors`.
    """
    meanwhile = f" while {doing}" if doing else ""

    def described(refusal: Refusal) -> SpecragError:
        if refusal.full:
            return error(f"{what}: {str(path)!r}: no space is left{meanwhile}: {remedies.full}")
        return error(
            f"{what}: {str(path)!r}: cannot be written{meanwhile} ({refusal.reason}): {remedies.refused}"
        )

    return disk_errors(path, described, also)


def _refusal(error: Exception, place: Path) -> Refusal:
    reason = " ".join(str(error).split())
    if isinstance(error, OSError):
        # A short write reported by numpy has no errno.
        full = error.errno in _FULL or (error.errno is None and "requested" in reason)
        return Refusal(full, error.strerror or reason)
    # SQLite reports a failed write as "disk I/O error" or "database or disk is full".
    full = (
        getattr(error, "sqlite_errorname", "") == "SQLITE_FULL"
        or any(os.strerror(number) in reason for number in _FULL)
        or _is_full(place)
    )
    return Refusal(full, reason[-160:])


def _is_full(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        status = os.statvfs(folder)
        return status.f_bavail * status.f_frsize < _BLOCK
    return False


# -- generations ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size and checksum of a finished file."""

    bytes: int
    checksum: str

    @classmethod
    def of(cls, path: Path) -> FileRecord:
        """Measure a file."""
        return cls(path.stat().st_size, checksum(path))

    def __post_init__(self) -> None:
        if type(self.bytes) is not int or type(self.checksum) is not str:
            raise TypeError("a file's record")


@dataclass(frozen=True, kw_only=True)
class GenerationManifest:
    """What a folder of generations holds. Each kind of artifact is a subclass with its own fields.

    Attributes:
        generation: number of the folder that holds the files; grows with each change.
        files: size and checksum of each file, by its name in that folder.
    """

    what: ClassVar[str]
    """What messages call the artifact, such as ``knowledge base``."""
    error: ClassVar[type[SpecragError]]
    """Raised for anything that is wrong with it."""
    rebuild: ClassVar[str]
    """How to repair damage, for messages."""

    generation: int
    files: Mapping[str, FileRecord]

    @classmethod
    def parse(cls, folder: Path, content: dict[str, Any], /) -> Self:
        """Parse a JSON object; a ValueError, KeyError, AttributeError or TypeError means damage."""
        raise NotImplementedError

    @classmethod
    def missing(cls, folder: Path) -> SpecragError:
        """The error for a folder without a manifest."""
        raise NotImplementedError

    def header(self) -> dict[str, Any]:
        """The entries that precede the fields in the JSON object: format and kind."""
        raise NotImplementedError

    @property
    def bytes(self) -> int:
        """Total size of all files."""
        return sum(record.bytes for record in self.files.values())

    @staticmethod
    def exists(folder: Path) -> bool:
        """Whether a folder holds a finished artifact, damaged or not."""
        return (folder / MANIFEST).is_file()

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the manifest of a folder.

        Raises:
            SpecragError: (of type :attr:`error`) there is none, it has another format, or it is damaged.
        """
        path = folder / MANIFEST
        try:
            data = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise cls.missing(folder) from None
        except OSError as error:
            reason = error.strerror or error
            raise cls.error(
                f"{cls.what}: {str(path)!r} cannot be read ({reason}): make it readable"
            ) from error
        try:
            return cls.parse(folder, json.loads(data))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise cls.damaged(path, "cannot be read") from error

    @classmethod
    def damaged(cls, path: Path, what: str) -> SpecragError:
        """The error for a damaged file."""
        return cls.error(f"{cls.what}: {str(path)!r} {what}: it is damaged; {cls.rebuild}")

    @classmethod
    def open(cls, folder: Path) -> Generation[Self]:
        """Open the current generation for reading.

        Raises:
            SpecragError: (of type :attr:`error`) there is none, or a file is missing or has the wrong size.
        """
        for _ in range(_ATTEMPTS):
            manifest = cls.read(folder)
            path = manifest.generation_folder(folder)
            descriptor = _lock_folder(path, fcntl.LOCK_SH)
            generation = None if descriptor is None else Generation(path, manifest, descriptor)
            # Between reading the manifest and locking the folder, a writer may have published a new generation and
            # removed this one.
            current = cls.read(folder).generation == manifest.generation
            if current:
                manifest.check_sizes(folder)  # if the folder cannot be opened, this also says what is missing
            if generation is not None:
                if current:
                    return generation
                generation.close()
            time.sleep(_WAIT)
        raise cls.error(
            f"{cls.what}: {str(path)!r} cannot be opened: make it readable, or stop the process that holds it"
        )

    def write(self, folder: Path) -> None:
        """Make this the manifest of a folder.

        Raises:
            OSError: the disk refuses the write; the old manifest stays.
        """
        content = {**self.header(), **asdict(self)}
        content["files"] = content.pop("files")  # the longest entry goes last
        atomic_write_json(folder / MANIFEST, content)

    def generation_folder(self, folder: Path) -> Path:
        """The folder that holds the files."""
        return folder / GENERATIONS / f"{self.generation:06d}"

    def check_sizes(self, folder: Path) -> None:
        """Check that every file is there and has its recorded size; reads no content.

        Raises:
            SpecragError: one is missing or has the wrong size.
        """
        for name, record in self.files.items():
            path = self.generation_folder(folder) / name
            try:
                size = path.stat().st_size
            except OSError as error:
                raise self.damaged(path, f"is missing ({error.strerror or error})") from error
            if size != record.bytes:
                raise self.damaged(path, f"has {size:,} bytes, not {record.bytes:,}")

    def verify(self, folder: Path) -> None:
        """Read every file and check that its content is the recorded one.

        Raises:
            SpecragError: one cannot be read, or has another checksum.
        """
        for name, record in self.files.items():
            path = self.generation_folder(folder) / name
            try:
                found = checksum(path)
            except OSError as error:
                raise self.damaged(path, f"cannot be read ({error.strerror or error})") from error
            if found != record.checksum:
                raise self.damaged(path, "has another checksum than the one recorded")


_Manifest = TypeVar("_Manifest", bound=GenerationManifest)


class Generation(Generic[_Manifest]):
    """A generation that stays on disk as long as this object is open. Made by :meth:`GenerationManifest.open`.

    Attributes:
        folder: the folder of its files.
    """

    def __init__(self, folder: Path, manifest: _Manifest, descriptor: int) -> None:
        self.folder = folder
        self.manifest = manifest
        self._close = weakref.finalize(self, os.close, descriptor)

    def close(self) -> None:
        """Release the generation."""
        self._close()


def check_target(folder: Path, field: str) -> None:
    """Refuse to build in a folder that holds other files.

    Raises:
        InputError: the folder holds files that are not ours, or it is a file.
    """
    if folder.is_dir() and not GenerationManifest.exists(folder):
        ours = {BUILDING, GENERATIONS, LOCK, f".{MANIFEST}.new"}
        others = sorted(path.name for path in folder.iterdir() if path.name not in ours)
        if others:
            remedy = f"it holds other files such as {others[0]!r}; give a new or empty folder"
            raise InputError(field, str(folder), remedy)
    elif folder.exists() and not folder.is_dir():
        raise InputError(field, str(folder), "it is a file; give a folder")


def publish_generation(folder: Path, new: Path, manifest: GenerationManifest) -> None:
    """Make the files in ``new`` the current generation. Only the writer may call it.

    Args:
        folder: the artifact.
        new: a folder below ``folder`` that holds exactly the files that the manifest names.
        manifest: the new generation's manifest.

    Raises:
        OSError: the disk refuses the write; the old generation stays current.
    """
    for name in manifest.files:
        fsync(new / name)
    fsync(new)
    target = manifest.generation_folder(folder)
    target.parent.mkdir(exist_ok=True)
    fsync(folder)
    shutil.rmtree(target, ignore_errors=True)  # left by a build that was killed one step later
    new.rename(target)
    fsync(target.parent)
    manifest.write(folder)


def remove_generations(folder: Path, *, keep: int) -> None:
    """Remove all generations that nobody reads, except number ``keep``. Only the writer may call it."""
    generations = folder / GENERATIONS
    if not generations.is_dir():
        return
    for old in sorted(generations.iterdir()):
        if old.name == f"{keep:06d}":
            continue
        descriptor = _lock_folder(old, fcntl.LOCK_EX)
        if descriptor is not None:
            with contextlib.suppress(OSError):  # the next writer removes what cannot be removed now
                shutil.rmtree(old)
            os.close(descriptor)


def _lock_folder(folder: Path, kind: int) -> int | None:
    """A descriptor that holds a lock on a folder; None if the folder cannot be opened or the lock is taken."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:  # a file system without locks: readers go on, and writers remove nothing
        if kind == fcntl.LOCK_SH:
            return descriptor
        os.close(descriptor)
        return None
    return descriptor
