"""The one file that says what a kNN-LM datastore is; replacing it publishes a new generation.

Layout of a datastore::

    manifest.json           format, generation, model, how the text was cut, and each file's size and checksum
    generations/000001/     the files of the generation that the manifest names
        keys.f16                half-precision floats [entries, dimension]
        norms.f32               squared length of each key
        values                  the next tokens, uint16 or int32 [entries]
        windows                 which text was read (knn_windows.py)
        hnsw.faiss, pq.faiss    approximate indexes, if they were asked for
    building/               the same files of an unfinished build, for its rerun
    writer.lock             held by the process that writes
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specrag.engine.outputs import HiddenState
from specrag.errors import InputError, SpecragError
from specrag.retrieval.disk import checksum, replace_file
from specrag.retrieval.manifest import BUILDING, GENERATIONS, MANIFEST, FileRecord

FORMAT = 1
"""The version of the layout and of every file in it."""

KIND = "knn-lm"

#: The hidden state that is the key.
HIDDEN: HiddenState = "ffn_input"

KEYS, NORMS, VALUES, WINDOWS = "keys.f16", "norms.f32", "values", "windows"

_AGAIN = "delete the datastore's folder and build it again with `specrag index --knn-lm`, or restore it from a copy"


class DatastoreError(SpecragError):
    """A datastore is damaged, unfinished, or was made with another model."""


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """The model that made the keys; another one makes others.

    Args:
        name: as it was asked for.
        fingerprint: of its weights, configuration and tokenizer.
        dtype: its numbers while it read.
        dimension: elements of a key.
        vocab_size: number of its tokens.
    """

    name: str
    fingerprint: str
    dtype: str
    dimension: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class WindowSettings:
    """How the text is cut for the model.

    Args:
        tokens: most tokens of a window.
        context: tokens at the beginning of a window that the window before has covered: they are read, and make no
            entries. So every entry but a document's first ones has at least this context.

    Raises:
        InputError: a value cannot be used.
    """

    tokens: int = 512
    context: int = 128

    def __post_init__(self) -> None:
        if type(self.tokens) is not int or self.tokens < 2:
            raise InputError("window", self.tokens, "give a whole number of at least 2")
        if type(self.context) is not int or not 0 <= self.context <= self.tokens // 2:
            raise InputError("context", self.context, f"give a whole number from 0 to {self.tokens // 2}")


@dataclass(frozen=True, slots=True)
class DatastoreManifest:
    """A datastore in short.

    Attributes:
        generation: the number of the folder that holds its files; grows with each change.
        model: that made the keys.
        windows: how the text was cut.
        documents: that were read.
        entries: tokens with a key.
        largest_norm: the greatest length of a key.
        indexes: approximate indexes, by name, with their settings.
        files: size and checksum of each file, by its name in the generation's folder.
    """

    generation: int
    model: ModelRecord
    windows: WindowSettings
    documents: int
    entries: int
    largest_norm: float
    indexes: Mapping[str, Mapping[str, int]]
    files: Mapping[str, FileRecord]

    @property
    def bytes(self) -> int:
        """Size of all files together."""
        return sum(record.bytes for record in self.files.values())

    @staticmethod
    def exists(folder: Path) -> bool:
        """Whether a folder holds a finished datastore, damaged or not."""
        return (folder / MANIFEST).is_file()

    @classmethod
    def read(cls, folder: Path) -> DatastoreManifest:
        """The manifest of a datastore.

        Raises:
            DatastoreError: the folder is none, has another format, or its manifest is damaged.
        """
        path = folder / MANIFEST
        try:
            data = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise _no_datastore(folder) from None
        except OSError as error:
            reason = error.strerror or error
            raise DatastoreError(
                f"datastore: {str(path)!r} cannot be read ({reason}): make it readable"
            ) from error
        try:
            content: dict[str, Any] = json.loads(data)
            kind, version = content.pop("kind", None), content.pop("format")
            if kind != KIND:
                raise DatastoreError(
                    f"datastore: {str(folder)!r} is a knowledge base of passages: give a folder that "
                    "`specrag index --knn-lm` has made"
                )
            if version != FORMAT:
                raise DatastoreError(
                    f"datastore: {str(folder)!r} has format {version!r} and this version of specrag reads format "
                    f"{FORMAT}: build it again in another folder"
                )
            return cls(
                model=ModelRecord(**content.pop("model")),
                windows=WindowSettings(**content.pop("windows")),
                files={name: FileRecord(**record) for name, record in content.pop("files").items()},
                **content,
            )
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise _damaged(path, "cannot be read") from error

    def write(self, folder: Path) -> None:
        """Publish: from now on the datastore is this one.

        Raises:
            OSError: the disk refuses; the old manifest stays.
        """
        content = {"format": FORMAT, "kind": KIND, **asdict(self)}
        replace_file(folder / MANIFEST, f"{json.dumps(content, indent=1)}\n".encode())

    def generation_folder(self, folder: Path) -> Path:
        """Where the files lie."""
        return folder / GENERATIONS / f"{self.generation:06d}"

    def check_sizes(self, folder: Path) -> None:
        """Make sure that every file is there in its whole length; reads none of them.

        Raises:
            DatastoreError: one is missing, cut or longer.
        """
        for name, record in self.files.items():
            path = self.generation_folder(folder) / name
            try:
                size = path.stat().st_size
            except OSError as error:
                raise _damaged(path, f"is missing ({error.strerror or error})") from error
            if size != record.bytes:
                raise _damaged(path, f"has {size:,} bytes, not {record.bytes:,}")
        expected = 2 * self.entries * self.model.dimension
        if self.files[KEYS].bytes != expected:
            raise _damaged(
                folder / MANIFEST, f"says {self.entries:,} entries, which is not what the keys hold"
            )

    def verify(self, folder: Path) -> None:
        """Make sure that the content of the files is the recorded one; reads all of them.

        Raises:
            DatastoreError: one has another checksum.
        """
        for name, record in self.files.items():
            path = self.generation_folder(folder) / name
            try:
                found = checksum(path)
            except OSError as error:
                raise _damaged(path, f"cannot be read ({error.strerror or error})") from error
            if found != record.checksum:
                raise _damaged(path, "has another checksum than the one recorded")


def _damaged(path: Path, what: str) -> DatastoreError:
    return DatastoreError(f"datastore: {str(path)!r} {what}: it is damaged; {_AGAIN}")


def _no_datastore(folder: Path) -> DatastoreError:
    if (folder / BUILDING).is_dir():
        what, remedy = "is unfinished", "run `specrag index --knn-lm` again, it goes on where it was stopped"
    elif folder.is_dir():
        what, remedy = (
            "is no datastore",
            "give the folder that `specrag index PATH --knn-lm --kb DIR` has made",
        )
    else:
        what, remedy = "does not exist", "make it with `specrag index PATH --knn-lm --kb DIR`"
    return DatastoreError(f"datastore: {str(folder)!r} {what}: {remedy}")
