"""What a file holds, told by its bytes: a name says only what somebody wants it to be.

The ending decides which converter reads a file, so the bytes must be of that ending's kind. Archives are looked
into by their table of contents only; nothing is unpacked to the disk, so that a link in one leads nowhere.
"""

from __future__ import annotations

import gzip
import zipfile
import zlib
from pathlib import Path, PurePath

from specrag.errors import InputError
from specrag.retrieval.converters import UnreadableError, decode

_START = 64 * 2**10
_UNPACKED = 256 * 2**20  # bytes that a DOCX may hold
_ENTRIES = 10_000
_RATIO = 200  # times that an archive may shrink; text shrinks 20 times, bombs 1,000 times

_BINARY = {
    b"%PDF-": "a PDF",
    b"PK\x03\x04": "a ZIP archive",
    b"\x1f\x8b": "a gzip file",
    b"\x7fELF": "a program",
    b"MZ": "a program",
    b"\x89PNG": "an image",
    b"GIF8": "an image",
    b"\xff\xd8\xff": "an image",
    b"\xd0\xcf\x11\xe0": "an old Office file",
    b"7z\xbc\xaf": "an archive",
    b"Rar!": "an archive",
    b"SQLite format 3\0": "a database",
}


def check_content(path: Path, name: str) -> None:
    """Make sure that a file's bytes are what its name says.

    Args:
        path: where it lies.
        name: what it is to be called.

    Raises:
        InputError: they are something else.
        OSError: the file cannot be read.
    """
    kind = PurePath(name.lower())
    with path.open("rb") as file:
        start = file.read(_START)
    if not start:
        raise InputError("files", name, "it is empty")
    if kind.suffix == ".gz":
        start, kind = _unpack(path, name), PurePath(kind.stem)
        if kind.suffix in {".pdf", ".docx"}:
            raise InputError("files", name, "it is packed twice; upload it without .gz")
    if kind.suffix == ".pdf":
        if b"%PDF-" not in start[:1024]:
            raise InputError("files", name, f"its content is {_kind(start)}, no PDF")
    elif kind.suffix == ".docx":
        _check_docx(path, name, start)
    else:
        _check_text(name, start)


def _kind(start: bytes) -> str:
    return next((what for mark, what in _BINARY.items() if start.startswith(mark)), "something else")


def _check_text(name: str, start: bytes) -> None:
    if (what := _kind(start)) != "something else" and not start.startswith(b"MZ"):
        raise InputError("files", name, f"its content is {what}, no text")
    try:
        decode(start)
    except UnreadableError as error:
        # The cut may stand inside a character of UTF-16.
        if not start.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise InputError("files", name, f"its content is no text: {error}") from None


def _check_docx(path: Path, name: str, start: bytes) -> None:
    if not start.startswith(b"PK\x03\x04"):
        raise InputError("files", name, f"its content is {_kind(start)}, no DOCX")
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, ValueError, EOFError, NotImplementedError) as error:
        raise InputError("files", name, f"it is a broken DOCX: {error}") from None
    if "word/document.xml" not in {entry.filename for entry in entries}:
        raise InputError("files", name, "its content is a ZIP archive, no DOCX")
    packed = sum(entry.compress_size for entry in entries)
    unpacked = sum(entry.file_size for entry in entries)
    if len(entries) > _ENTRIES or unpacked > max(_RATIO * packed, 2**20) or unpacked > _UNPACKED:
        raise InputError("files", name, "it unpacks to far more than a document holds")


def _unpack(path: Path, name: str) -> bytes:
    """The first bytes of what a gzip file holds, once its whole size has been seen to be bearable."""
    size = path.stat().st_size
    most = min(_UNPACKED, max(_RATIO * size, 2**20))
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
