"""Open kNN-LM datastores: keys, next tokens, and their indexes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from specrag.artifacts import Generation
from specrag.errors import InputError
from specrag.methods.knn_lm.store.index import (
    INDEXES,
    FlatKeys,
    GraphSettings,
    IndexSettings,
    KeyIndex,
    QuantiserSettings,
)
from specrag.methods.knn_lm.store.manifest import (
    KEYS,
    NORMS,
    VALUES,
    DatastoreError,
    DatastoreManifest,
    ModelRecord,
)
from specrag.methods.knn_lm.store.scoring import Halves
from specrag.methods.knn_lm.store.windows import value_type
from specrag.retrieval.encoder import checksums
from specrag.retrieval.index import Floats, Longs

if TYPE_CHECKING:
    from specrag.models import LoadedModel


class Datastore:
    """An open datastore; several threads may search it. Made by :meth:`open`.

    Attributes:
        folder: of the generation that is open, which stays on disk as long as this object exists.
        halves: the keys' bits, uint16 [entries, dimension], memory-mapped.
    """

    def __init__(self, generation: Generation[DatastoreManifest]) -> None:
        folder, manifest = generation.folder, generation.manifest
        self.folder = folder
        self.manifest = manifest
        self._generation = generation
        shape = (manifest.entries, manifest.model.dimension)
        self.halves: Halves = np.memmap(folder / KEYS, dtype=np.uint16, mode="r", shape=shape)
        norms: Floats = np.memmap(folder / NORMS, dtype=np.float32, mode="r", shape=shape[:1])
        self._values = np.memmap(
            folder / VALUES, dtype=value_type(manifest.model.vocab_size), mode="r", shape=shape[:1]
        )
        self.flat = FlatKeys(self.halves, norms, manifest.largest_norm)
        self._open: dict[str, KeyIndex] = {"flat": self.flat}

    @classmethod
    def open(cls, folder: Path | str) -> Datastore:
        """Open the current generation of a datastore.

        Raises:
            DatastoreError: there is none, or a file is missing, truncated or longer than it was.
        """
        return cls(DatastoreManifest.open(Path(folder).expanduser()))

    def close(self) -> None:
        """Release the generation; mapped arrays stay valid while they are used."""
        self._generation.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        """Number of entries."""
        return self.manifest.entries

    @property
    def dimension(self) -> int:
        """Elements of a key."""
        return self.manifest.model.dimension

    def values(self, ids: Longs) -> Longs:
        """The next tokens of these entries, int64 of the same shape."""
        found: Longs = self.raw_values(ids).astype(np.int64)
        return found

    def raw_values(self, ids: Longs) -> npt.NDArray[np.generic]:
        """The same tokens, as they are stored."""
        found: npt.NDArray[np.generic] = self._values[ids]
        return found

    def index(self, name: str) -> KeyIndex:
        """An index by name; opened when it is first requested.

        Raises:
            InputError: there is no index of this name, or the datastore was built without it.
        """
        if name not in INDEXES:
            raise InputError("index", name, f"take one of {', '.join(INDEXES)}")
        if name not in self._open:
            settings = self.index_settings().get(name)
            if settings is None:
                remedy = (
                    f"the datastore was built without it; run `specrag index --knn-lm --{name}`, or take flat"
                )
                raise InputError("index", name, remedy)
            path = self.folder / index_file(name)
            if isinstance(settings, GraphSettings):
                from specrag.methods.knn_lm.store.approximate import GraphKeys  # imports faiss

                self._open[name] = GraphKeys.load(path, self.flat, settings)
            else:
                from specrag.methods.knn_lm.store.approximate import QuantisedKeys

                self._open[name] = QuantisedKeys.load(path, self.flat, settings)
        return self._open[name]

    def index_settings(self) -> dict[str, IndexSettings]:
        """Settings of its approximate indexes, by name."""
        kinds = {GraphSettings.name: GraphSettings, QuantiserSettings.name: QuantiserSettings}
        return {name: kinds[name](**values) for name, values in self.manifest.indexes.items()}

    def check_model(self, record: ModelRecord) -> None:
        """Check that the keys were made by a model.

        Raises:
            DatastoreError: the keys were made with another model, or in another dtype.
        """
        made = self.manifest.model
        where = f"the datastore {str(self.folder.parents[1])!r}"
        if record.fingerprint != made.fingerprint or record.dimension != made.dimension:
            raise DatastoreError(
                f"model: {record.name!r} is not the one that made {where}, {made.name!r}: use that one, or build "
                "another datastore"
            )
        if record.dtype != made.dtype:
            raise DatastoreError(
                f"dtype: {record.dtype!r} does not fit {where}, which was made in {made.dtype!r}: use that, or build "
                "another datastore"
            )


def index_file(name: str) -> str:
    """The file of an approximate index."""
    return f"{name}.faiss"


def build_index(folder: Path, dimension: int, largest_norm: float, settings: IndexSettings) -> None:
    """Build an approximate index over the keys in a folder, and write it there.

    Raises:
        InputError: there are too few keys for it.
    """
    keys: Halves = np.memmap(folder / KEYS, dtype=np.uint16, mode="r").reshape(-1, dimension)
    norms: Floats = np.memmap(folder / NORMS, dtype=np.float32, mode="r")
    flat = FlatKeys(keys, norms, largest_norm)
    path = folder / index_file(settings.name)
    if isinstance(settings, GraphSettings):
        from specrag.methods.knn_lm.store.approximate import GraphKeys

        GraphKeys.build(flat, settings, path)
    else:
        from specrag.methods.knn_lm.store.approximate import QuantisedKeys

        QuantisedKeys.build(flat, settings, path)


def model_record(loaded: LoadedModel) -> ModelRecord:
    """The record of a loaded model."""
    digest = hashlib.sha256(json.dumps(checksums(loaded.files)).encode()).hexdigest()[:32]
    dimension = int(loaded.model.config.hidden_size)  # type: ignore[attr-defined]
    return ModelRecord(loaded.name, digest, loaded.dtype, dimension, loaded.model.vocab_size)
