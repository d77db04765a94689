"""OpenDocument, as written by LibreOffice: texts, presentations and spreadsheets."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from specrag.retrieval.documents.converters import (
    Converted,
    Part,
    ReadingLimits,
    UnreadableError,
    check_characters,
    check_pages,
    first_heading,
    given_title,
    guard,
    html_part,
)
from specrag.retrieval.documents.packages import Package, property_title
from specrag.retrieval.documents.tables import Row, table_parts

# HTML tags for elements; the content of elements not listed here is kept without a tag.
_TAGS = {
    "p": "p",
    "list": "ul",
    "list-item": "li",
    "list-header": "li",
    "table": "table",
    "table-row": "tr",
    "table-cell": "td",
}
_SPACES = {"line-break": "<br>", "s": " ", "tab": " "}
_MOST_ROWS = 2**20  # of a sheet
# Deleted text, comments, note numbers, and descriptions of pictures.
_NOT_TEXT = frozenset({"tracked-changes", "annotation", "note-citation", "title", "desc", "settings"})


def convert_opendocument(data: bytes, limits: ReadingLimits) -> Converted:
    """Convert ODT, ODP and ODS: one part per text, per slide of a presentation, or per sheet of a spreadsheet or more.

    The title of a text is its first heading, else the title property. Otherwise it is the title property, and for a
    presentation without one the first slide's title.
    """

    def work() -> Converted:
        with Package(io.BytesIO(data), ".odt") as package:
            if b"encryption-data" in package.read("META-INF/manifest.xml"):
                raise UnreadableError("encrypted OpenDocument; remove its password first")
            title = given_title(property_title(package, "meta.xml"))
            content = package.xml("content.xml")
        sheets = content.findall("{*}body/{*}spreadsheet/{*}table")
        if sheets:
            return Converted(title, tuple(_sheets(sheets, limits)))
        slides = content.findall("{*}body/{*}presentation/{*}page")
        if slides:
            parts = tuple(_slides(slides, limits))
            return Converted(title or (first_heading(parts[0].text) if parts else ""), parts)
        part = html_part("".join(map(_html, content.iterfind("{*}body/{*}text/*"))))
        return Converted(first_heading(part.text) or title, (part,))

    return guard("OpenDocument", work)


def _html(element: Any) -> str:
    kind = _name(element.tag)
    if kind in _NOT_TEXT:
        return ""
    if kind in _SPACES:
        return _SPACES[kind]
    if kind == "note-body":  # a footnote occurs in the middle of a sentence
        return escape(f" ({_words(element)})")
    inner = escape(element.text or "") + "".join(_html(each) + escape(each.tail or "") for each in element)
    # The title of a text is a paragraph with that style, the title of a slide a frame with that class.
    if (
        kind == "h"
        or (kind, _attribute(element, "style-name")) == ("p", "Title")
        or _attribute(element, "class") == "title"
    ):
        level = min(int(_attribute(element, "outline-level") or 1), 6)
        return f"<h{level}>{escape(_words(element))}</h{level}>" if inner.strip() else ""
    tag = _TAGS.get(kind)
    return f"<{tag}>{inner}</{tag}>" if tag else inner


def _slides(slides: Sequence[Any], limits: ReadingLimits) -> Iterator[Part]:
    check_pages(len(slides), limits, "slides")
    for number, slide in enumerate(slides, 1):
        part = html_part("".join(map(_html, slide)))
        if part.text:
            yield Part(part.text, f"slide {number}", part.markup)


def _sheets(sheets: Sequence[Any], limits: ReadingLimits) -> Iterator[Part]:
    characters = 0
    for sheet in sheets:
        for part in table_parts(_rows(sheet, limits), f"sheet {_attribute(sheet, 'name')}", limits):
            characters += len(part.text)
            check_characters(characters, limits)
            yield part


def _rows(sheet: Any, limits: ReadingLimits) -> Iterator[Row]:
    """The displayed text, row by row; the file stores repeated rows and cells only once."""
    number = 0
    for row in sheet.iter("{*}table-row"):
        cells: dict[int, str] = {}
        column = characters = 0
        for cell in row.iterfind("*"):
            repeated = _repeated(cell, "number-columns-repeated")
            if text := " ".join(map(_words, cell.iterfind("{*}p"))).strip():
                characters += repeated * len(text)
                check_characters(characters, limits)
                cells.update(dict.fromkeys(range(column, column + repeated), text))
            column += repeated
        rows = _repeated(row, "number-rows-repeated")
        if cells:
            yield from (Row(number + each, cells) for each in range(1, rows + 1))
        number += rows


def _repeated(element: Any, attribute: str) -> int:
    return min(max(int(_attribute(element, attribute) or 1), 1), _MOST_ROWS)


def _words(element: Any) -> str:
    return " ".join("".join(element.itertext()).split())


def _name(name: str) -> str:
    """A name without its namespace."""
    return name.rpartition("}")[2]


def _attribute(element: Any, name: str) -> str:
    """The attribute with this name, ignoring namespaces; empty without it."""
    return next((value for key, value in element.attrib.items() if _name(key) == name), "")
