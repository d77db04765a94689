"""EPUB: the chapters of a book in order, converted like HTML."""

from __future__ import annotations

import io
import posixpath
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from specrag.retrieval.documents.converters import (
    Converted,
    Part,
    ReadingLimits,
    UnreadableError,
    check_characters,
    check_pages,
    clean,
    decode_html,
    guard,
    html_part,
    outline,
)
from specrag.retrieval.documents.packages import Package, inside, property_title


def convert_epub(data: bytes, limits: ReadingLimits) -> Converted:
    """Convert EPUB 2 and 3; the place of a part is its chapter, by the table of contents and the headings.

    Raises:
        UnreadableError: the book is broken, locked by DRM, or exceeds the limits.
    """

    def work() -> Converted:
        with Package(io.BytesIO(data), ".epub") as package:
            root = package.xml("META-INF/container.xml").find("{*}rootfiles/{*}rootfile")
            name = inside("", root.get("full-path"))
            folder = posixpath.dirname(name)
            book = package.xml(name)
            items = {item.get("id"): item for item in book.iterfind("{*}manifest/{*}item")}
            spine = [items.get(entry.get("idref")) for entry in book.iterfind("{*}spine/{*}itemref")]
            files = dict.fromkeys(inside(folder, item.get("href", "")) for item in spine if item is not None)
            chapters = [file for file in files if file in package]
            _check_unlocked(package, chapters)
            check_pages(len(chapters), limits, "chapters")
            contents = [inside(folder, item.get("href", "")) for item in items.values() if _is_contents(item)]
            labels = {file: label for name in contents for file, label in _labels(package, name).items()}
            parts = tuple(_parts(package, chapters, labels, limits))
            title = " ".join(clean(property_title(package, name)).split())
        return Converted(title, parts)

    return guard("EPUB", work)


def _parts(
    package: Package, chapters: Iterable[str], labels: Mapping[str, str], limits: ReadingLimits
) -> Iterator[Part]:
    """The parts of each file: text before its first heading belongs to the current chapter; the rest has headings."""
    chapter = ""
    characters = 0
    for file in chapters:
        part = html_part(decode_html(package.read(file)))
        characters += len(part.text)
        check_characters(characters, limits)
        chapter = labels.get(file, chapter)
        headings = outline(part.text, markdown=part.markup == "markdown").headings
        first = headings[0].start if headings else len(part.text)
        if before := part.text[:first].strip():
            yield Part(before, chapter, part.markup)
        if headings:
            chapter = " > ".join(headings[-1].path)
            yield Part(part.text[first:], "", part.markup)


def _is_contents(item: Any) -> bool:
    """Whether a file is a table of contents: of EPUB 3, or of EPUB 2."""
    return "nav" in item.get("properties", "").split() or item.get("media-type") == "application/x-dtbncx+xml"


def _labels(package: Package, name: str) -> dict[str, str]:
    """The names that a table of contents gives to whole files."""
    root = package.xml(name, recover=True)  # HTML's entities are not XML's
    entries = [(link.get("href", ""), link) for link in root.iter("{*}a")]
    for point in root.iter("{*}navPoint"):
        target, label = point.find("{*}content"), point.find("{*}navLabel")
        if target is not None and label is not None:
            entries.append((target.get("src", ""), label))
    folder = posixpath.dirname(name)
    labels: dict[str, str] = {}
    for target, label in entries:
        words = " ".join(clean("".join(label.itertext())).split())
        if words and "#" not in target:
            labels.setdefault(inside(folder, target), words)
    return labels


def _check_unlocked(package: Package, chapters: list[str]) -> None:
    """Fonts may be encrypted, chapters may not."""
    hidden = package.xml("META-INF/encryption.xml").iter("{*}CipherReference")
    if not {inside("", each.get("URI", "")) for each in hidden}.isdisjoint(chapters):
        raise UnreadableError("locked EPUB (DRM): its chapters are encrypted")
