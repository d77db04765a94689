"""The record of an upload or a deletion, and the moves of its documents into place and back.

What a job replaces or removes is kept beside its upload until the index holds the new state. Every step is one rename,
and :func:`move` goes on from whatever a kill has left, even halfway through :func:`take_back`, its inverse::

    documents/NAME           the document
    incoming/JOB/NAME        what the job adds
    incoming/JOB/replaced/NAME   what the job replaces or removes
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

from specrag.artifacts import make_folder, rename
from specrag.serving.knowledge.places import Place

ENDED = ("done", "failed", "cancelled")


@dataclass(slots=True)
class Job:
    """An upload or a deletion.

    Attributes:
        id: 32 hexadecimal digits.
        kb: its knowledge base.
        key: name of the key that asked for it.
        action: ``add`` or ``remove`` documents.
        files: their names.
        status: ``waiting``, ``running``, ``done``, ``failed`` or ``cancelled``.
        stage: ``reading``, ``encoding`` or ``indexing``, while it runs.
        done, total: progress of the stage.
        error: why it failed, for the client.
        report: what it changed.
        created: seconds since 1970.
        tries: how often it was started.
        cancelled: whether it is to end before it is done.
        makes_kb: whether it makes its knowledge base, which is removed again if the job fails.
    """

    id: str
    kb: str
    key: str
    action: Literal["add", "remove"]
    files: tuple[str, ...]
    status: Literal["waiting", "running", "done", "failed", "cancelled"] = "waiting"
    stage: str | None = None
    done: int = 0
    total: int = 0
    error: str | None = None
    report: dict[str, Any] | None = None
    created: float = field(default_factory=time.time)
    tries: int = 0
    cancelled: bool = False
    makes_kb: bool = False


def read_job(path: Path) -> Job | None:
    """Read a job's record; None if there is none, or it cannot be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        known = {entry.name for entry in fields(Job)}
        values = {name: value for name, value in content.items() if name in known}
        return Job(**{**values, "files": tuple(values["files"])})
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


_REPLACED = "replaced"  # no document has this name: it would need an ending


class _Paths(NamedTuple):
    """Where the files of one name are."""

    document: Path
    incoming: Path
    replaced: Path


def move(job: Job, place: Place) -> None:
    """Move the documents to where the job wants them; may be done twice.

    Raises:
        OSError: the disk refuses.
    """
    make_folder(place.documents)
    make_folder(place.incoming / job.id / _REPLACED)
    for paths in _paths(job, place):
        if job.action == "add" and not paths.incoming.exists():
            continue  # already moved
        if paths.document.exists():
            rename(paths.document, paths.replaced)
        if job.action == "add":
            rename(paths.incoming, paths.document)


def take_back(job: Job, place: Place, names: frozenset[str]) -> None:
    """Undo :func:`move` for some of the job's documents; may be done twice.

    Raises:
        OSError: the disk refuses.
    """
    for paths in _paths(job, place):
        if paths.document.name not in names:
            continue
        if job.action == "add" and paths.document.exists() and not paths.incoming.exists():
            rename(paths.document, paths.incoming)
        if paths.replaced.exists():
            rename(paths.replaced, paths.document)


def not_indexed(job: Job, place: Place, known: dict[str, str]) -> frozenset[str]:
    """The names of the job's documents whose state the index does not hold.

    Args:
        known: SHA-256 of the documents that the index holds, in hexadecimal, by path.

    Raises:
        OSError: a document cannot be read.
    """
    found = set()
    for paths in _paths(job, place):
        path = paths.document
        wanted = None
        if job.action == "add" and path.exists():
            with path.open("rb") as file:
                wanted = hashlib.file_digest(file, "sha256").hexdigest()
        held = known.get(str(path.resolve()))
        if held != wanted or (job.action == "add" and wanted is None):
            found.add(path.name)
    return frozenset(found)


def _paths(job: Job, place: Place) -> Iterator[_Paths]:
    folder = place.incoming / job.id
    for name in job.files:
        yield _Paths(place.documents / name, folder / name, folder / _REPLACED / name)
