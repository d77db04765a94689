"""Vectors that outlive a kill: what a build has encoded, in shards that its rerun reads instead.

A vector is found by its passage's key and belongs to one encoder, whose fingerprint names the folder. A shard is
written under another name and renamed, so that it is whole or not there.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from specrag.retrieval.disk import sync

_PREFIX = "vectors-"


class VectorShards:
    """The vectors of an unfinished build.

    Args:
        folder: holds the shards of several encoders, of which all but this one's are removed by :meth:`open`.
        fingerprint: of the encoder.
        dimension: elements of a vector.
    """

    def __init__(self, folder: Path, fingerprint: str, dimension: int) -> None:
        self.folder = folder / f"{_PREFIX}{hashlib.sha256(fingerprint.encode()).hexdigest()[:16]}"
        self.dimension = dimension
        self._type = np.dtype([("key", "V16"), ("vector", "<f4", (dimension,))])
        self._places: dict[bytes, tuple[int, int]] = {}
        self._shards: list[np.ndarray] = []

    def open(self) -> None:
        """Find what an earlier build has left."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for other in self.folder.parent.glob(f"{_PREFIX}*"):
            if other != self.folder:
                shutil.rmtree(other, ignore_errors=True)
        for path in sorted(self.folder.glob("*.npy")):
            try:
                shard = np.lib.format.open_memmap(path, mode="r")
                if shard.dtype != self._type or shard.ndim != 1:
                    raise ValueError("another type")
            except (OSError, ValueError):  # torn by a power failure: encoded again
                path.unlink()
                continue
            self._remember(shard)

    def _remember(self, shard: np.ndarray) -> None:
        number = len(self._shards)
        self._shards.append(shard)
        for row, key in enumerate(shard["key"]):
            self._places[key.tobytes()] = (number, row)

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    def __len__(self) -> int:
        return len(self._places)

    def add(self, keys: Sequence[bytes], vectors: np.ndarray) -> None:
        """Write one shard.

        Args:
            keys: of the passages.
            vectors: float32 [keys, dimension].

        Raises:
            OSError: the disk refuses; earlier shards stay.
        """
        shard = np.empty(len(keys), dtype=self._type)
        shard["key"] = np.frombuffer(b"".join(keys), dtype="V16")
        shard["vector"] = vectors
        temporary = self.folder / "shard.new"
        # A plain write, since a full disk kills a process that writes to a mapped file.
        with temporary.open("wb") as file:
            np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(shard))
            file.write(shard.tobytes())
            file.flush()
            os.fsync(file.fileno())
        path = self.folder / f"{len(self._shards):06d}-{keys[0].hex()}.npy"
        temporary.rename(path)
        sync(self.folder)
        self._remember(np.lib.format.open_memmap(path, mode="r"))

    def find(self, key: bytes) -> np.ndarray:
        """The vector of a passage. float32 [dimension]."""
        number, row = self._places[key]
        vector: np.ndarray = self._shards[number]["vector"][row]
        return vector

    def close(self) -> None:
        """Let the files go; they stay on the disk."""
        self._shards.clear()
        self._places.clear()


def write_vectors(path: Path, passages: int, dimension: int, blocks: Iterable[np.ndarray]) -> None:
    """Write a file for ``np.load``, float32 [passages, dimension], block of rows by block of rows."""
    header = {"descr": "<f4", "fortran_order": False, "shape": (passages, dimension)}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for block in blocks:
            file.write(np.ascontiguousarray(block, dtype="<f4").tobytes())
