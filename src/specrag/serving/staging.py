"""Puts a job's documents where it wants them, and back where the index has not followed.

What a job replaces or removes is kept beside its upload until the index holds the new state. Every step is one rename,
and :func:`move` goes on from whatever a kill has left, also of :func:`take_back`, which is its inverse::

    documents/NAME           the document
    incoming/JOB/NAME        what the job adds
    incoming/JOB/replaced/NAME   what it adds it for, or what it removes
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from specrag.retrieval.disk import sync
from specrag.serving.job import Job
from specrag.serving.places import Place

_REPLACED = "replaced"  # no document is called so: its name would need an ending


class _Paths(NamedTuple):
    """Where the files of one name lie."""

    document: Path
    incoming: Path
    replaced: Path


def move(job: Job, place: Place) -> None:
    """Bring the documents to where the job wants them; may be done twice.

    Raises:
        OSError: the disk refuses.
    """
    place.documents.mkdir(parents=True, exist_ok=True)
    (place.incoming / job.id / _REPLACED).mkdir(parents=True, exist_ok=True)
    for paths in _paths(job, place):
        if job.action == "add" and not paths.incoming.exists():
            continue  # it has been moved before
        if paths.document.exists():
            _rename(paths.document, paths.replaced)
        if job.action == "add":
            _rename(paths.incoming, paths.document)


def take_back(job: Job, place: Place, names: frozenset[str]) -> None:
    """Undo :func:`move` for some of the job's documents; may be done twice.

    Raises:
        OSError: the disk refuses.
    """
    for paths in _paths(job, place):
        if paths.document.name not in names:
            continue
        if job.action == "add" and paths.document.exists() and not paths.incoming.exists():
            _rename(paths.document, paths.incoming)
        if paths.replaced.exists():
            _rename(paths.replaced, paths.document)


def not_indexed(job: Job, place: Place, known: dict[str, str]) -> frozenset[str]:
    """Those of the job's documents whose state the index does not hold.

    Args:
        known: SHA-256 of the documents that it holds, in hexadecimal, by path.

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


def _rename(source: Path, target: Path) -> None:
    """Rename for good: a step is on the disk before the next one."""
    source.replace(target)
    sync(target.parent)
    sync(source.parent)
