"""The manifest of a knowledge base, and the errors that name it.

The layout on disk is that of :mod:`specrag.artifacts`. A generation is a database that changes as documents are added
and removed (:mod:`specrag.retrieval.passage_store`); only a compaction starts a new generation.
"""

from __future__ import annotations

import contextlib
import shlex
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from specrag import artifacts
from specrag.artifacts import BUILDING, LOCK, GenerationManifest, Remedies, exclusive_lock
from specrag.errors import SpecragError

FORMAT = 2
"""The version of the layout and of all its files."""

DATABASE, VECTORS = "passages.sqlite", "vectors.f32"
"""Files of a generation."""

_AGAIN = "and run it again; what was there is intact"
_REMEDIES = Remedies(
    f"free some space, or choose a folder on a larger disk, {_AGAIN}",
    f"make it writable, or choose another folder, {_AGAIN}",
)

_Record = TypeVar("_Record")


class KnowledgeBaseError(SpecragError):
    """A knowledge base is damaged, of the wrong kind, in use, or cannot be written."""


def write_errors(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Turn write errors of a disk into one-line errors.

    Args:
        folder: the knowledge base being written.

    Raises:
        KnowledgeBaseError: the disk is full, or the folder cannot be written.
    """
    also = (sqlite3.OperationalError, RuntimeError)  # faiss's error
    return artifacts.write_errors(folder, "knowledge base", KnowledgeBaseError, _REMEDIES, also=also)


@contextlib.contextmanager
def writer_lock(folder: Path) -> Iterator[None]:
    """Hold the writer lock of a knowledge base; it is released when the process ends at the latest.

    Raises:
        KnowledgeBaseError: another process is writing there.
        OSError: the folder cannot be written.
    """

    def busy() -> None:
        raise KnowledgeBaseError(
            f"knowledge base: {str(folder)!r} is being written by another process: "
            "wait for it to end, or choose another folder"
        )

    with exclusive_lock(folder / LOCK, busy):
        yield


@dataclass(frozen=True, slots=True)
class EncoderRecord:
    """The encoder that made the vectors; another fingerprint means other vectors."""

    name: str
    dtype: str
    fingerprint: str
    dimension: int


@dataclass(frozen=True, slots=True)
class ChunkingRecord:
    """Chunking: the most tokens of a passage, and how many tokens it repeats from the one before."""

    tokens: int
    overlap: int


@dataclass(frozen=True, kw_only=True)
class Manifest(GenerationManifest):
    """Manifest of a knowledge base: what stays fixed while documents are added and removed."""

    what: ClassVar[str] = "knowledge base"
    error: ClassVar[type[SpecragError]] = KnowledgeBaseError
    rebuild: ClassVar[str] = (
        "delete the knowledge base's folder and build it again with `specrag index`, or restore it from a copy"
    )

    encoder: EncoderRecord
    chunking: ChunkingRecord

    def header(self) -> dict[str, Any]:
        return {"format": FORMAT}

    @classmethod
    def parse(cls, folder: Path, content: dict[str, Any]) -> Self:
        version = content.pop("format")
        if version != FORMAT:
            paths = [path for path in content.get("roots", ()) if isinstance(path, str)]
            raise KnowledgeBaseError(
                f"knowledge base: {str(folder)!r} has format {version!r} and this version of specrag reads "
                f"format {FORMAT}: build it again in another folder with "
                f"`specrag index {shlex.join(paths) or 'PATH'} --kb DIR`"
            )
        return cls(
            files={},
            generation=int(content.pop("generation")),
            encoder=_typed(EncoderRecord, content.pop("encoder")),
            chunking=_typed(ChunkingRecord, content.pop("chunking")),
        )

    def check_sizes(self, folder: Path) -> None:
        """Check that the files are there.

        Raises:
            KnowledgeBaseError: one is missing.
        """
        for name in (DATABASE, VECTORS):
            path = self.generation_folder(folder) / name
            if not path.is_file():
                raise self.damaged(path, "is missing")

    @classmethod
    def missing(cls, folder: Path) -> SpecragError:
        if (folder / BUILDING).is_dir():
            what, remedy = "is unfinished", "run `specrag index` again, it goes on where it was stopped"
        elif folder.is_dir():
            what, remedy = (
                "is no knowledge base",
                "give the folder that `specrag index PATH --kb DIR` has made",
            )
        else:
            what, remedy = "does not exist", "make it with `specrag index PATH --kb DIR`"
        return KnowledgeBaseError(f"knowledge base: {str(folder)!r} {what}: {remedy}")


def _typed(kind: type[_Record], content: Mapping[str, Any]) -> _Record:
    """Make a record and check the types of its values."""
    types = {field.name: {"str": str, "int": int}[str(field.type)] for field in fields(kind)}  # type: ignore[arg-type]
    for name, value in content.items():
        if type(value) is not types[name]:
            raise TypeError(name)
    return kind(**content)
