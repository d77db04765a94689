"""DOCX, converted by mammoth, and the slides of PPTX."""

from __future__ import annotations

import io
from collections.abc import Iterator
from html import escape
from typing import Any

from specrag.retrieval.documents.converters import (
    Converted,
    Part,
    ReadingLimits,
    check_characters,
    check_pages,
    first_heading,
    given_title,
    guard,
    html_part,
)
from specrag.retrieval.documents.packages import Package, property_title, relation_id

_PRESENTATION = "ppt/presentation.xml"
_PROPERTIES = "docProps/core.xml"
_NO_TEXT = frozenset({"sldNum", "dt", "ftr", "hdr", "sldImg"})  # placeholders that every slide repeats


def convert_docx(data: bytes) -> Converted:
    """Convert DOCX with mammoth; the title is the first heading of the text, or the title property."""
    import mammoth

    def work() -> Converted:
        with Package(io.BytesIO(data), ".docx") as package:
            title = property_title(package, _PROPERTIES)
        image = mammoth.images.img_element(lambda _: {"src": ""})
        html = mammoth.convert_to_html(
            io.BytesIO(data), style_map="p[style-name='Title'] => h1:fresh", convert_image=image
        ).value
        part = html_part(html)
        return Converted(first_heading(part.text) or given_title(title), (part,))

    return guard("DOCX", work)


def convert_pptx(data: bytes, limits: ReadingLimits) -> Converted:
    """Convert PPTX, one part per slide, with tables and notes; the title is the property, or the first slide's."""

    def work() -> Converted:
        with Package(io.BytesIO(data), ".pptx") as package:
            parts = tuple(_slides(package, limits))
            title = given_title(property_title(package, _PROPERTIES))
        return Converted(title or (first_heading(parts[0].text) if parts else ""), parts)

    return guard("PPTX", work)


def _slides(package: Package, limits: ReadingLimits) -> Iterator[Part]:
    files = package.relations(_PRESENTATION)
    named = [files.get(relation_id(slide), "") for slide in package.xml(_PRESENTATION).iter("{*}sldId")]
    slides = [name for name in dict.fromkeys(named) if name in package]
    check_pages(len(slides), limits, "slides")
    characters = 0
    for number, name in enumerate(slides, 1):
        html = "".join(map(_shape, package.xml(name).iterfind("{*}cSld/{*}spTree/*")))
        notes = package.relations(name).get("notesSlide", "")
        html += "".join(map(_shape, package.xml(notes).iterfind("{*}cSld/{*}spTree/*")))
        characters += len(html)
        check_characters(characters, limits)
        part = html_part(html)
        if part.text:
            yield Part(part.text, f"slide {number}", part.markup)


def _shape(shape: Any) -> str:
    """A shape as HTML: a text, a table, or a group of shapes."""
    kind = shape.tag.rpartition("}")[2]
    if kind in ("grpSp", "AlternateContent", "Choice"):
        return "".join(map(_shape, shape))
    if kind == "graphicFrame":
        return "".join(map(_table, shape.iter("{*}tbl")))
    if kind != "sp":
        return ""
    holder = shape.find("{*}nvSpPr/{*}nvPr/{*}ph")
    role = "" if holder is None else holder.get("type", "")
    if role in _NO_TEXT:
        return ""
    paragraphs = [_paragraph(paragraph) for paragraph in shape.iterfind("{*}txBody/{*}p")]
    if role in ("title", "ctrTitle"):
        return f"<h1>{' '.join(paragraphs)}</h1>"
    return "".join(f"<p>{paragraph}</p>" for paragraph in paragraphs)


def _table(table: Any) -> str:
    """A table as HTML; its first row is the header."""
    rows = ""
    for row in table.iterfind("{*}tr"):
        tag = "td" if rows else "th"
        cells = ("<br>".join(map(_paragraph, cell.iter("{*}p"))) for cell in row.iterfind("{*}tc"))
        rows += f"<tr>{''.join(f'<{tag}>{cell}</{tag}>' for cell in cells)}</tr>"
    return f"<table>{rows}</table>"


def _paragraph(paragraph: Any) -> str:
    return "".join(
        "<br>" if element.tag.endswith("}br") else escape(element.text or "")
        for element in paragraph.iter("{*}t", "{*}br")
    )
