"""Small real files for the tests of reading, and what they expect of a reading."""

from __future__ import annotations

import io
from pathlib import Path

import docx
from reportlab.lib.pdfencrypt import StandardEncryption
from reportlab.pdfgen import canvas

from specrag.retrieval.documents.files import SourceFile, find_files
from specrag.retrieval.documents.reader import Document, ReadFile


def file_of(path: Path) -> SourceFile:
    return find_files([path]).files[0]


def written(folder: Path, name: str, content: str | bytes) -> SourceFile:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return file_of(path)


def one(read: ReadFile) -> Document:
    assert len(read.documents) == 1, read.skipped
    return read.documents[0]


def reason(read: ReadFile) -> str:
    """The one reason why a file gave no document."""
    assert not read.documents
    assert len(read.skipped) == 1
    text = read.skipped[0].reason
    assert text
    assert "\n" not in text
    return text


def pdf(*pages: str, title: str | None = None, password: str | None = None, drawing: bool = False) -> bytes:
    """A PDF with these lines on its pages; with ``drawing`` a page also shows something that is no text."""
    stream = io.BytesIO()
    page = canvas.Canvas(stream, encrypt=StandardEncryption(password) if password else None)
    if title:
        page.setTitle(title)
    for text in pages:
        if drawing:
            page.rect(50, 50, 100, 100, fill=1)
        for row, line in enumerate(text.splitlines()):
            page.drawString(50, 800 - 14 * row, line)
        page.showPage()
    page.save()
    return stream.getvalue()


def word_file(title: str = "") -> bytes:
    document = docx.Document()
    document.core_properties.title = title
    document.add_paragraph("A first paragraph about pumps.")
    stream = io.BytesIO()
    document.save(stream)
    return stream.getvalue()
