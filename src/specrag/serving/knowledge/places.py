"""Where the knowledge bases of a server lie, and what things in them may be called.

Layout of ``kb_root``, one folder a knowledge base::

    NAME/kb.json            says that it was made through the API, and how documents are cut
    NAME/index/             the knowledge base, for one that was made through the API
    NAME/documents/         uploaded documents that are indexed
    NAME/incoming/JOB/      uploads that are arriving or wait to be indexed, and what they replace
    NAME/jobs/JOB.json      what was uploaded, and how it ended

Every part of a path that a request gives goes through this file. Names that would need repair are refused, never
repaired, so that two of them cannot meet.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from specrag.errors import InputError
from specrag.serving.settings import NAME_PATTERN

_NAME = re.compile(NAME_PATTERN)
_JOB = re.compile(r"[0-9a-f]{32}")
_RESERVED = frozenset({"jobs"})
_LONGEST = 200  # bytes of a document's name; file systems take 255
_FORBIDDEN = frozenset('/\\:*?"<>|')

#: Endings of documents that can be read; each also with ``.gz``, but those that are packed already.
ENDINGS = (
    ".txt", ".md", ".markdown", ".rst", ".html", ".htm", ".xhtml", ".pdf", ".docx", ".pptx", ".xlsx", ".odt", ".odp",
    ".ods", ".epub", ".eml", ".ipynb", ".csv", ".tsv", ".jsonl", ".ndjson", ".json", ".log", ".tex",
    # Code and settings, read as text.
    ".c", ".cc", ".cpp", ".cs", ".css", ".go", ".h", ".hpp", ".java", ".js", ".jsx", ".kt", ".lua", ".php", ".pl",
    ".proto", ".py", ".r", ".rb", ".rs", ".scala", ".sh", ".sql", ".swift", ".ts", ".tsx", ".ini", ".toml", ".xml",
    ".yaml", ".yml",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Place:
    """The folders of one knowledge base in ``kb_root``."""

    folder: Path

    @property
    def record(self) -> Path:
        """There for a knowledge base that was made through the API."""
        return self.folder / "kb.json"

    @property
    def index(self) -> Path:
        """The knowledge base's own folder, where no other is set."""
        return self.folder / "index"

    @property
    def documents(self) -> Path:
        """Uploaded documents."""
        return self.folder / "documents"

    @property
    def incoming(self) -> Path:
        """Uploads on their way."""
        return self.folder / "incoming"

    @property
    def jobs(self) -> Path:
        """Records of uploads."""
        return self.folder / "jobs"


def is_name(name: str) -> bool:
    """Whether a knowledge base may be called so."""
    return _NAME.fullmatch(name) is not None and name not in _RESERVED


def check_name(name: str) -> str:
    """A name for a knowledge base.

    Raises:
        InputError: it may not be called so.
    """
    if not is_name(name):
        remedy = "give 1 to 64 of a-z, 0-9, - and _, first a letter or digit; jobs is taken"
        raise InputError("name", name, remedy)
    return name


def is_job(identifier: str) -> bool:
    """Whether this is the form of a job's id."""
    return _JOB.fullmatch(identifier) is not None


def check_document(name: str) -> str:
    """A document's file name.

    Raises:
        InputError: it is a path, hidden, too long, holds what a terminal or a file system takes for something
            else, or ends in nothing that can be read.
    """
    remedy = _fault(name)
    if remedy is not None:
        raise InputError("files", name, remedy)
    return name


def _fault(name: str) -> str | None:
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        return "its name is no UTF-8; rename it"
    if not 1 <= size <= _LONGEST:
        return f"give it a name of 1 to {_LONGEST} bytes"
    if any(letter in _FORBIDDEN or unicodedata.category(letter)[0] == "C" for letter in name):
        return 'give a file name without folders, control characters, and any of \\ / : * ? " < > |'
    if unicodedata.normalize("NFC", name) != name:
        return "compose the characters of its name (Unicode NFC)"
    if name.startswith(".") or name != name.strip() or name.endswith("."):
        return "its name may not begin with a dot, or begin or end with a space"
    if not name.lower().removesuffix(".gz").endswith(ENDINGS):
        return f"its name must end in one of {' '.join(ENDINGS)}, or in one of these and .gz"
    return None


@dataclass(frozen=True, slots=True)
class Description:
    """A knowledge base in short.

    Attributes:
        name: in this server.
        kind: a folder of this machine, or a table of PostgreSQL.
        documents: files indexed; None where that is not known.
        passages: pieces that they were cut into.
        generation: grows with each change; 0 for one without documents.
        encoder: that made its vectors.
        writable: whether documents can be uploaded.
        problem: why it cannot be used now, if it cannot.
    """

    name: str
    kind: Literal["folder", "table"]
    documents: int | None = None
    passages: int | None = None
    generation: int = 0
    encoder: str | None = None
    writable: bool = False
    problem: str | None = None
