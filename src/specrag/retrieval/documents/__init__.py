"""From files to passages: text from many formats, documents, and chunks short enough for an encoder."""

from typing import TYPE_CHECKING

from specrag.lazy import lazy_names

if TYPE_CHECKING:
    from specrag.retrieval.documents.chunking import Chunker
    from specrag.retrieval.documents.contexts import (
        ContextChunk,
        ContextFiles,
        ContextItem,
        Message,
        cut_documents,
        cut_messages,
        documents_of,
        read_context,
    )
    from specrag.retrieval.documents.converters import Part, ReadingLimits, UnreadableError, decode
    from specrag.retrieval.documents.files import Skipped, SourceFile, find_files
    from specrag.retrieval.documents.kinds import check_kind
    from specrag.retrieval.documents.packages import PACKAGES, Package, most_unpacked
    from specrag.retrieval.documents.reader import Document, read_file
else:
    __getattr__ = lazy_names(__name__)

__all__ = [
    "PACKAGES",
    "Chunker",
    "ContextChunk",
    "ContextFiles",
    "ContextItem",
    "Document",
    "Message",
    "Package",
    "Part",
    "ReadingLimits",
    "Skipped",
    "SourceFile",
    "UnreadableError",
    "check_kind",
    "cut_documents",
    "cut_messages",
    "decode",
    "documents_of",
    "find_files",
    "most_unpacked",
    "read_context",
    "read_file",
]
