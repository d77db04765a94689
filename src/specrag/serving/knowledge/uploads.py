"""Receives the files of a multipart body: written as they arrive, checked by content, kept only if all are good.

A file's ending decides which converter reads it, so its bytes must be of that kind. Of an archive only the table of
contents is read; nothing is unpacked to the disk, so a link inside it leads nowhere.
"""

from __future__ import annotations

import errno
import gzip
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import BinaryIO

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from specrag.artifacts import fsync, make_folder
from specrag.errors import InputError
from specrag.retrieval.documents import PACKAGES, Package, UnreadableError, check_kind, decode, most_unpacked
from specrag.serving.errors import ApiError
from specrag.serving.knowledge.places import check_document

_START = 64 * 2**10
_UNPACKED = 256 * 2**20  # bytes that an archive may unpack to


def check_content(path: Path, name: str) -> None:
    """Check that a file's bytes are of the kind that its name says.

    Args:
        path: where the file is.
        name: the name that it is to have.

    Raises:
        InputError: they are of another kind, or cannot be unpacked.
        OSError: the file cannot be read.
    """
    kind = PurePath(name.lower())
    with path.open("rb") as file:
        start = file.read(_START)
    if not start:
        raise InputError("files", name, "it is empty")
    if kind.suffix == ".gz":
        start, kind = _unpack(path, name), PurePath(kind.stem)
        if kind.suffix == ".pdf" or kind.suffix in PACKAGES:
            raise InputError("files", name, "it is packed twice; upload it without .gz")
    try:
        check_kind(kind.suffix, start)
        if kind.suffix in PACKAGES:
            with Package(path, kind.suffix, _UNPACKED):
                return
    except UnreadableError as error:
        raise InputError("files", name, str(error)) from None
    if kind.suffix != ".pdf":
        _check_text(name, start)


def _check_text(name: str, start: bytes) -> None:
    try:
        decode(start)
    except UnreadableError as error:
        # The sample may end inside a character of UTF-16.
        if not start.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise InputError("files", name, f"its content is not text: {error}") from None


def _unpack(path: Path, name: str) -> bytes:
    """The first bytes of what a gzip file holds, after checking how large all of it is."""
    size = path.stat().st_size
    most = min(_UNPACKED, most_unpacked(size))
    start, total = b"", 0
    try:
        with gzip.open(path) as stream:
            while block := stream.read(2**20):
                start = start or block[:_START]
                total += len(block)
                if total > most:
                    raise InputError("files", name, "it unpacks to far more than a document holds")
    except (OSError, EOFError, zlib.error) as error:
        raise InputError("files", name, f"it is a broken gzip file: {error}") from None
    if not start:
        raise InputError("files", name, "it is empty")
    return start


_FIELDS = frozenset({"file", "files", "files[]"})
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class _Receiver:
    """Splits a multipart body into its files; the parser calls the methods in ``callbacks``.

    Args:
        boundary: between the parts.
        folder: a new folder for the files.
        most_files: how many files are accepted.
        most_bytes: of all files together.
    """

    def __init__(self, boundary: bytes, folder: Path, most_files: int, most_bytes: int) -> None:
        self.names: list[str] = []
        self.finished = False
        self._folder = folder
        self._most_files = most_files
        self._most_bytes = most_bytes
        self._bytes = 0
        self._file: BinaryIO | None = None
        self._field, self._value = b"", b""
        self._headers: dict[bytes, bytes] = {}
        callbacks: dict[str, Callable[..., None]] = {
            "on_part_begin": self._begin,
            "on_header_field": self._on_field,
            "on_header_value": self._on_value,
            "on_header_end": self._on_header_end,
            "on_headers_finished": self._open,
            "on_part_data": self._on_data,
            "on_part_end": self._close,
            "on_end": self._end,
        }
        self._parser = MultipartParser(boundary, callbacks)  # type: ignore[arg-type]

    def feed(self, data: bytes) -> None:
        """Parse the next part of the body."""
        try:
            self._parser.write(data)
        except FormParserError:
            raise ApiError(
                400, "the body is no well-formed multipart/form-data", code="invalid_multipart"
            ) from None

    def abandon(self) -> None:
        """Close the file that is open, if any."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _begin(self) -> None:
        self._headers = {}
        self._field = self._value = b""

    def _on_field(self, data: bytes, start: int, end: int) -> None:
        self._field += data[start:end]

    def _on_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header_end(self) -> None:
        self._headers[self._field.lower()] = self._value
        self._field = self._value = b""

    def _open(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        field = options.get(b"name", b"").decode("utf-8", "replace")
        if field not in _FIELDS or b"filename" not in options:
            raise ApiError(400, "send files, in fields named files", code="invalid_multipart", param="files")
        if len(self.names) >= self._most_files:
            raise ApiError(413, f"send at most {self._most_files} files at once", param="files")
        name = check_document(options[b"filename"].decode("utf-8", "surrogateescape"))
        if name.casefold() in {other.casefold() for other in self.names}:
            raise InputError("files", name, "it is there twice")
        self.names.append(name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = open(os.open(self._folder / name, flags, 0o600), "wb")  # noqa: SIM115 - closed in _close

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        assert self._file is not None
        self._bytes += end - start
        if self._bytes > self._most_bytes:
            raise ApiError(413, f"the files are larger than {self._most_bytes:,} bytes")
        self._file.write(data[start:end])

    def _close(self) -> None:
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None

    def _end(self) -> None:
        self.finished = True


async def receive_files(request: Request, folder: Path, most_files: int, most_bytes: int) -> tuple[str, ...]:
    """Write the files of a request into a new folder: all of them, or no files and no folder.

    Args:
        request: has a multipart body.
        folder: the folder to make.
        most_files: how many files are accepted.
        most_bytes: of all files together.

    Returns:
        The files' names.

    Raises:
        ApiError: the body is malformed, too large, or the disk is full.
        InputError: a name or a content cannot be used.
        ClientDisconnect: the client went away.
    """
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not 1 <= len(boundary) <= 70:
        raise ApiError(415, "send the files as multipart/form-data")
    receiver: _Receiver | None = None
    kept = False
    try:
        await run_in_threadpool(make_folder, folder)
        receiver = _Receiver(boundary, folder, most_files, most_bytes)
        async for chunk in request.stream():
            if chunk:
                await run_in_threadpool(receiver.feed, chunk)
        if not receiver.finished:
            raise ApiError(400, "the body ends in the middle of a file", code="invalid_multipart")
        if not receiver.names:
            raise ApiError(400, "send at least one file", code="invalid_multipart", param="files")
        await run_in_threadpool(_check, folder, receiver.names)
        kept = True
        return tuple(receiver.names)
    except OSError as error:
        raise disk_error(error) from error
    finally:
        if not kept:
            if receiver is not None:
                receiver.abandon()
            shutil.rmtree(folder, ignore_errors=True)


def _check(folder: Path, names: list[str]) -> None:
    for name in names:
        check_content(folder / name, name)
    fsync(folder)


def disk_error(error: OSError) -> ApiError:
    """The error that a client gets if the disk refuses."""
    if error.errno in _FULL:
        return ApiError(507, "no space is left on the server's disk", code="disk_full")
    return ApiError(500, "the server cannot write the files; its log says why", code="disk_error")
