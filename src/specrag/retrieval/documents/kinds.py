"""Recognise what a file is by its first bytes, whatever its name says."""

from __future__ import annotations

from specrag.retrieval.documents.converters import UnreadableError
from specrag.retrieval.documents.packages import PACKAGES

_MARKS = {
    b"%PDF-": "a PDF",
    b"PK\x03\x04": "a ZIP archive",
    b"PK\x05\x06": "a ZIP archive",
    b"\x1f\x8b": "a gzip file",
    b"\x7fELF": "a program",
    b"\x89PNG": "a PNG image",
    b"GIF87a": "a GIF image",
    b"GIF89a": "a GIF image",
    b"\xff\xd8\xff": "a JPEG image",
    b"II*\x00": "a TIFF image",
    b"MM\x00*": "a TIFF image",
    b"\xd0\xcf\x11\xe0": "an old or encrypted Office file",
    b"7z\xbc\xaf": "a 7-Zip archive",
    b"Rar!\x1a": "a RAR archive",
    b"\xfd7zXZ\x00": "an XZ archive",
    b"\x28\xb5\x2f\xfd": "a Zstandard archive",
    b"SQLite format 3\0": "a database",
    b"OggS\0": "a sound",
    b"ID3\x03": "a sound",
    b"ID3\x04": "a sound",
}
# In a container format, the kind is a few bytes after the beginning.
_INNER = {(b"RIFF", b"WEBP"): "a WebP image", (b"RIFF", b"WAVE"): "a sound", (b"RIFF", b"AVI "): "a film"}
# The bytes that a kind of document begins with; in a PDF, other bytes may precede them within the first 1,024.
_BEGINNINGS = {
    ".pdf": ("a PDF", b"%PDF-", 1024),
    **{ending: (kind, b"PK\x03\x04", 4) for ending, (kind, _) in PACKAGES.items()},
}


def kind_of(start: bytes) -> str | None:
    """What non-text data is, such as ``a PNG image``; ``None`` if it bears no known mark."""
    if start[:3] == bytes(3) and start[4:8] == b"ftyp":
        return "a film or photograph"
    found = next((what for mark, what in _MARKS.items() if start.startswith(mark)), None)
    return found or _INNER.get((start[:4], start[8:12]))


def check_kind(ending: str, start: bytes) -> None:
    """Check that a file's first bytes are of the kind that its ending says.

    Args:
        ending: the ending in lower case, such as ``.pdf``; unknown endings stand for text.
        start: at least the first 1,024 bytes of the file, if it has that many.

    Raises:
        UnreadableError: they are of another kind.
    """
    if ending in _BEGINNINGS:
        named, mark, within = _BEGINNINGS[ending]
        if mark not in start[:within]:
            raise UnreadableError(f"its content is {kind_of(start) or 'something else'}, not {named}")
    elif (what := kind_of(start)) is not None:
        raise UnreadableError(f"its content is {what}, not text")
