"""Files that outlive kills and power losses: atomic writes, checksums, locks, and folders of numbered generations.

Whatever specrag keeps on a disk is written through here, in one of three ways:

- a small file by :func:`atomic_write`;
- a whole folder by :func:`new_folder`: filled under another name, then renamed;
- a folder that is updated while others read it by :func:`publish_generation`. Its layout::

    manifest.json           a :class:`GenerationManifest`: which generation is current, its files and checksums
    generations/000007/     the files of that generation
    building/               what an unfinished build has left, for its rerun
    writer.lock             held by the process that writes

Each is on the disk before it has its name, so that a crash leaves the old content or the new one. A disk that is full
or read-only is reported in one line by :func:`disk_errors`.
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
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(folder: Path) -> None:
    """Wait until a folder and everything below it is on the disk."""
    for path in folder.rglob("*"):
        fsync(path)
    fsync(folder)


def atomic_write(path: Path, data: bytes | memoryview, *, shared: bool = False) -> None:
    """Replace a file's content, whole or not at all; on the disk when this returns.

    Args:
        path: of the file.
        data: its new content.
        shared: other processes may write the same file at the same time; by default the caller sees to it that none
            does.

    Raises:
        OSError: the disk refuses; the old content stays.
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
    """Write an object as JSON by :func:`atomic_write`."""
    atomic_write(path, f"{json.dumps(content, indent=indent)}\n".encode(), shared=shared)


def rename(source: Path, target: Path) -> None:
    """Rename a file, replacing ``target``; on the disk when this returns.

    Raises:
        OSError: the disk refuses.
    """
    source.replace(target)
    fsync(target.parent)
    if source.parent != target.parent:
        fsync(source.parent)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, where they are missing; on the disk when this returns.

    Raises:
        OSError: the disk refuses.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):
        fsync(path.parent)


def checksum(path: Path) -> str:
    """The 128-bit xxh3 checksum of a file's content, in hexadecimal: finds damage, at the disk's speed."""
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


# -- folders ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def new_folder(target: Path, partial: Path) -> Iterator[Path]:
    """An empty folder to fill; left without an error it becomes ``target``, else it is removed.

    An older ``target`` is replaced by two renames. A crash between them leaves neither.

    Args:
        target: the folder's name in the end.
        partial: its name until then, in the same folder; what a crash has left there is removed.

    Raises:
        OSError: the disk refuses; ``target`` is as it was, or new.
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
    """Hold a lock file against all other processes; it ends with the process at the latest.

    Args:
        path: of the lock file.
        busy: called if another process holds the lock: raises to give up, returns to wait.

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
    """Why a disk refuses: it is ``full``, or something else, in the system's words."""

    full: bool
    reason: str


