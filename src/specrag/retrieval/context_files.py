"""The files of a long context: every file that was named must be readable as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from specrag.errors import InputError
from specrag.retrieval.documents import Document, Part, find_files, read_file
from specrag.retrieval.files import Skipped

#: A text, a file or folder, or a document that has been read already.
ContextItem: TypeAlias = str | Path | Document


@dataclass(frozen=True, slots=True)
class ContextFiles:
    """What the files hold.

    Attributes:
        documents: in the order of the paths; the files of a folder by name.
        skipped: what could not be read inside a folder or a file, such as pages without text.
    """

    documents: tuple[Document, ...]
    skipped: tuple[Skipped, ...]


def read_context(paths: Sequence[Path]) -> ContextFiles:
    """Read files and folders as one context; a file that is reached twice is read once.

    Raises:
        InputError: there is no path, a file that was named cannot be read as text (such as a PDF of pictures), or
            there is no text in a folder.
    """
    if not paths:
        raise InputError("context", list(paths), "give at least one file")
    documents: list[Document] = []
    skipped: list[Skipped] = []
    seen: set[Path] = set()
    for path in paths:
        found = find_files([path])
        skipped.extend(found.skipped)
        holds_text = False
        for file in found.files:
            holds_text = holds_text or file.path in seen
            if file.path in seen:
                continue
            seen.add(file.path)
            read = read_file(file)
            holds_text = holds_text or bool(read.documents)
            documents.extend(read.documents)
            skipped.extend(read.skipped)
        if not holds_text:
            reason = skipped[-1].reason if skipped else "it holds no text"
            raise InputError("context", str(path), reason)
    return ContextFiles(tuple(documents), tuple(skipped))


def documents_of(given: ContextItem | Sequence[ContextItem]) -> tuple[Document, ...]:
    """Documents from whatever a caller holds: documents, texts, paths; one of them or several.

    Raises:
        InputError: something else was given, a path cannot be read as text, or there is no text at all.
    """
    items = [given] if isinstance(given, str | Path | Document) else list(given)
    documents: list[Document] = []
    for number, item in enumerate(items, 1):
        if isinstance(item, Document):
            documents.append(item)
        elif isinstance(item, Path):
            documents.extend(read_context([item]).documents)
        elif isinstance(item, str):
            documents.append(Document(f"text {number}", "", (Part(item),)))
        else:
            raise InputError("documents", item, "give texts, paths or documents")
    if items and not any(part.text.strip() for document in documents for part in document.parts):
        raise InputError("documents", "", "they hold no text; give at least one word")
    return tuple(documents)
