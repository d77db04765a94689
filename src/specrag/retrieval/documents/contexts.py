"""Long contexts: read from files, and cut into chunks of documents or whole exchanges of a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TypeAlias

from specrag.errors import InputError
from specrag.retrieval.documents.chunking import Chunker
from specrag.retrieval.documents.converters import Part
from specrag.retrieval.documents.files import Skipped, find_files
from specrag.retrieval.documents.reader import Document, read_file

#: The source of a conversation, where a document has its file's name.
CONVERSATION = "conversation"

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ContextChunk:
    """A verbatim stretch of a long context.

    Attributes:
        text: the text for an encoder; in a conversation, with the speakers' names.
        source: the file, or :data:`CONVERSATION`.
        title: the document's title; empty if it has none.
        place: such as ``page 3``, ``Install > Linux`` or ``messages 4-7``.
        tokens: number of tokens of the text, by the tokenizer that it was cut with.
        document: index of the document that it is from, from 0.
        messages: for a conversation, the messages in it, oldest first.
    """

    text: str
    source: str
    title: str
    place: str
    tokens: int
    document: int = 0
    messages: tuple[Message, ...] = ()


def cut_documents(documents: Sequence[Document], chunker: Chunker) -> tuple[ContextChunk, ...]:
    """The chunks of all documents, in their order."""
    return tuple(
        ContextChunk(
            chunk.text, document.source, document.title, chunk.place, chunker.count(chunk.text), number
        )
        for number, document in enumerate(documents)
        for chunk in chunker.chunk(document)
    )


def cut_messages(messages: Sequence[Message], chunker: Chunker) -> tuple[ContextChunk, ...]:
    """The chunks of a conversation: whole exchanges (a user's message and the answers to it) if they fit.

    Args:
        messages: ``{"role": ..., "content": ...}``, oldest first.
        chunker: limits the length of chunks, and cuts messages that are too long.
    """
    exchanges: list[list[_Piece]] = []
    for piece in _pieces(messages, chunker):
        begins = piece.role == "user" and (not exchanges or exchanges[-1][-1].role != "user")
        if begins or not exchanges:
            exchanges.append([])
        exchanges[-1].append(piece)
    groups: list[list[_Piece]] = []
    for exchange in exchanges:
        whole = sum(piece.tokens for piece in exchange) <= chunker.max_tokens
        for unit in [exchange] if whole else [[piece] for piece in exchange]:
            if groups and sum(piece.tokens for piece in groups[-1] + unit) <= chunker.max_tokens:
                groups[-1].extend(unit)
            else:
                groups.append(list(unit))
    return tuple(_chunk_of(group) for group in groups)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A message, or a stretch of a message that is too long; ``number`` counts the messages from 1."""

    number: int
    role: str
    text: str
    tokens: int


def _pieces(messages: Sequence[Message], chunker: Chunker) -> list[_Piece]:
    found = []
    for number, message in enumerate(messages, 1):
        whole = Document(CONVERSATION, "", (Part(message["content"]),))
        for chunk in chunker.chunk(whole):
            found.append(_Piece(number, message["role"], chunk.text, chunker.count(chunk.text)))
    return found


def _chunk_of(pieces: Sequence[_Piece]) -> ContextChunk:
    spoken: tuple[Message, ...] = tuple(
        {"role": role, "content": "\n\n".join(piece.text for piece in same)}
        for role, same in groupby(pieces, key=lambda piece: piece.role)
    )
    first, last = pieces[0].number, pieces[-1].number
    return ContextChunk(
        text="\n".join(f"{message['role'].capitalize()}: {message['content']}" for message in spoken),
        source=CONVERSATION,
        title="",
        place=f"message {first}" if first == last else f"messages {first}-{last}",
        tokens=sum(piece.tokens for piece in pieces),
        messages=spoken,
    )


#: A text, a file or folder, or a document that has been read already.
ContextItem: TypeAlias = str | Path | Document


@dataclass(frozen=True, slots=True)
class ContextFiles:
    """Documents of a context.

    Attributes:
        documents: in the order of the paths; the files of a folder are sorted by name.
        skipped: what could not be read inside a folder or a file, such as pages without text.
    """

    documents: tuple[Document, ...]
    skipped: tuple[Skipped, ...]


def read_context(paths: Sequence[Path]) -> ContextFiles:
    """Read files and folders as one context; a file that is reached twice is read once.

    Raises:
        InputError: there is no path, a given file cannot be read as text (such as a PDF of pictures), or a folder
            contains no text.
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
    """Documents from what a caller gives: one or several documents, texts or paths.

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
