"""Read files as documents, by their endings; everything unreadable is reported with a reason."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import math
import os
import stat
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from specrag.retrieval.documents.converters import (
    LARGEST,
    UNLIMITED,
    Converted,
    Part,
    ReadingLimits,
    UnreadableError,
    check_characters,
    clean,
    convert_html,
    convert_markdown,
    convert_pdf,
    convert_text,
    decode,
)
from specrag.retrieval.documents.epub import convert_epub
from specrag.retrieval.documents.files import Skipped, SourceFile
from specrag.retrieval.documents.kinds import check_kind
from specrag.retrieval.documents.mail import convert_mail
from specrag.retrieval.documents.notebooks import convert_notebook
from specrag.retrieval.documents.office import convert_docx, convert_pptx
from specrag.retrieval.documents.opendocument import convert_opendocument
from specrag.retrieval.documents.tables import convert_csv, convert_tsv, convert_xlsx

_CHANGED = "it changed while it was read; index it again"
_TOO_LARGE = f"larger than {LARGEST >> 20} MiB; split it"
_RACY_NS = 2 * 10**9  # a change so soon after another may leave the time stamp as it was
_LONGEST_REASON = 200
_DEEPEST = 3  # a document attached to an e-mail that is attached to an e-mail

_CONVERTERS: Mapping[str, Callable[[bytes], Converted]] = {
    ".txt": convert_text,
    ".md": convert_markdown,
    ".markdown": convert_markdown,
    ".html": convert_html,
    ".htm": convert_html,
    ".xhtml": convert_html,
    ".docx": convert_docx,
    ".ipynb": convert_notebook,
}
# Converters whose output can be larger than the file check the limits themselves.
_LIMITED: Mapping[str, Callable[[bytes, ReadingLimits], Converted]] = {
    ".pdf": convert_pdf,
    ".csv": convert_csv,
    ".tsv": convert_tsv,
    ".xlsx": convert_xlsx,
    ".pptx": convert_pptx,
    ".odt": convert_opendocument,
    ".ods": convert_opendocument,
    ".odp": convert_opendocument,
    ".epub": convert_epub,
}
_NO_CONVERTER = frozenset({".doc", ".rtf", ".ppt", ".xls", ".xlsb", ".msg", ".pages", ".key", ".numbers"})


@dataclass(frozen=True, slots=True)
class Document:
    """One document.

    Args:
        source: the file's name in the knowledge base; the records of one file share it.
        title: the document's own title, or the name of its file without the ending; empty for a record without a
            title.
        parts: its text; a PDF has one part per page.
        metadata: a record's other fields or an e-mail's header: strings, numbers, truth values and lists of these.
    """

    source: str
    title: str
    parts: tuple[Part, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReadFile:
    """Documents of a file.

    Args:
        documents: one, or many for a file of records, or none if it cannot be read.
        skipped: the file, or its rows or pages, that could not be read, with the reason.
        sha256: sha256 of the bytes that were read, in hexadecimal; empty if they could not be read reliably.
    """

    documents: tuple[Document, ...]
    skipped: tuple[Skipped, ...]
    sha256: str


def read_file(file: SourceFile, limits: ReadingLimits = UNLIMITED) -> ReadFile:
    """Read a file and convert it to text; never raises because of the file's content.

    The ending decides the format: Markdown, HTML, PDF, Office and OpenDocument files, EPUB, e-mail, CSV, notebooks,
    JSON lines and JSON (each also with ``.gz``); anything else is plain text, provided that it is text. JSON contains
    records if it is an array of objects with a text; otherwise it is text too. A file whose content does not match its
    ending is not read. A file that changes meanwhile gives no documents, so that a later run reads it whole. Call it
    from one thread at a time: PDFium does not support more.

    Args:
        file: the file.
        limits: a file that exceeds them counts as unreadable; for a file of records they apply to all rows together.
    """
    try:
        data = _read_unchanged(file.path)
    except OSError as error:
        return ReadFile((), (Skipped(file.source, f"cannot be read: {error.strerror}"),), "")
    except UnreadableError as error:
        return ReadFile((), (Skipped(file.source, str(error)),), "")
    sha256 = hashlib.sha256(data).hexdigest()
    try:
        documents, skipped = [], []
        for entry in _convert(file.source, data, limits):
            if isinstance(entry, Document):
                documents.append(entry)
            else:
                skipped.append(entry)
        check_characters(sum(len(part.text) for made in documents for part in made.parts), limits)
    except UnreadableError as error:
        return ReadFile((), (Skipped(file.source, _one_line(str(error))),), sha256)
    except Exception as error:  # from a converter: one bad file must not affect the others
        reason = _one_line(f"it cannot be converted: {type(error).__name__}: {error}")
        return ReadFile((), (Skipped(file.source, reason),), sha256)
    return ReadFile(tuple(documents), tuple(skipped), sha256)


def _convert(source: str, data: bytes, limits: ReadingLimits, depth: int = 0) -> Iterable[Document | Skipped]:
    name = PurePosixPath(source)
    if not data:
        raise UnreadableError("empty: it holds no text")
    if name.suffix.lower() == ".gz":
        name, data = name.with_suffix(""), _unpack(data)
    kind = name.suffix.lower()
    if kind in _NO_CONVERTER:
        raise UnreadableError(f"there is no converter for {kind}; save it as DOCX, XLSX, PPTX, PDF or HTML")
    check_kind(kind, data[:1024])
    records = _RECORDS[kind](data) if kind in _RECORDS else None
    if records is not None:
        return _records(source, records)
    if kind == ".eml":
        converted = convert_mail(
            data, limits, lambda name, content: _attached(name, content, limits, depth + 1)
        )
    elif kind in _LIMITED:
        converted = _LIMITED[kind](data, limits)
    else:
        converted = _CONVERTERS.get(kind, convert_text)(data)
    if not any(part.text.strip() for part in converted.parts):
        raise UnreadableError("empty: it holds no text")
    document = Document(source, converted.title or name.stem, converted.parts, converted.metadata)
    return [document, *([Skipped(source, _one_line(converted.missing))] if converted.missing else [])]


def _attached(name: str, data: bytes, limits: ReadingLimits, depth: int) -> Converted:
    """Convert a document attached to another, with all of its records together."""
    if depth > _DEEPEST:
        raise UnreadableError("attached too deeply")
    found = list(_convert(name, data, limits, depth))
    parts = tuple(part for each in found if isinstance(each, Document) for part in each.parts)
    return Converted("", parts, "; ".join(each.reason for each in found if isinstance(each, Skipped)))


def _records(source: str, rows: Iterable[Record | BadRecord]) -> Iterable[Document | Skipped]:
    """One document per row; a file without a usable row is reported once, not once per row."""
    documents, bad = [], []
    for row in rows:
        if isinstance(row, Record):
            documents.append(Document(source, row.title, (Part(row.text, row.place),), row.metadata))
        else:
            bad.append(row)
    if not documents and not bad:
        raise UnreadableError("empty: it holds no records")
    if not documents:
        raise UnreadableError(f"none of its {len(bad)} rows is usable; {bad[0].place}: {bad[0].reason}")
    return documents + [Skipped(source, _one_line(f"{row.place}: {row.reason}")) for row in bad]


def _unpack(data: bytes) -> bytes:
    try:
        with gzip.open(io.BytesIO(data)) as stream:
            unpacked = stream.read(LARGEST + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise UnreadableError(f"broken gzip file: {error}") from None
    if len(unpacked) > LARGEST:
        raise UnreadableError(f"it unpacks to {_TOO_LARGE}")
    return unpacked


def _read_unchanged(path: Path) -> bytes:
    """Read a file and check that it did not change meanwhile.

    Its state before and after is compared. If the last change is so recent that another one might have the same time
    stamp, the file is read twice.

    Raises:
        OSError: it is gone or may not be read.
        UnreadableError: it changed, is too large, or is not a regular file.
    """
    # A pipe that has taken the file's place would otherwise block forever.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
        before = os.fstat(stream.fileno())
        if not stat.S_ISREG(before.st_mode):
            raise UnreadableError("it is no longer a file")
        if before.st_size > LARGEST:
            raise UnreadableError(_TOO_LARGE)
        data = stream.read(LARGEST + 1)
        if time.time_ns() - before.st_mtime_ns < _RACY_NS:
            stream.seek(0)
            if stream.read(LARGEST + 1) != data:
                raise UnreadableError(_CHANGED)
    try:
        after = os.stat(path)
    except FileNotFoundError:
        raise UnreadableError(_CHANGED) from None
    if _state(before) != _state(after) or len(data) != before.st_size:
        raise UnreadableError(_CHANGED)
    return data


def _state(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _one_line(reason: str) -> str:
    reason = " ".join(reason.split())
    return reason if len(reason) <= _LONGEST_REASON else f"{reason[: _LONGEST_REASON - 1]}…"


@dataclass(frozen=True, slots=True)
class Record:
    """One record of a JSON file; ``place`` is ``line 17`` or ``entry 17``, counted from 1."""

    title: str
    text: str
    place: str
    metadata: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BadRecord:
    """An unusable row, with the reason."""

    place: str
    reason: str


def read_json_lines(data: bytes) -> Iterator[Record | BadRecord]:
    """One record per line, ``{"text": ..., "title": ...}``; blank lines are skipped.

    Other fields that hold a string, a number, a truth value, or a list of these become metadata.

    Bytes that are not UTF-8 only make their own line unusable.
    """
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        data = decode(data).encode()
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not line.strip():
            continue
        place = f"line {number}"
        try:
            yield _record(_parse(line.decode()), place)
        except UnicodeDecodeError:
            yield BadRecord(place, "it is no UTF-8")
        except ValueError as error:
            yield BadRecord(place, str(error))


def read_json(data: bytes) -> Iterable[Record | BadRecord] | None:
    """The records of a JSON file: an array of objects, some of which have a text; ``None`` for any other content.

    Raises:
        UnreadableError: the file is empty or holds an empty value.
    """
    try:
        content = _parse(decode(data))
    except ValueError:  # with comments, or truncated: still a text
        return None
    if content in ({}, [], "", None):
        raise UnreadableError("empty: it holds no text")
    entries = content if isinstance(content, list) else ()
    if not all(isinstance(entry, dict) for entry in entries) or not any(
        isinstance(entry.get("text"), str) for entry in entries
    ):
        return None
    return (_checked(entry, f"entry {number}") for number, entry in enumerate(entries, 1))


def _checked(value: object, place: str) -> Record | BadRecord:
    try:
        return _record(value, place)
    except ValueError as error:
        return BadRecord(place, str(error))


def _parse(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON: {error.msg} at character {error.pos + 1}") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"it is no JSON: {name} is no number")


def _record(value: object, place: str) -> Record:
    if not isinstance(value, dict):
        raise ValueError(f"it is no object with a field text but {_kind(value)}")
    text, title = value.get("text"), value.get("title")
    if not isinstance(text, str):
        raise ValueError(
            f"its field text is {_kind(text)}, no string" if "text" in value else "no field text"
        )
    if not text.strip():
        raise ValueError("empty: its text has no words")
    if title is not None and not isinstance(title, str):
        raise ValueError(f"its field title is {_kind(title)}, no string")
    metadata = {
        clean(key): _stored(field)
        for key, field in value.items()
        if key not in ("text", "title")
        and (_scalar(field) or (isinstance(field, list) and all(map(_scalar, field))))
    }
    return Record(" ".join(clean(title or "").split()), clean(text), place, metadata)


def _scalar(field: object) -> bool:
    return isinstance(field, str | int) or (isinstance(field, float) and math.isfinite(field))


def _stored(field: Any) -> Any:
    if isinstance(field, list):
        return [_stored(item) for item in field]
    return clean(field) if isinstance(field, str) else field


def _kind(value: object) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a truth value", type(None): "null"}
    return kinds.get(type(value), "a number")


_RECORDS: Mapping[str, Callable[[bytes], Iterable[Record | BadRecord] | None]] = {
    ".jsonl": read_json_lines,
    ".ndjson": read_json_lines,
    ".json": read_json,
}
