"""Where a server's knowledge bases are stored, and which names are valid in them.

Layout of ``kb_root``, one folder per knowledge base::

    NAME/kb.json            says that it was made through the API, and how documents are chunked
    NAME/index/             the knowledge base, for one that was made through the API
    NAME/documents/         uploaded documents that are indexed
    NAME/incoming/JOB/      uploads that are arriving or wait to be indexed, and what they replace
    NAME/jobs/JOB.json      what was uploaded, and how it ended

Every part of a path that comes from a request is checked here. Invalid names are refused, never repaired, so that two
names cannot collide.
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
_LONGEST = 200  # bytes of a document's name; file systems allow 255
_FORBIDDEN = frozenset('/\\:*?"<>|')

#: Endings of documents that can be read; also with ``.gz``, except those of formats that are packed already.
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
        """Exists if the knowledge base was made through the API."""
        return self.folder / "kb.json"

    @property
    def index(self) -> Path:
        """The index's folder, unless the settings name another."""
        return self.folder / "index"

    @property
    def documents(self) -> Path:
        """Uploaded documents."""
        return self.folder / "documents"

    @property
    def incoming(self) -> Path:
        """Uploads that are arriving or wait to be indexed."""
        return self.folder / "incoming"

    @property
    def jobs(self) -> Path:
        """Records of jobs."""
        return self.folder / "jobs"


def is_name(name: str) -> bool:
    """Whether a knowledge base may have this name."""
    return _NAME.fullmatch(name) is not None and name not in _RESERVED


def check_name(name: str) -> str:
    """Return the name of a knowledge base after checking it.

    Raises:
        InputError: the name is not valid.
    """
    if not is_name(name):
        remedy = "give 1 to 64 of a-z, 0-9, - and _, first a letter or digit; jobs is taken"
        raise InputError("name", name, remedy)
    return name


def is_job(identifier: str) -> bool:
    """Whether this has the form of a job's id."""
    return _JOB.fullmatch(identifier) is not None


def check_document(name: str) -> str:
    """Return a document's file name after checking it.

    Raises:
        InputError: it is a path, hidden, too long, holds characters that are special to a terminal or a file
            system, or has an ending that cannot be read.
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
    """A summary of a knowledge base.

    Attributes:
        name: its name on this server.
        kind: ``folder`` for a folder of this machine, ``table`` for a table of PostgreSQL or another store.
        documents: number of files indexed; None if unknown.
        passages: number of passages that they were cut into.
        generation: grows with each change; 0 for one without documents.
        encoder: name of the encoder that made its vectors.
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
