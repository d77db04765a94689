"""The home folder of converted models: locks, manifests, checksums; only whole folders are published.

Layout below ``$SPECRAG_HOME`` (default: the platform's cache folder)::

    models/NAME/            a finished model with its manifest.json
    models/.partial-NAME/   a model being made; worthless once the process that makes it is dead
    downloads/NAME/         verified wheels, kept until the model made from them is finished
    locks/NAME.lock         held by the process that makes NAME
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import platformdirs

from specrag import artifacts
from specrag.artifacts import (
    MANIFEST,
    Remedies,
    atomic_write_json,
    exclusive_lock,
    make_folder,
    new_folder,
)
from specrag.errors import ModelFilesError

_REMEDIES = Remedies(
    "free some space or set SPECRAG_HOME to a folder on a larger disk",
    "make it writable or set SPECRAG_HOME to another folder",
)


def home() -> Path:
    """The folder that holds all models: ``$SPECRAG_HOME``, else the platform's cache folder."""
    configured = os.environ.get("SPECRAG_HOME")
    return Path(configured).expanduser() if configured else Path(platformdirs.user_cache_dir("specrag"))


def sha256_of(path: Path) -> str:
    """The sha256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def disk_full(place: Path, doing: str) -> ModelFilesError:
    """The error for a disk that ran full."""
    return ModelFilesError(f"SPECRAG_HOME: {str(place)!r}: no space is left while {doing}: {_REMEDIES.full}")


def write_errors(place: Path, doing: str) -> contextlib.AbstractContextManager[None]:
    """Turn the operating system's refusals to write below ``place`` into one-line errors.

    Raises:
        ModelFilesError: the disk is full, or the folder cannot be written.
    """
    return artifacts.write_errors(place, "SPECRAG_HOME", ModelFilesError, _REMEDIES, doing)


@dataclass(frozen=True)
class FileRecord:
    """Size, checksum and modification time of a finished file."""

    bytes: int
    sha256: str
    mtime_ns: int

    @classmethod
    def of(cls, path: Path) -> FileRecord:
        stat = path.stat()
        return cls(stat.st_size, sha256_of(path), stat.st_mtime_ns)


@dataclass(frozen=True)
class Manifest:
    """What a finished model folder holds and where it came from."""

    name: str
    source: str
    licence: str
    files: dict[str, FileRecord]

    @property
    def bytes(self) -> int:
        """Total size of all files."""
        return sum(record.bytes for record in self.files.values())

    def write(self, folder: Path) -> None:
        # Several processes may notice changed time stamps at the same time.
        atomic_write_json(folder / MANIFEST, asdict(self), indent=2, shared=True)


@dataclass(frozen=True)
class Store:
    """Model folders below one home. Nothing is created until something is written."""

    home: Path

    def folder(self, name: str) -> Path:
        """Where the finished model ``name`` is, or will be."""
        return self.home / "models" / name

    def downloads(self, name: str) -> Path:
        """Where the wheels of ``name`` wait to be unpacked."""
        return self.home / "downloads" / name

    def manifest(self, name: str) -> Manifest | None:
        """The manifest of a finished model, or None if there is no such model.

        Raises:
            ModelFilesError: there is a folder, but its manifest cannot be read.
        """
        path = self.folder(name) / MANIFEST
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            files = {file: FileRecord(**record) for file, record in content.pop("files").items()}
            return Manifest(files=files, **content)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
            raise self._damaged(name, MANIFEST, "cannot be read") from error

    def check(self, name: str, *, thorough: bool = False) -> Manifest | None:
        """The manifest of ``name``, after checking that its files are the recorded ones.

        To be fast, a file with the recorded size and time stamp is trusted; any other is hashed. ``thorough`` hashes
        every file.

        Raises:
            ModelFilesError: a file is missing or its content is not the recorded one.
        """
        manifest = self.manifest(name)
        if manifest is None:
            return None
        files = dict(manifest.files)
        for file, record in manifest.files.items():
            try:
                stat = (self.folder(name) / file).stat()
                if stat.st_size != record.bytes:
                    raise self._damaged(name, file, f"has {stat.st_size} bytes, not {record.bytes}")
                if thorough or stat.st_mtime_ns != record.mtime_ns:
                    if sha256_of(self.folder(name) / file) != record.sha256:
                        raise self._damaged(name, file, "has another sha256 than the one recorded")
                    files[file] = replace(record, mtime_ns=stat.st_mtime_ns)
            except FileNotFoundError as error:
                raise self._damaged(name, file, "is missing") from error
        if files != manifest.files:
            # A copied home has new time stamps; record them, since hashing at every start would be slow.
            manifest = replace(manifest, files=files)
            with contextlib.suppress(OSError):
                manifest.write(self.folder(name))
        return manifest

    @contextlib.contextmanager
    def locked(self, name: str, *, progress: bool = False) -> Iterator[None]:
        """Hold the lock of ``name`` against all other processes; waits for another process to finish."""

        def busy() -> None:
            if progress:
                print(f"{name}: waiting for another process that is pulling it", file=sys.stderr)

        with contextlib.ExitStack() as stack:
            with write_errors(self.home, "taking the lock"):
                make_folder(self.home / "locks")
                stack.enter_context(exclusive_lock(self.home / "locks" / f"{name}.lock", busy))
            yield

    @contextlib.contextmanager
    def publishing(self, name: str, source: str, licence: str) -> Iterator[Path]:
        """A new folder to fill: it becomes the model ``name`` if the block ends without an error, else it is removed.

        The caller must hold the lock of ``name``.
        """
        target = self.folder(name)
        partial = target.with_name(f".partial-{name}")
        with write_errors(self.home, f"making {name}"), new_folder(target, partial) as folder:
            yield folder
            files = {
                path.relative_to(folder).as_posix(): FileRecord.of(path)
                for path in sorted(folder.rglob("*"))
                if path.is_file()
            }
            Manifest(name, source, licence, files).write(folder)

    def remove(self, name: str) -> None:
        """Delete the finished model ``name``, if there is one. The caller must hold its lock."""
        with write_errors(self.home, f"removing {name}"), contextlib.suppress(FileNotFoundError):
            # Delete the manifest first: a folder without one is not a model, so a kill here leaves no half model.
            (self.folder(name) / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(self.folder(name))

    def require_space(self, needed: int, doing: str) -> None:
        """Refuse, before any work is done, what will not fit on the disk.

        Args:
            needed: bytes that will be written below the home.
            doing: what needs them, for the error message.

        Raises:
            ModelFilesError: fewer bytes are free.
        """
        free = self._free_bytes(doing)
        if free < needed:
            raise ModelFilesError(
                f"SPECRAG_HOME: {str(self.home)!r} has {free / 1e9:.2f} GB free and {doing} needs "
                f"{needed / 1e9:.2f} GB: {_REMEDIES.full}"
            )

    def has_space(self, needed: int) -> bool:
        """Whether ``needed`` bytes can be written below the home.

        Raises:
            ModelFilesError: the home cannot be made.
        """
        return self._free_bytes("looking for space") >= needed

    def _free_bytes(self, doing: str) -> int:
        with write_errors(self.home, doing):
            self.home.mkdir(parents=True, exist_ok=True)
            return shutil.disk_usage(self.home).free

    def _damaged(self, name: str, file: str, what: str) -> ModelFilesError:
        return ModelFilesError(
            f"model {name!r}: {str(self.folder(name) / file)!r} {what}: "
            f"fetch it again with `specrag models pull {name}`"
        )
