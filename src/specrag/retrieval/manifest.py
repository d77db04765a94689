"""The one file that says what a knowledge base is; replacing it publishes a new generation.

Layout of a knowledge base::

    manifest.json           format, generation, encoder, chunking, and each file's size and checksum
    generations/000007/     the files of the generation that the manifest names
    building/               vectors that an unfinished build has encoded, for its rerun
    writer.lock             held by the process that writes
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from specrag.retrieval.disk import KnowledgeBaseError, checksum, replace_file

MANIFEST = "manifest.json"
GENERATIONS = "generations"
BUILDING = "building"

FORMAT = 1
"""The version of the layout and of every file in it."""

_Record = TypeVar("_Record")


@dataclass(frozen=True, slots=True)
class EncoderRecord:
    """The encoder that made the vectors; one with another fingerprint makes others."""

    name: str
    dtype: str
    fingerprint: str
    dimension: int


@dataclass(frozen=True, slots=True)
class ChunkingRecord:
    """How documents were cut: the most tokens of a passage, and how many it repeats of the one before."""

    tokens: int
    overlap: int


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What a finished file looked like."""

    bytes: int
    checksum: str

    @classmethod
    def of(cls, path: Path) -> FileRecord:
        """Measure a file."""
        return cls(path.stat().st_size, checksum(path))


@dataclass(frozen=True, slots=True)
class Manifest:
    """A knowledge base in short.

    Attributes:
        generation: the number of the folder that holds its files; grows with each change.
        documents: files indexed.
        passages: pieces that they were cut into.
        roots: the paths that were indexed, absolute; a document's source is its path below one of them.
        files: size and checksum of each file, by its name in the generation's folder.
    """

    generation: int
    encoder: EncoderRecord
    chunking: ChunkingRecord
    documents: int
    passages: int
    roots: tuple[str, ...]
    files: Mapping[str, FileRecord]

    @property
    def bytes(self) -> int:
        """Size of all files together."""
        return sum(record.bytes for record in self.files.values())

    @staticmethod
    def exists(folder: Path) -> bool:
        """Whether a folder holds a finished knowledge base, damaged or not."""
        return (folder / MANIFEST).is_file()

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a knowledge base.

        Raises:
            KnowledgeBaseError: the folder is none, has another format, or its manifest is damaged.
        """
        try:
            data = (folder / MANIFEST).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise _no_knowledge_base(folder) from None
        except OSError as error:
            raise KnowledgeBaseError(
                f"knowledge base: {str(folder / MANIFEST)!r} cannot be read ({error.strerror or error}): "
                "make it readable"
            ) from error
        try:
            content = json.loads(data)
            version = content.pop("format")
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise _damaged(folder / MANIFEST, "cannot be read") from error
        if version != FORMAT:
            raise KnowledgeBaseError(
                f"knowledge base: {str(folder)!r} has format {version!r} and this version of specrag reads "
                f"format {FORMAT}: build it again in another folder with `specrag index`"
            )
        try:
            files = {str(name): _typed(FileRecord, record) for name, record in content.pop("files").items()}
            encoder = _typed(EncoderRecord, content.pop("encoder"))
            chunking = _typed(ChunkingRecord, content.pop("chunking"))
            roots = tuple(map(str, content.pop("roots")))
            return cls(files=files, encoder=encoder, chunking=chunking, roots=roots, **content)
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise _damaged(folder / MANIFEST, "cannot be read") from error

    def write(self, folder: Path) -> None:
        """Publish: from now on the knowledge base is this one.

        Raises:
            OSError: the disk refuses; the old manifest stays.
        """
        content = {"format": FORMAT, **asdict(self)}
        replace_file(folder / MANIFEST, f"{json.dumps(content, indent=1)}\n".encode())

    def generation_folder(self, folder: Path) -> Path:
        """Where the files lie."""
        return folder / GENERATIONS / f"{self.generation:06d}"

    def check_sizes(self, folder: Path) -> None:
        """Make sure that every file is there in its whole length; reads none of them.

        Raises:
            KnowledgeBaseError: one is missing, cut or longer.
        """
        for name, record in self.files.items():
            path = self.generation_folder(folder) / name
            try:
                size = path.stat().st_size
            except OSError as error:
                raise _damaged(path, f"is missing ({error.strerror or error})") from error
            if size != record.bytes:
                raise _damaged(path, f"has {size:,} bytes, not {record.bytes:,}")

    def verify(self, folder: Path, names: Iterable[str]) -> None:
        """Make sure that the content of these files is the recorded one.

        Raises:
            KnowledgeBaseError: one has another checksum.
        """
        for name in names:
            path = self.generation_folder(folder) / name
            record = self.files.get(name)
            if record is None:
                raise _damaged(folder / MANIFEST, f"does not name the file {name!r}")
            try:
                found = checksum(path)
            except OSError as error:
                raise _damaged(path, f"cannot be read ({error.strerror or error})") from error
            if found != record.checksum:
                raise _damaged(path, "has another checksum than the one recorded")


def _typed(kind: type[_Record], content: Mapping[str, Any]) -> _Record:
    """A record whose values are of the types that it states."""
    types = {field.name: {"str": str, "int": int}[str(field.type)] for field in fields(kind)}  # type: ignore[arg-type]
    for name, value in content.items():
        if type(value) is not types[name]:
            raise TypeError(name)
    return kind(**content)


def _damaged(path: Path, what: str) -> KnowledgeBaseError:
    return KnowledgeBaseError(
        f"knowledge base: {str(path)!r} {what}: it is damaged; delete the knowledge base's folder and build "
        "it again with `specrag index`, or restore it from a copy"
    )


def _no_knowledge_base(folder: Path) -> KnowledgeBaseError:
    if (folder / BUILDING).is_dir():
        what, remedy = "is unfinished", "run `specrag index` again, it goes on where it was stopped"
    elif folder.is_dir():
        what, remedy = "is no knowledge base", "give the folder that `specrag index PATH --kb DIR` has made"
    else:
        what, remedy = "does not exist", "make it with `specrag index PATH --kb DIR`"
    return KnowledgeBaseError(f"knowledge base: {str(folder)!r} {what}: {remedy}")
