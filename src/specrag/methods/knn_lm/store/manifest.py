"""The manifest of a kNN-LM datastore: its model, how the text was cut, and its files.

The layout is that of :mod:`specrag.artifacts`. The files of a generation::

    keys.f16                half-precision floats [entries, dimension]
    norms.f32               squared length of each key
    values                  the next tokens, uint16 or int32 [entries]
    windows                 which text was read (windows.py)
    hnsw.faiss, pq.faiss    approximate indexes, if they were requested
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from specrag.artifacts import BUILDING, MANIFEST, FileRecord, GenerationManifest
from specrag.checks import check_whole
from specrag.engine import HiddenState
from specrag.errors import SpecragError

FORMAT = 1
"""The version of the layout and of every file in it."""

KIND = "knn-lm"

#: The hidden state that is the key.
HIDDEN: HiddenState = "ffn_input"

KEYS, NORMS, VALUES, WINDOWS = "keys.f16", "norms.f32", "values", "windows"


class DatastoreError(SpecragError):
    """A datastore is damaged, unfinished, or was made with another model."""


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """The model that made the keys; another model makes other keys.

    Args:
        name: as it was requested.
        fingerprint: of its weights, configuration and tokenizer.
        dtype: of its numbers while it read.
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
        tokens: maximum tokens of a window.
        context: tokens at the beginning of a window that the previous window has covered: they are read but make no
            entries. So every entry except a document's first ones has at least this context.

    Raises:
        InputError: a value cannot be used.
    """

    tokens: int = 512
    context: int = 128

    def __post_init__(self) -> None:
        check_whole("window", self.tokens, 2)
        check_whole("context", self.context, 0, self.tokens // 2)


@dataclass(frozen=True, kw_only=True)
class DatastoreManifest(GenerationManifest):
    """Manifest of a datastore.

    Attributes:
        model: the model that made the keys.
        windows: how the text was cut.
        documents: number of documents that were read.
        entries: tokens with a key.
        largest_norm: the largest length of a key.
        indexes: approximate indexes, by name, with their settings.
    """

    what: ClassVar[str] = "datastore"
    error: ClassVar[type[SpecragError]] = DatastoreError
    rebuild: ClassVar[str] = (
        "delete the datastore's folder and build it again with `specrag index --knn-lm`, or restore it from a copy"
    )

    model: ModelRecord
    windows: WindowSettings
    documents: int
    entries: int
    largest_norm: float
    indexes: Mapping[str, Mapping[str, int]]

    def header(self) -> dict[str, Any]:
        return {"format": FORMAT, "kind": KIND}

    @classmethod
    def parse(cls, folder: Path, content: dict[str, Any]) -> Self:
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

    @classmethod
    def missing(cls, folder: Path) -> SpecragError:
        if (folder / BUILDING).is_dir():
            what, remedy = (
                "is unfinished",
                "run `specrag index --knn-lm` again, it goes on where it was stopped",
            )
        elif folder.is_dir():
            what = "is no datastore"
            remedy = "give the folder that `specrag index PATH --knn-lm --kb DIR` has made"
        else:
            what, remedy = "does not exist", "make it with `specrag index PATH --knn-lm --kb DIR`"
        return DatastoreError(f"datastore: {str(folder)!r} {what}: {remedy}")

    def check_sizes(self, folder: Path) -> None:
        super().check_sizes(folder)
        if self.files[KEYS].bytes != 2 * self.entries * self.model.dimension:
            raise self.damaged(
                folder / MANIFEST, f"says {self.entries:,} entries, which is not what the keys hold"
            )
