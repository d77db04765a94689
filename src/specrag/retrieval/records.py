"""JSON lines and JSON files of texts: one record a document."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from specrag.retrieval.converters import UnreadableError, clean, decode

_SHAPE = "give a list of {title, text} objects or an object of {title: text}"


@dataclass(frozen=True, slots=True)
class Record:
    """One text of a file of texts. ``place`` is ``line 17`` or ``entry 17``, counted from 1."""

    title: str
    text: str
    place: str
    metadata: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A row that is no text, and why."""

    place: str
    reason: str


def read_json_lines(data: bytes) -> Iterator[Record | BadRecord]:
    """A record a line, ``{"text": ..., "title": ...}``; blank lines are passed over.

    Other fields that hold a string, a number, a truth value, or a list of these become metadata.

    Bytes that are no UTF-8 cost only their line.
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


def read_json(data: bytes) -> Iterator[Record | BadRecord]:
    """The records of a JSON file: a list of records or texts, an object of title and text, or one record.

    Raises:
        UnreadableError: the file is no JSON, or holds nothing of this shape.
    """
    try:
        content = _parse(decode(data))
    except ValueError as error:
        raise UnreadableError(f"broken JSON: {error}") from None
    if isinstance(content, dict) and isinstance(content.get("text"), str):
        content = [content]
    if isinstance(content, dict):
        values = [_titled(title, value) for title, value in content.items()]
    elif isinstance(content, list):
        values = [{"text": value} if isinstance(value, str) else value for value in content]
    else:
        raise UnreadableError(f"JSON without texts: {_SHAPE}")
    records: list[Record | BadRecord] = []
    for number, value in enumerate(values, 1):
        place = f"entry {number}"
        try:
            records.append(_record(value, place))
        except ValueError as error:
            records.append(BadRecord(place, str(error)))
    if records and not any(isinstance(record, Record) for record in records):
        raise UnreadableError(f"JSON without texts: {_SHAPE}")
    yield from records


def _titled(title: str, value: object) -> object:
    if isinstance(value, str):
        return {"title": title, "text": value}
    return {"title": title, **value} if isinstance(value, dict) else value


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