@contextlib.contextmanager
def disk_errors(
    place: Path, described: Callable[[Refusal], SpecragError], also: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Turn the refusals of a disk into one-line errors.

    Args:
        place: what is written.
        described: makes the error to raise.
        also: exceptions by which libraries report a refusal: ``sqlite3.OperationalError``, faiss's ``RuntimeError``.
    """
    refusals: tuple[type[Exception], ...] = (OSError, *also)
    try:
        yield
    except refusals as error:
        raise described(_refusal(error, place)) from error


def _refusal(error: Exception, place: Path) -> Refusal:
    reason = " ".join(str(error).split())
    if isinstance(error, OSError):
        # numpy's short write has no number.
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
    """What a finished file looked like."""

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
    """What a folder of generations holds. A kind of artifact is a subclass with fields of its own.

    Attributes:
        generation: the number of the folder that holds the files; grows with each change.
        files: size and checksum of each file, by its name in that folder.
    """

    what: ClassVar[str]
    """The artifact in messages, such as ``knowledge base``."""
    error: ClassVar[type[SpecragError]]
    """Raised for whatever is wrong with it."""
    rebuild: ClassVar[str]
    """The remedy for damage."""

    generation: int
    files: Mapping[str, FileRecord]

    @classmethod
    def parse(cls, folder: Path, content: dict[str, Any], /) -> Self:
        """The manifest in a JSON object; any of ValueError, KeyError, AttributeError, TypeError means damage."""
        raise NotImplementedError

    @classmethod
    def missing(cls, folder: Path) -> SpecragError:
        """The error for a folder without a manifest."""
        raise NotImplementedError

    def header(self) -> dict[str, Any]:
        """What stands before the fields in the JSON object: format and kind."""
        raise NotImplementedError

    @property
    def bytes(self) -> int:
        """Size of all files together."""
        return sum(record.bytes for record in self.files.values())

    @staticmethod
    def exists(folder: Path) -> bool:
        """Whether a folder holds a finished artifact, damaged or not."""
        return (folder / MANIFEST).is_file()

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The manifest of a folder.

        Raises:
            SpecragError: there is none, it has another format, or it is damaged; of the type :attr:`error`.
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
            SpecragError: there is none, or a file is missing, cut or longer; of the type :attr:`error`.
        """
        for _ in range(_ATTEMPTS):
            manifest = cls.read(folder)
            path = manifest.generation_folder(folder)
            descriptor = _lock_folder(path, fcntl.LOCK_SH)
            generation = None if descriptor is None else Generation(path, manifest, descriptor)
            # Between manifest and lock a writer may have replaced the one and removed the other.
            current = cls.read(folder).generation == manifest.generation
            if current:
                manifest.check_sizes(folder)  # also says what is missing where the folder cannot be opened
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
            OSError: the disk refuses; the old manifest stays.
        """
        content = {**self.header(), **asdict(self)}
        content["files"] = content.pop("files")  # the longest comes last
        atomic_write_json(folder / MANIFEST, content)

    def generation_folder(self, folder: Path) -> Path:
        """Where the files lie."""
        return folder / GENERATIONS / f"{self.generation:06d}"

    def check_sizes(self, folder: Path) -> None:
        """Make sure that every file is there in its whole length; reads none of them.

        Raises:
            SpecragError: one is missing, cut or longer.
        """
        for name, record in self.files.items():
            path = self.generation_folder(folder) / name
            try:
                size = path.stat().st_size
            except OSError as error:
                raise self.damaged(path, f"is missing ({error.strerror or error})") from error
            if size != record.bytes:
                raise self.damaged(path, f"has {size:,} bytes, not {record.bytes:,}")

    def verify(self, folder: Path, names: Iterable[str] | None = None) -> None:
        """Make sure that the content of files is the recorded one, by reading them.

        Args:
            folder: the artifact.
            names: of the files; all by default.

        Raises:
            SpecragError: one has another checksum, or is not recorded.
        """
        for name in self.files if names is None else names:
            path = self.generation_folder(folder) / name
            record = self.files.get(name)
            if record is None:
                raise self.damaged(folder / MANIFEST, f"does not name the file {name!r}")
            try:
                found = checksum(path)
            except OSError as error:
                raise self.damaged(path, f"cannot be read ({error.strerror or error})") from error
            if found != record.checksum:
                raise self.damaged(path, "has another checksum than the one recorded")


_Manifest = TypeVar("_Manifest", bound=GenerationManifest)


class Generation(Generic[_Manifest]):
    """A generation that stays on the disk as long as this object is open. Made by :meth:`GenerationManifest.open`.

    Attributes:
        folder: of its files.
    """

    def __init__(self, folder: Path, manifest: _Manifest, descriptor: int) -> None:
        self.folder = folder
        self.manifest = manifest
        self._close = weakref.finalize(self, os.close, descriptor)

    def close(self) -> None:
        """Let the generation go."""
        self._close()


def check_target(folder: Path, field: str) -> None:
    """Refuse to build in a folder that holds somebody's files.

    Raises:
        InputError: it does, or it is a file.
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
        new: below ``folder``; holds the files that the manifest names, and no others.
        manifest: of the new generation.

    Raises:
        OSError: the disk refuses; the old generation stays current.
    """
    for name in manifest.files:
        fsync(new / name)
    fsync(new)
    target = manifest.generation_folder(folder)
    target.parent.mkdir(exist_ok=True)
    fsync(folder)
    shutil.rmtree(target, ignore_errors=True)  # of a build that was killed one step later
    new.rename(target)
    fsync(target.parent)
    manifest.write(folder)


def remove_generations(folder: Path, *, keep: int) -> None:
    """Remove the generations that nobody reads, except number ``keep``. Only the writer may call it."""
    generations = folder / GENERATIONS
    if not generations.is_dir():
        return
    for old in sorted(generations.iterdir()):
        if old.name == f"{keep:06d}":
            continue
        descriptor = _lock_folder(old, fcntl.LOCK_EX)
        if descriptor is not None:
            with contextlib.suppress(OSError):  # what cannot be removed now is for the next writer
                shutil.rmtree(old)
            os.close(descriptor)


def _lock_folder(folder: Path, kind: int) -> int | None:
    """A descriptor that holds a lock on a folder; None where it cannot be opened or the lock is taken."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:  # a file system without locks: readers go on, nothing is removed below them
        if kind == fcntl.LOCK_SH:
            return descriptor
        os.close(descriptor)
        return None
    return descriptor
